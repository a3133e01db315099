"""Prints what a kernel does, in one configuration.

    python -m flash_attn_cute.kernels describe sm90 forward --d 128 --causal

The page has the roles of a CTA, its pipelines with their arrive counts, its shared memory, and the steps of its steady
state. It needs no GPU and no compiler.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, get_args

from flash_attn_cute.kernels import registry
from flash_attn_cute.kernels.features import Features, PassName, words
from flash_attn_cute.kernels.schedule import Arrivals, Schedule
from flash_attn_cute.runtime.command_line import natural, run_command

_PROGRAM = "flash_attn_cute.kernels"
_ROWS = {"forward": "queries", "backward": "keys"}  # of a sequence, by which a pass's kernel is chosen


def page(schedule: Schedule, title: str) -> str:
    """A schedule as text, below a title."""
    used = [pipeline for pipeline in schedule.pipelines if pipeline.stages]
    roles = [(r.name, _range(r.warps), r.registers, r.does) for r in schedule.roles]
    pipelines = [
        (p.name, p.stages, _arrivals(p.full), p.num_bytes or "", _arrivals(p.empty) or "none", p.count) for p in used
    ]
    shared = [
        (b.name, " x ".join(map(str, b.shape)), b.modes, b.dtype, f"in {b.place_of}" if b.place_of else b.num_bytes)
        for b in schedule.shared
        if 0 not in b.shape
    ]
    steps = [(n, s.role, s.waits, s.does, s.signals) for n, s in enumerate(schedule.steps, 1)]
    parts = [
        f"{title}\n{schedule.kernel}\n{schedule.work}",
        f"Roles ({schedule.threads} threads)\n" + _table(("role", "warps", "registers", "does"), roles),
        f"Pipelines ({len(schedule.arrive_counts)} mbarriers)\n"
        + _table(("name", "stages", "filled by", "bytes", "released by", "a step is"), pipelines),
        f"Shared memory ({schedule.num_bytes:,} bytes)\n" + _table(("name", "shape", "of", "dtype", "bytes"), shared),
        "Steady state\n" + _table(("", "role", "waits for", "does", "signals"), steps),
        "Timeline\n" + schedule.timeline.strip("\n"),
    ]
    if schedule.tensor_memory:
        columns = [(x.name, _range(range(x.first, x.first + x.count)), x.holds) for x in schedule.tensor_memory]
        parts.insert(4, "Tensor memory\n" + _table(("name", "columns", "holds"), columns))
    if schedule.orders:
        orders = [(order.data, order.by) for order in schedule.orders]
        parts.append("Between proxies, threads and CTAs\n" + _table(("data", "ordered by"), orders))
    return "\n\n".join(parts)


def _range(warps: range) -> str:
    """The first and the last of a range, or the only one."""
    return str(warps[0]) if len(warps) == 1 else f"{warps[0]} to {warps[-1]}"


def _arrivals(all_of: Sequence[Arrivals]) -> str:
    """The arrive count, and who arrives; empty if no role does."""
    roles: dict[tuple[str, str], list[str]] = {}
    for a in all_of:
        roles.setdefault((a.each, a.ctas), []).append(a.role)
    who = [
        f"{each} {', '.join(names)}{f' of {ctas}' if ctas else ''}".lstrip() for (each, ctas), names in roles.items()
    ]
    return f"{sum(a.count for a in all_of)}: {'; '.join(who)}" if who else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> str:
    """Rows below a head, in columns."""
    cells = [head, *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=f"python -m {_PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    describe = top.add_subparsers(dest="command", required=True).add_parser("describe", help="print a kernel's page")
    describe.add_argument("architecture", choices=tuple(registry.ARCHITECTURES))
    describe.add_argument("pass_name", choices=get_args(PassName), metavar="pass")
    describe.add_argument("--d", type=int, required=True, help="head dimension of q and k")
    describe.add_argument("--d-v", type=int, help="head dimension of v (default: that of q and k)")
    describe.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    describe.add_argument("--causal", action="store_true", help="the feature right, by its usual name")
    describe.add_argument("--features", nargs="+", default=[], choices=tuple(words()), metavar="F", help="by name")
    describe.add_argument("--rows", type=natural, default=0, help="of a sequence, where a kernel is chosen by it")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    chosen = parser().parse_args(arguments)
    architecture = registry.ARCHITECTURES[chosen.architecture]
    one_pass = architecture.passes.get(chosen.pass_name)
    if one_pass is None:
        print(f"pass: expected one of {', '.join(architecture.passes)}, got {chosen.pass_name}", file=sys.stderr)
        return 2
    d, d_v = chosen.d, chosen.d if chosen.d_v is None else chosen.d_v
    widest = architecture.max_head_dim
    if not 0 < min(d, d_v) <= max(d, d_v) <= widest:
        print(f"--d, --d-v: expected 1 to {widest}, got {d} and {d_v}", file=sys.stderr)
        return 2
    features = Features.parse([*(["right"] if chosen.causal else []), *chosen.features])
    rows = {_ROWS[chosen.pass_name]: chosen.rows} if chosen.pass_name in _ROWS else {}
    config = one_pass.configure(chosen.dtype, d, d_v, features, **rows)
    flags = f" {Features.format(vars(config.features))}".rstrip()
    title = f"{architecture.name} {chosen.pass_name}, d = {d}, d_v = {d_v}, {chosen.dtype}{flags}"
    print(page(one_pass.schedule(config), title))
    return 0


if __name__ == "__main__":
    run_command(main)
