"""Cost model of the methods, by which ``method="auto"`` chooses: bytes received, buffers, and time spent waiting.

It models a forward and a backward pass on links and GPUs of the speeds below. It ignores latencies, other traffic and
slower links between hosts.
"""

from typing import NamedTuple

from flash_attn_cute.distributed import head_trade
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.rank_layout import Layout, common, side_by_side

# An H200 of an NVLink host: bytes a second in one direction and from memory, FLOP a second.
LINK, MEMORY, ARITHMETIC = 350e9, 3.5e12, 550e12
# What "auto" lets a method keep, if another one keeps less.
_MOST_BUFFERS = 8 << 30


class Estimate(NamedTuple):
    """Both passes by one method, of the rank that has most of each."""

    received: float  # bytes
    buffers: float  # bytes, beside inputs, results and gradients, at most at any time
    waiting: float  # seconds in which its GPU waits for messages, or merges and adds


def estimates(layout: Layout, shape: Shape) -> dict[str, Estimate]:
    """The methods that can serve an attention over the ranks of a layout."""
    found = {"all_gather": _all_gather(layout, shape), "ring": _ring(layout, shape)}
    if head_trade.refusal(shape.nheads, shape.nheads_k, layout.num_ranks) is None:
        found["all_to_all"] = trading(layout, shape, layout.num_ranks)
    return found


def best(found: dict[str, Estimate]) -> str:
    """The method that waits least, of those that keep little enough; or the one that keeps least."""
    fitting = {name: e for name, e in found.items() if e.buffers <= _MOST_BUFFERS}
    if not fitting:
        return min(found, key=lambda name: found[name].buffers)
    return min(fitting, key=lambda name: fitting[name].waiting)


def computing(layout: Layout, shape: Shape) -> float:
    """Seconds of both passes of the mean rank: two products forward, five backward."""
    area = sum(
        band.area(0, length_q, length_k)
        for band, length_q, length_k in zip(layout.bands, layout.lengths_q, layout.lengths_k, strict=True)
    )
    return 7.0 * area * shape.nheads * (shape.d + shape.d_v) / layout.num_ranks / ARITHMETIC


def _all_gather(layout: Layout, shape: Shape) -> Estimate:
    most = most_others = 0
    for rank in range(layout.num_ranks):
        needed = layout.needed_by(rank)
        rows = sum(stop - start for ranges in needed.values() for start, stop in ranges)
        own = sum(run.stop - run.start for runs in common(needed, layout.keys_of(rank)).values() for run in runs)
        most, most_others = max(most, rows), max(most_others, rows - own)
    key = shape.nheads_k * (shape.d + shape.d_v)
    # K and V in either pass, and their gradients in float32, which the owner of the keys collects, too.
    received = most_others * key * (2 * shape.itemsize + 4)
    # Gradients of all keys as summed, and those of a call, which kernels sum in a workspace if heads are grouped.
    buffers = most * key * (shape.itemsize + 3 * 4)
    return Estimate(received, buffers, received / LINK)


def _ring(layout: Layout, shape: Shape) -> Estimate:
    size, hops = layout.num_ranks, layout.hops()
    steps = max(hops)
    queries = max(layout.queries.num_rows(rank) for rank in range(size)) * shape.nheads
    blocks, key = [side_by_side(runs)[1] for runs in layout.travelling()], shape.nheads_k * (shape.d + shape.d_v)
    passing = max(sum(blocks[r - t] for t in range(1, size) if t <= hops[r - t]) for r in range(size)) * key
    keys = max(blocks) * key
    received = passing * (2 * shape.itemsize + 4)
    # The block, its sums and the next of either; out of all keys and of a step in float32.
    buffers = 3 * keys * (shape.itemsize + 4) + queries * max(shape.d, shape.d_v) * 8
    # Out of a step is written in float32, by threads and not by TMA, which is counted twice, and read; out of all keys
    # is read and written twice. Gradients of a step likewise, once each; their sums are read and written.
    merged = queries * shape.d_v * (28 - shape.itemsize)
    added = steps * queries * shape.d + passing
    merging = (steps * merged + added * (16 - shape.itemsize)) / MEMORY
    exposed = max(0.0, received / LINK - computing(layout, shape) * steps / size)
    return Estimate(received, buffers, exposed + merging)


def trading(layout: Layout, shape: Shape, size: int) -> Estimate:
    """Rows for heads and back, among so many ranks."""
    queries = max(layout.queries.num_rows(rank) for rank in range(layout.num_ranks)) * shape.nheads
    keys = max(layout.keys.num_rows(rank) for rank in range(layout.num_ranks)) * max(shape.nheads_k, size)
    # Forward q, k, v and out, backward their gradients; each is copied before it is sent, and put in order after.
    width = shape.d + shape.d_v
    forward = (queries + keys) * width * shape.itemsize
    # Gradients of a head of k that several ranks have are parts, and float32.
    backward = (
        queries * shape.itemsize + keys * (shape.itemsize if size <= shape.nheads_k else max(4, shape.itemsize))
    ) * width
    received = (forward + backward) * (size - 1) / size
    return Estimate(received, 3.0 * backward, received / LINK + 4.0 * (forward + backward) / MEMORY)
