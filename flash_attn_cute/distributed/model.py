"""What each method moves and waits for: the numbers by which ``method="auto"`` chooses, and those of the docs.

A model of one step of training: a forward and a backward pass, on links and GPUs as fast as written here. It knows
nothing of latencies and of other traffic.
"""

from typing import NamedTuple

from flash_attn_cute.distributed import heads
from flash_attn_cute.distributed.layout import Layout, common

# An H200 of an NVLink host: bytes a second in one direction and from memory, FLOP a second.
LINK, MEMORY, ARITHMETIC = 350e9, 3.5e12, 550e12


class Shape(NamedTuple):
    """Heads and dtype of an attention."""

    nheads: int
    nheads_k: int
    d: int
    d_v: int
    itemsize: int  # bytes an element


class Estimate(NamedTuple):
    """Both passes by one method: of the rank that has most of each."""

    bytes: float  # received
    seconds: float  # in which its GPU waits for messages, or merges


def estimates(layout: Layout, shape: Shape) -> dict[str, Estimate]:
    """The methods that can serve an attention over the ranks of a layout."""
    found = {"all_gather": _all_gather(layout, shape), "ring": _ring(layout, shape)}
    if heads.refusal(shape.nheads, shape.nheads_k, layout.num_ranks) is None:
        found["all_to_all"] = _all_to_all(layout, shape)
    return found


def flop(layout: Layout, shape: Shape) -> float:
    """FLOP of both passes of the mean rank: two products forward, five backward."""
    area = sum(
        band.area(0, length_q, length_k)
        for band, length_q, length_k in zip(layout.bands, layout.lengths_q, layout.lengths_k, strict=True)
    )
    return 7.0 * area * shape.nheads * (shape.d + shape.d_v) / layout.num_ranks


def _bytes_a_key(shape: Shape) -> int:
    """K and V in both passes, and their gradients in float32."""
    return shape.nheads_k * (shape.d + shape.d_v) * (2 * shape.itemsize + 4)


def _all_gather(layout: Layout, shape: Shape) -> Estimate:
    rows = 0
    for rank in range(layout.num_ranks):
        needed = layout.needed_by(rank)
        count = sum(stop - start for ranges in needed.values() for start, stop in ranges)
        own = common(needed, layout.keys_of(rank))
        rows = max(rows, count - sum(run.stop - run.start for runs in own.values() for run in runs))
    received = rows * _bytes_a_key(shape)
    return Estimate(received, received / LINK)


def _ring(layout: Layout, shape: Shape) -> Estimate:
    size = layout.num_ranks
    steps = max(layout.hops())
    received = steps * max(layout.keys.num_rows(rank) for rank in range(size)) * _bytes_a_key(shape)
    # Out of a step becomes float32, and out of all keys is read and written twice; gradients are read and written.
    queries = max(layout.queries.num_rows(rank) for rank in range(size)) * shape.nheads
    keys = max(layout.keys.num_rows(rank) for rank in range(size)) * shape.nheads_k
    added = queries * shape.d + keys * (shape.d + shape.d_v)
    merged = steps * (queries * shape.d_v * (24 + shape.itemsize) + added * (8 + shape.itemsize))
    waiting = max(0.0, received / LINK - flop(layout, shape) / ARITHMETIC * steps / size)
    return Estimate(received, waiting + merged / MEMORY)


def _all_to_all(layout: Layout, shape: Shape) -> Estimate:
    size = layout.num_ranks
    queries = max(layout.queries.num_rows(rank) for rank in range(size)) * shape.nheads
    keys = max(layout.keys.num_rows(rank) for rank in range(size)) * max(shape.nheads_k, size)
    # Forward q, k, v and out; backward their gradients.
    received = 2.0 * (queries + keys) * (shape.d + shape.d_v) * shape.itemsize * (size - 1) / size
    return Estimate(received, received / LINK)
