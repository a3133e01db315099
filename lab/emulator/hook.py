"""Puts emulated binaries in the place of those for SM100, where ``flash_attn_cute`` compiles a kernel."""

import functools
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from lab.emulator import build
from lab.emulator.mailbox import Mailbox, mailbox

HOPPER = (9, 0)


def replace_binary(kernel: Any, binary: bytes) -> None:
    """Gives what ``cute.compile`` returned another binary for the GPU.

    Raises:
        ValueError: it does not hold exactly one.
    """
    from cutlass._mlir import ir

    with kernel.ir_module.context, ir.Location.unknown():
        found = [
            operation
            for operation in kernel.ir_module.body.operations
            if operation.name == "llvm.mlir.global" and "kernels_binary" in str(operation.attributes["sym_name"])
        ]
        if len(found) != 1:
            raise ValueError(f"kernel: expected one binary in it, got {len(found)}")
        found[0].attributes["global_type"] = ir.TypeAttr.get(ir.Type.parse(f"!llvm.array<{len(binary)} x i8>"))
        found[0].attributes["value"] = ir.StringAttr.get(binary)


def planted(text: str, plant: tuple[str, str]) -> str:
    """PTX in which a bug has taken the place of what a regular expression matches; says on stderr how often."""
    pattern, replacement = plant
    new, count = re.subn(pattern, replacement, text)
    print(f"lab.emulator: {pattern!r} is replaced {count} times in a kernel", file=sys.stderr)
    return new


def emulating(compile_kernel: Callable[..., Any], plant: tuple[str, str] | None = None) -> Callable[..., Any]:
    """``flash_attn_cute.jit.compile.compile_kernel``, whose kernels for SM100 run on Hopper.

    It raises ``RefusedError`` if something in a kernel is not emulated, and ``BuildError`` if nvcc or ptxas fails.
    """

    @functools.wraps(compile_kernel)
    def compile_emulated(config: Any, *options: Any) -> Any:
        if not _is_for_sm100(config):
            return compile_kernel(config, *options)
        import cutlass.cute as cute
        from cutlass.base_dsl.compiler import DumpDir

        with tempfile.TemporaryDirectory() as folder:
            kernel = compile_kernel(config, cute.KeepPTX, DumpDir(folder), *options)
        text = kernel.artifacts.PTX
        binary, _ = build.build(text if plant is None else planted(text, plant))
        replace_binary(kernel, binary)
        return kernel

    return compile_emulated


def _is_for_sm100(config: Any) -> bool:
    return str(config.architecture) == "sm100"


# Of the command and of the pytest plugin, by their names.
OPTIONS: dict[str, dict[str, Any]] = {
    "jitter-us": {
        "type": float,
        "default": 0.0,
        "help": "longest random delay of what is asynchronous (default: none)",
    },
    "limit-s": {"type": float, "default": 20.0, "help": "how long a CTA may take (default: %(default)s)"},
    "b300": {"action": "store_true", "help": "the kernels of a B300 (default: those of a B200)"},
    "instead-of": {"metavar": "BACKEND", "help": "another backend whose calls go to sm100's kernels"},
    "plant": {"nargs": 2, "metavar": ("REGEX", "TEXT"), "help": "a bug: what is replaced in the kernels' PTX"},
}


def start(options: Mapping[str, Any]) -> Mailbox:
    """Emulates from now on, as values of ``OPTIONS`` say."""
    plant = tuple(options["plant"]) if options["plant"] else None
    page = install(gpu=(10, 3 * options["b300"]), instead_of=options["instead-of"], plant=plant)
    page.configure(jitter_ns=round(1e3 * options["jitter-us"]), limit_ms=round(1e3 * options["limit-s"]))
    return page


@functools.cache
def install(
    *, gpu: tuple[int, int] = (10, 0), instead_of: str | None = None, plant: tuple[str, str] | None = None
) -> Mailbox:
    """From now on calls of ``backend="sm100"`` run on Hopper GPUs, in this process.

    Kernels that are kept on disk get names of their own.

    Args:
        gpu: the compute capability whose kernels they are.
        instead_of: the name of another backend of kernels, whose calls go to sm100's, too.
        plant: a regular expression, and what takes the place of its matches in the PTX: a bug that is to be seen.

    Raises:
        ValueError: the package has no such kernels.
    """
    from flash_attn_cute.backends.cute import CuteBackend
    from flash_attn_cute.calls import dispatch
    from flash_attn_cute.jit import ahead, key
    from flash_attn_cute.jit import compile as compiling
    from flash_attn_cute.kernels import registry

    compiling.compile_kernel = emulating(compiling.compile_kernel, plant)
    ahead.begin = lambda config: None  # another process would emulate nothing
    identity = key.identity

    def identity_of_emulated(config: Any) -> dict[str, Any]:
        found = identity(config)
        return found | {"executor": build.identity(), "planted": plant} if _is_for_sm100(config) else found

    key.identity = identity_of_emulated
    architecture: Any = registry.ARCHITECTURES.get("sm100")
    if architecture is None or gpu not in architecture.targets:
        raise ValueError(f"gpu: flash_attn_cute has no kernels of backend 'sm100' for compute capability {gpu}")
    backend = CuteBackend(architecture.on(gpu)._replace(targets={HOPPER: architecture.targets[gpu]}))
    for name in ("sm100", instead_of or "sm100"):
        dispatch.BACKENDS[name] = backend
    mailbox().register()
    return mailbox()
