"""Cost model of the methods, by which ``method="auto"`` chooses: bytes, buffers, and the seconds of either pass.

A pass takes the time of the mean rank's kernels, and more for messages that nothing hides and for copies, sums and
merging. Kernels take time for each visible pair. They also take time for each query of each head, as tiles start, end
and are masked in part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flash_attn_cute.distributed import head_trade
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.packed_calls import Run
from flash_attn_cute.distributed.rank_layout import Layout, common, side_by_side

# Ranks of one host, which are neighbours in the group.
HOST = 8
# Bytes a second that a rank receives from ranks of its host (NVLink), and from others (a 400 Gbit/s adapter a rank).
LINK, NETWORK = 350e9, 45e9
# Seconds of a round of messages, whatever its size.
LATENCY = 30e-6
# Bytes a second from and to memory.
MEMORY = 3.0e12
# FLOP a second of either pass, and seconds for each query of a head of d = d_v = 128. Fitted to the lengths of
# benchmarks/results/lengths-cuda-bfloat16.json.
ARITHMETIC, ROW = (800e12, 630e12), (0.2e-9, 0.55e-9)
# What "auto" lets a method keep, if another one keeps less.
_MOST_BUFFERS = 8 << 30


class Estimate(NamedTuple):
    """One method, of the rank that has most of each."""

    received: float  # bytes, both passes
    buffers: float  # bytes, beside inputs, results and gradients, at most at any time
    forward: float  # seconds beside those of ``computing``
    backward: float

    @property
    def waiting(self) -> float:
        """Seconds of both passes beside those of ``computing``."""
        return self.forward + self.backward


def estimates(layout: Layout, shape: Shape, host: int = HOST) -> dict[str, Estimate]:
    """The methods that can serve an attention over the ranks of a layout, so many of which share a host."""
    found = {"all_gather": _all_gather(layout, shape, host), "ring": _ring(layout, shape, host)}
    if head_trade.refusal(shape.nheads, shape.nheads_k, layout.num_ranks) is None:
        found["all_to_all"] = trading(layout, shape, layout.num_ranks)
    return found


def best(found: dict[str, Estimate]) -> str:
    """The method that waits least, of those that keep little enough; or the one that keeps least."""
    fitting = {name: e for name, e in found.items() if e.buffers <= _MOST_BUFFERS}
    if not fitting:
        return min(found, key=lambda name: found[name].buffers)
    return min(fitting, key=lambda name: fitting[name].waiting)


def computing(layout: Layout, shape: Shape) -> tuple[float, float]:
    """Seconds of the mean rank's kernels, forward (two products) and backward (five)."""
    pairs = sum(
        band.area(0, length_q, length_k)
        for band, length_q, length_k in zip(layout.bands, layout.lengths_q, layout.lengths_k, strict=True)
    )
    product = pairs * shape.nheads * (shape.d + shape.d_v) / layout.num_ranks
    of_rows = [seconds / layout.num_ranks for seconds in _rows(sum(layout.lengths_q) * shape.nheads, shape)]
    return 2.0 * product / ARITHMETIC[0] + of_rows[0], 5.0 * product / ARITHMETIC[1] + of_rows[1]


def _rows(queries: float, shape: Shape) -> tuple[float, float]:
    """Seconds of either pass for queries, counted over heads, beside those for their visible pairs."""
    size = queries * (shape.d + shape.d_v) / 256
    return ROW[0] * size, ROW[1] * size


def _all_gather(layout: Layout, shape: Shape, host: int) -> Estimate:
    most = 0
    slowest = _Rows(0, 0)
    hosts = replace(layout, keys=layout.keys.merged(host)) if layout.num_ranks > host else None
    for rank in range(layout.num_ranks):
        needed = layout.needed_by(rank)
        rows = sum(stop - start for ranges in needed.values() for start, stop in ranges)
        others = rows - _num_rows(common(needed, layout.keys_of(rank)))
        network = 0 if hosts is None else rows - _num_rows(common(needed, hosts.keys_of(rank // host)))
        most = max(most, rows)
        slowest = max(slowest, _Rows(others - network, network), key=lambda rows: rows.seconds(1))
    key = shape.nheads_k * (shape.d + shape.d_v)
    # Gradients of all keys as summed, and those of a call, which kernels sum in a workspace if heads are grouped.
    buffers = most * key * (shape.itemsize + 3 * 4)
    # K and V in either pass, and their gradients in float32, which the owner of the keys collects, too.
    keys, sums = slowest.seconds(key * shape.itemsize), slowest.seconds(key * 4)
    return Estimate(sum(slowest) * key * (2 * shape.itemsize + 4), buffers, keys, keys + sums)


def _ring(layout: Layout, shape: Shape, host: int) -> Estimate:
    size, hops = layout.num_ranks, layout.hops()
    steps = max(hops)
    rows = max(layout.queries.num_rows(rank) for rank in range(size))
    queries = rows * shape.nheads
    blocks, key = [side_by_side(runs)[1] for runs in layout.travelling()], shape.nheads_k * (shape.d + shape.d_v)
    passing = max(sum(blocks[r - t] for t in range(1, size) if t <= hops[r - t]) for r in range(size))
    keys = max(blocks) * key
    # The block, its sums and the next of either; out of all keys and of a step in float32.
    buffers = 3 * keys * (shape.itemsize + 4) + queries * max(shape.d, shape.d_v) * 8
    # Queries meet each block in tiles of its own; on average half of either see each other under a causal mask.
    again = _rows(0.75 * min(passing, steps * rows) * shape.nheads, shape)
    # Out of a step is written in float32, by threads and not by TMA, which is counted twice, and read; out of all keys
    # is read and written twice. Gradients of a step likewise, once each; their sums are read and written.
    merged = steps * queries * shape.d_v * (28 - shape.itemsize) / MEMORY
    added = (steps * queries * shape.d + passing * key) * (16 - shape.itemsize) / MEMORY
    # Every step takes as long as its slowest link, and hides behind the kernels of a step.
    link = NETWORK if size > host else LINK
    hidden = [seconds * steps / size for seconds in computing(layout, shape)]
    forward, backward = (
        max(0.0, steps * LATENCY + passing * key * itemsize / link - time)
        for itemsize, time in zip((shape.itemsize, shape.itemsize + 4), hidden, strict=True)
    )
    received = passing * key * (2 * shape.itemsize + 4)
    return Estimate(received, buffers, forward + again[0] + merged, backward + again[1] + added)


def trading(layout: Layout, shape: Shape, size: int) -> Estimate:
    """Rows for heads and back, among so many neighbouring ranks."""
    queries = max(layout.queries.num_rows(rank) for rank in range(layout.num_ranks)) * shape.nheads
    keys = max(layout.keys.num_rows(rank) for rank in range(layout.num_ranks)) * max(shape.nheads_k, size)
    # Forward q, k, v and out, backward their gradients; each is copied before it is sent, and put in order after.
    width = shape.d + shape.d_v
    forward = (queries + keys) * width * shape.itemsize
    # Gradients of a head of k that several ranks have are parts, and float32.
    backward = (
        queries * shape.itemsize + keys * (shape.itemsize if size <= shape.nheads_k else max(4, shape.itemsize))
    ) * width
    network = max(0, size - HOST)
    parts = _Rows(size - 1 - network, network)
    seconds = [parts.seconds(sent / size) + 2.0 * LATENCY + 4.0 * sent / MEMORY for sent in (forward, backward)]
    return Estimate((forward + backward) * (size - 1) / size, 3.0 * backward, *seconds)


class _Rows(NamedTuple):
    """Rows that a rank receives: from its host, and from the network."""

    host: int
    network: int

    def seconds(self, size: float) -> float:
        """Seconds of a round of messages of so many bytes a row; both kinds arrive at the same time."""
        return LATENCY + max(self.host * size / LINK, self.network * size / NETWORK) if any(self) else 0.0


def _num_rows(found: Mapping[int, Sequence[Run]]) -> int:
    return sum(run.stop - run.start for runs in found.values() for run in runs)
