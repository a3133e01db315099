"""The command line of the folder of compiled kernels.

    python -m flash_attn_cute.jit list     what is in the folder
    python -m flash_attn_cute.jit warm     compile kernels before they are needed
    python -m flash_attn_cute.jit bundle   put kernels of the folder into one file, for FLASH_ATTN_CUTE_BUNDLE
    python -m flash_attn_cute.jit clear    empty the folder

The folder is named by FLASH_ATTN_CUTE_CACHE_DIR, and is flash_attn_cute in $XDG_CACHE_HOME or ~/.cache by default.
No command needs a GPU. Kernels are compiled for the processor and the major CUDA version of the driver at hand, so
warm a machine like the one that will run them.
"""

import argparse
import dataclasses
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from flash_attn_cute.jit import bundle, cache, disk, key, warm
from flash_attn_cute.kernels import registry
from flash_attn_cute.kernels.features import Features, PassName, words
from flash_attn_cute.kernels.selection import BLOCKS
from flash_attn_cute.runtime import settings
from flash_attn_cute.runtime.command_line import positive, run_command

MASKS: dict[str, tuple[str, ...]] = {"full": (), "causal": ("right",), "window": ("left", "right"), "left": ("left",)}
PASSES = get_args(PassName)
_SELECTIONS = "selection", "selection_backward"
_ON_REQUEST = *_SELECTIONS, "column_sums"  # passes that few need
LAYOUTS = ("dense", "packed")
FEATURES = tuple(word for word in words() if word not in ("packed", "left", "right"))  # which have options of their own
_ARCHITECTURES = registry.ARCHITECTURES
_DTYPES = tuple(dict.fromkeys(dtype for architecture in _ARCHITECTURES.values() for dtype in architecture.dtypes))
_MAX_HEAD_DIM = max(architecture.max_head_dim for architecture in _ARCHITECTURES.values())


def head_dims(text: str) -> tuple[int, int]:
    """A command-line argument ``d`` or ``d:d_v``."""
    parts = text.split(":")
    try:
        d, d_v = map(int, parts * 2 if len(parts) == 1 else parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or two, such as 128 or 192:128, got {text!r}") from None
    if not all(0 < x <= _MAX_HEAD_DIM and x % 8 == 0 for x in (d, d_v)):
        raise argparse.ArgumentTypeError(f"expected multiples of 8 up to {_MAX_HEAD_DIM}, got {text!r}")
    return d, d_v


def group_size(text: str) -> int:
    """A command-line argument: how many heads can share a tile."""
    value = positive(text)
    if 64 % value:
        raise argparse.ArgumentTypeError(f"expected a divisor of 64, got {value}")
    return value


_PROGRAM = "flash_attn_cute.jit"
_FEW_ROWS, _MANY_ROWS = 1, 1 << 20  # of a sequence, that gets the kernels of short and of long ones


def configurations(chosen: argparse.Namespace) -> list[Any]:
    """All that the command line asks for, each once: different head dimensions can share a kernel."""
    found: list[Any] = []
    for dtype, (d, d_v), mask, layout in itertools.product(
        chosen.dtypes, chosen.head_dims, chosen.masks, chosen.layouts
    ):
        features = Features.parse([*MASKS[mask], *chosen.features])
        # A dense batch with padding is packed.
        packed = layout == "packed" or features.seqused_q or features.seqused_k
        features = dataclasses.replace(features, packed=packed)
        for architecture, name in itertools.product(_on_all_gpus(chosen.architecture), _passes(chosen)):
            if name == "bias_gradient" and not features.bias:
                continue
            configure = architecture.passes[name].configure
            windows = (1, None) if features.left and features.right else (None,)
            options: list[dict[str, Any]] = [{}]
            if name == "forward":
                lengths = itertools.product(chosen.groups, (0, _MANY_ROWS), windows)
                options = [{"group": group, "queries": queries, "window": w} for group, queries, w in lengths]
            elif name == "backward":
                contentions = (False, True) if features.block_mask else (False,)
                cases = itertools.product((_FEW_ROWS, 0, _MANY_ROWS), windows, contentions)
                options = [{"keys": keys, "window": w, "low_contention": low} for keys, w, low in cases]
            elif name in _SELECTIONS:
                options = [{"group": group, "block": block} for group in chosen.groups for block in (1, *BLOCKS)]
            found += [configure(dtype, d, d_v, features, **each) for each in options]
    return list(dict.fromkeys(found))


def _passes(chosen: argparse.Namespace) -> list[Any]:
    """Passes that were asked for, or all that the architecture has but those that few need."""
    has = _ARCHITECTURES[chosen.architecture].passes
    missing = [name for name in chosen.passes or () if name not in has]
    if missing:
        raise ValueError(f"--passes: expected some of {', '.join(has)} for {chosen.architecture}, got {missing[0]}")
    if "bias_gradient" in chosen.passes and "bias" not in chosen.features:
        raise ValueError("--passes: expected bias_gradient with --features bias, whose gradient it is, got no bias")
    return [name for name in PASSES if name in (chosen.passes or has.keys() - set(_ON_REQUEST))]


def _on_all_gpus(name: str) -> list[registry.Architecture]:
    """An architecture for each kind of GPU that has code of its own."""
    architecture = _ARCHITECTURES[name]
    if len(architecture.targets) == 1:
        return [architecture]
    return [architecture.on(capability) for capability in architecture.targets]


def describe(fields: dict[str, Any]) -> str:
    """A configuration in one line, its features last, of which those are left out that are as by default."""
    numbers = " ".join(f"{name}={value}" for name, value in fields.items() if name != "features")
    return f"{numbers} {Features.format(fields['features'])}".rstrip()


def run_list(path: Path) -> None:
    """Prints every entry with its date, size, configuration and compiler."""
    try:
        with disk.Folder(path, create=False) as folder:
            entries = folder.entries()
    except FileNotFoundError:
        entries = []
    print(f"{path}: {len(entries)} kernels, {sum(entry.size for entry in entries) / 1e6:.1f} MB")
    for entry in entries:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        line = f"{entry.name[:12]}  {made}  {entry.size / 1e3:4.0f} kB  "
        if entry.identity is None:
            print(line + "unusable: it will be made again, or goes with clear")
            continue
        try:
            print(line + _origin(entry.identity))
        except (AttributeError, KeyError, TypeError):  # versions need not agree on what identities hold
            print(line + "of another version of the package: it is not found again, and goes with clear")


def _origin(identity: dict[str, Any]) -> str:
    """Configuration of an entry's kernel, and what compiled it."""
    kind = identity["kind"].removeprefix("flash_attn_cute.kernels.")
    compiler, host = identity["compiler"], identity["host"]
    made_by = f"DSL {compiler['nvidia-cutlass-dsl']}, CUDA {compiler['CUDA']}, {host['python']}, {host['machine']}"
    return f"{kind}  {describe(identity['config'])}  ({made_by})"


def run_warm(configs: list[Any], jobs: int) -> None:
    """Sees to it that the folder holds the kernels."""
    for warmed in warm.warm(configs, jobs):
        outcome = f"compiled in {warmed.seconds:.1f} s" if warmed.compiled else "was there"
        fields = dataclasses.asdict(warmed.config)
        print(f"{outcome:17}  {type(warmed.config).__name__}  {describe(fields)}", flush=True)


def run_bundle(path: Path, out: Path) -> None:
    """Puts the kernels of the folder that this installation can use into a bundle, and prints its path."""
    surroundings = key.surroundings()
    kernels = []
    with suppress(FileNotFoundError), disk.Folder(path, create=False) as folder:
        for entry in folder.entries():
            code = folder.read(entry.name)
            if code is not None and entry.identity is not None and surroundings.items() <= entry.identity.items():
                kernels.append((entry.identity, entry.name, code))
    if not kernels:
        raise FileNotFoundError(f"{path} has no kernels that this installation can use: python -m {_PROGRAM} warm")
    written = bundle.write(out.absolute(), kernels)
    print(f"{len(kernels)} kernels, {written.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    print(written)


def run_clear(path: Path) -> None:
    """Empties the folder of what this package has put into it."""
    try:
        with disk.Folder(path, create=False) as folder:
            removed = folder.clear()
    except FileNotFoundError:
        removed = 0
    print(f"{path}: {removed} kernels removed")


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    top = argparse.ArgumentParser(
        prog=f"python -m {_PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="list | warm | bundle | clear")
    commands.add_parser("list", help="what is in the folder")
    warming = commands.add_parser(
        "warm",
        help="compile kernels before they are needed",
        description="Compiles the kernel of every combination of what is given, unless it is there already.",
    )
    warming.add_argument(
        "--architecture",
        choices=tuple(_ARCHITECTURES),
        default=next(iter(_ARCHITECTURES)),
        help="whose kernels (default: %(default)s)",
    )
    warming.add_argument(
        "--head-dims",
        nargs="+",
        type=head_dims,
        metavar="D[:D_V]",
        default=[(64, 64), (128, 128)],
        help="of q and k, and of v (default: 64 128)",
    )
    warming.add_argument(
        "--groups",
        nargs="+",
        type=group_size,
        metavar="SIZE",
        default=[1],
        help="query heads of a key head, for kernels of few queries; 1 for those of many (default: 1)",
    )
    for option, one, names, default in (
        ("--passes", "PASS", PASSES, []),
        ("--dtypes", "DTYPE", _DTYPES, ["bfloat16"]),
        ("--masks", "MASK", tuple(MASKS), ["full", "causal"]),
        ("--layouts", "LAYOUT", LAYOUTS, list(LAYOUTS)),
        ("--features", "FEATURE", FEATURES, []),
    ):
        none = f"all but {', '.join(_ON_REQUEST)}" if option == "--passes" else "none"
        text = f"out of {', '.join(names)} (default: {' '.join(default) or none})"
        warming.add_argument(option, nargs="+", choices=names, metavar=one, default=default, help=text)
    warming.add_argument(
        "--jobs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes that compile at the same time (default: %(default)s, a processor each)",
    )
    bundling = commands.add_parser(
        "bundle",
        help="put kernels of the folder into one file",
        description="Writes the kernels of the folder that this installation can use into a file named by its content. "
        "Processes whose FLASH_ATTN_CUTE_BUNDLE holds the printed path read them from there, whoever owns the file.",
    )
    bundling.add_argument("out", type=Path, metavar="OUT", help="the folder that the file goes to")
    commands.add_parser("clear", help="empty the folder")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    chosen = parser().parse_args(arguments)
    try:
        path = settings.cache_dir()
        if path is None:
            raise ValueError("FLASH_ATTN_CUTE_CACHE_DIR: no kernels are kept on disk while it is 0")
        if chosen.command == "list":
            run_list(path)
        elif chosen.command == "warm":
            run_warm(configurations(chosen), chosen.jobs)
        elif chosen.command == "bundle":
            run_bundle(path, chosen.out)
        else:
            run_clear(path)
    except BrokenPipeError:  # of the output: ``run_command`` ends it
        raise
    except (
        OSError,
        ValueError,
        disk.UnsafeFolderError,
        cache.NotKeptWarning,
        key.NoCompilerError,
        warm.LostWorkerError,
    ) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    run_command(main)
