"""Puts emulated binaries in the place of those for SM100, where ``flash_attn_cute`` compiles a kernel."""

import functools
import tempfile
from collections.abc import Callable
from typing import Any

from tools.sm100_on_hopper import build
from tools.sm100_on_hopper.mailbox import Mailbox, mailbox

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


def emulate(kernel: Any) -> None:
    """Makes a kernel that was compiled for SM100, with its PTX kept, one for Hopper GPUs.

    Raises:
        RefusedError: something in it is not emulated.
        BuildError: nvcc or ptxas is missing or failed.
    """
    binary, _ = build.build(kernel.artifacts.PTX)
    replace_binary(kernel, binary)


def emulating(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``flash_attn_cute.jit.compile.compile_kernel``, whose kernels for SM100 run on Hopper."""

    @functools.wraps(compile_kernel)
    def compile_emulated(config: Any, *options: Any) -> Any:
        if not _is_for_sm100(config):
            return compile_kernel(config, *options)
        import cutlass.cute as cute
        from cutlass.base_dsl.compiler import DumpDir

        with tempfile.TemporaryDirectory() as folder:
            kernel = compile_kernel(config, cute.KeepPTX, DumpDir(folder), *options)
            emulate(kernel)
        return kernel

    return compile_emulated


def _is_for_sm100(config: Any) -> bool:
    return str(config.architecture) == "sm100"


@functools.cache
def install(*, gpu: tuple[int, int] = (10, 0), instead_of: str | None = None) -> Mailbox:
    """From now on calls of ``backend="sm100"`` run on Hopper GPUs, in this process.

    Kernels that are kept on disk get names of their own.

    Args:
        gpu: the compute capability whose kernels they are.
        instead_of: the name of another backend of kernels, whose calls go to sm100's, too.

    Raises:
        ValueError: the package has no such kernels.
    """
    from flash_attn_cute import dispatch
    from flash_attn_cute.backends.cute import CuteBackend
    from flash_attn_cute.jit import compile as compiling
    from flash_attn_cute.jit import key
    from flash_attn_cute.kernels import registry

    compiling.compile_kernel = emulating(compiling.compile_kernel)
    identity = key.identity

    def identity_of_emulated(config: Any) -> dict[str, Any]:
        found = identity(config)
        return found | {"executor": build.identity()} if _is_for_sm100(config) else found

    key.identity = identity_of_emulated
    architecture: Any = registry.ARCHITECTURES.get("sm100")
    if architecture is None or gpu not in architecture.targets:
        raise ValueError(f"gpu: flash_attn_cute has no kernels of backend 'sm100' for compute capability {gpu}")
    backend = CuteBackend(architecture.on(gpu)._replace(targets={HOPPER: architecture.targets[gpu]}))
    for name in ("sm100", instead_of or "sm100"):
        dispatch.BACKENDS[name] = backend
    mailbox().register()
    return mailbox()
