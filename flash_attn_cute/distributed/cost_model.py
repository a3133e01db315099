"""Cost model of the methods, by which ``method="auto"`` chooses: bytes, buffers, and the seconds of either pass.

A pass takes the time of the mean rank's kernels, and more for messages that nothing hides and for copies, sums and
merging. Kernels take time for each visible pair. They also take time for each query of each head, as tiles start, end
and are masked in part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_attn_cute.distributed import head_trade
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.packed_calls import Run, parts_of
from flash_attn_cute.distributed.rank_layout import Layout, common
from flash_attn_cute.distributed.ring_timeline import Steps, finished

Numbers = TypeVar("Numbers", float, Tensor)

# Constants are those of four H200s of one host, fitted to benchmarks/results/context_parallel-4-cuda-bfloat16.json;
# NETWORK is supposed.
# Ranks of one host, which are neighbours in the group.
HOST = 8
# Bytes a second that a rank receives: from several ranks of its host (NVLink), from one of them, and from other hosts
# (a 400 Gbit/s adapter a rank).
LINK, NEIGHBOUR, NETWORK = 309e9, 164e9, 45e9
# Seconds of a round of messages, whatever its size.
LATENCY = 19e-6
# Bytes a second from and to memory: those of the copy in that record, less what shorter ones lose.
MEMORY = 3.9e12
# FLOP a second of either pass, and seconds for each query of a head of d = d_v = 128.
ARITHMETIC, ROW = (748e12, 613e12), (0.30e-9, 1.05e-9)
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
    """Seconds of the mean rank's kernels, forward and backward."""
    forward, backward = _kernels(sum(layout.areas), sum(layout.lengths_q), shape)
    return forward / layout.num_ranks, backward / layout.num_ranks


def _kernels(pairs: Numbers, queries: Numbers, shape: Shape) -> tuple[Numbers, Numbers]:
    """Seconds of either pass over visible pairs and queries, of all heads: two products forward, five backward."""
    product, size = pairs * shape.nheads * (shape.d + shape.d_v), queries * shape.nheads * (shape.d + shape.d_v) / 256
    return 2.0 * product / ARITHMETIC[0] + ROW[0] * size, 5.0 * product / ARITHMETIC[1] + ROW[1] * size


def _all_gather(layout: Layout, shape: Shape, host: int) -> Estimate:
    hosts = replace(layout, keys=layout.keys.merged(host)) if layout.num_ranks > host else None
    each = (_all_gather_of(layout, shape, host, hosts, rank) for rank in range(layout.num_ranks))
    return Estimate(*map(max, zip(*each, strict=True)))


def _all_gather_of(layout: Layout, shape: Shape, host: int, hosts: Layout | None, rank: int) -> Estimate:
    """The estimate of one rank; ``hosts`` has the keys of whole hosts, if there are several."""
    whole = layout.whole_documents(rank)
    needed = {document: ranges for document, ranges in layout.needed_by[rank].items() if document not in whole}
    rows = sum(stop - start for ranges in needed.values() for start, stop in ranges)
    others = rows - _num_rows(common(needed, layout.keys_of[rank]))
    network = 0 if hosts is None else rows - _num_rows(common(needed, hosts.keys_of[rank // host]))
    queries = layout.queries.num_rows(rank) - sum(part.q_stop - part.q_start for part in whole.values())
    own = _kernels(sum(layout.areas[d] for d in whole), layout.queries.num_rows(rank) - queries, shape)
    received = _Rows(others - network, network, min(host, layout.num_ranks) - 1)
    key = shape.nheads_k * (shape.d + shape.d_v)
    # K and V in either pass, and their gradients in float32, which the owner of the keys collects, too.
    keys, sums = received.seconds(key * shape.itemsize), received.seconds(key * 4)
    # Half of out is added to; dQ is zeroed, and float32 is added to all of it. If the rank has documents of its own,
    # too, rows of q and out are copied, and backward those of q, out, dout and dQ. K and V are copied, and their
    # gradients summed in float32.
    query, own_keys = queries * shape.nheads * shape.d_v * shape.itemsize, layout.keys.num_rows(rank) * key
    copied = 2 * query + 4 * own_keys * shape.itemsize, 7 * query + own_keys * (4 * shape.itemsize + 8 * 4)
    if whole:
        copied = copied[0] + 4 * query, copied[1] + 8 * query
    # Gradients of all keys as summed, and those of a call, which kernels sum in a workspace if heads are grouped.
    buffers = rows * key * (shape.itemsize + 3 * 4)
    return Estimate(
        others * key * (2 * shape.itemsize + 4),
        buffers,
        max(0.0, keys - own[0]) + copied[0] / MEMORY,
        keys + max(0.0, sums - own[1]) + copied[1] / MEMORY,
    )


def _ring(layout: Layout, shape: Shape, host: int) -> Estimate:
    size, steps, key = layout.num_ranks, Steps.of(layout), shape.nheads_k * (shape.d + shape.d_v)
    rows, own_rows = (max(map(side.num_rows, range(size))) for side in (layout.queries, layout.keys))
    out, dq, keys = rows * shape.nheads * shape.d_v, rows * shape.nheads * shape.d, own_rows * key
    # Every step takes as long as its slowest link.
    link = NETWORK if size > host else NEIGHBOUR

    def message(rows: Tensor, itemsize: int) -> Tensor:
        return (rows > 0) * LATENCY + rows * key * itemsize / link

    forward, backward = _kernels(steps.pairs, steps.queries, shape)
    forward, backward = (
        forward + _merged(layout, steps, shape) / MEMORY,
        backward + _added(layout, steps, shape) / MEMORY,
    )
    # K and V are laid side by side at the start, and results are rounded at the end. Sums begin as zeros; those that
    # travel are copied before, and when they come home.
    block, begin = steps.coming.max().item() * key, 2 * keys * shape.itemsize
    copied = begin + out * (4 + shape.itemsize), begin + (dq + keys) * (4 + 4 + shape.itemsize) + 4 * 4 * block
    arriving, sums = message(steps.coming, shape.itemsize), (message(steps.coming, 4), message(steps.home, 4))
    ends = finished(forward, arriving), finished(backward, arriving, sums)
    waiting = (
        max(0.0, end + nbytes / MEMORY - mean)
        for end, nbytes, mean in zip(ends, copied, computing(layout, shape), strict=True)
    )
    received = steps.coming.sum(1).max().item() * key * (2 * shape.itemsize + 4)
    # The block, its sums and the next of either; out of all keys and of a step in float32.
    buffers = 3 * block * (shape.itemsize + 4) + max(out, dq) * 8
    return Estimate(received, buffers, *waiting)


def _merged(layout: Layout, steps: Steps, shape: Shape) -> Tensor:
    """Bytes from and to memory by which out of each rank's steps is merged."""
    ranks, elements = range(layout.num_ranks), steps.queries * shape.nheads * shape.d_v
    # Out of a step is written in float32 by threads and not by TMA, which is counted twice, and read; out of all keys
    # is read and written twice.
    found = elements * (28 - shape.itemsize)
    # Out of the rank's own keys is what others are merged with, if one call gives it, or else zeros are.
    has_zeros = torch.tensor([_takes_calls(layout, rank) for rank in ranks], device="cpu")
    found[:, 0] = torch.where(has_zeros, found[:, 0] + 4 * elements[:, 0], elements[:, 0] * (4 - shape.itemsize))
    return found


def _added(layout: Layout, steps: Steps, shape: Shape) -> Tensor:
    """Bytes from and to memory by which dQ, dK and dV of each rank's steps are added."""
    keys = steps.coming.roll(1, 1)  # those of a step have come in the one before
    keys[:, 0] = torch.tensor([layout.keys.num_rows(rank) for rank in range(layout.num_ranks)], device="cpu")
    elements = steps.queries * shape.nheads * shape.d + (steps.pairs > 0) * keys * shape.nheads_k * (
        shape.d + shape.d_v
    )
    # Those of a step are written and read in float32; those of all are read and written.
    return elements * (16 - shape.itemsize)


def _takes_calls(layout: Layout, rank: int) -> bool:
    """Whether a rank's queries attend to its own keys by several calls, as these have one window each."""
    parts = parts_of(layout.queries_of[rank], layout.keys_of[rank], layout.bands)
    return len({part.window for part in parts}) > 1


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
    parts = _Rows(size - 1 - network, network, size - 1 - network)
    seconds = [parts.seconds(sent / size) + 2.0 * LATENCY + 4.0 * sent / MEMORY for sent in (forward, backward)]
    return Estimate((forward + backward) * (size - 1) / size, 3.0 * backward, *seconds)


class _Rows(NamedTuple):
    """Rows that a rank receives: from its host, and from the network."""

    host: int
    network: int
    num_others: int  # ranks of its host

    def seconds(self, size: float) -> float:
        """Seconds of a round of messages of so many bytes a row; both kinds arrive at the same time."""
        if not self.host + self.network:
            return 0.0
        link = min(LINK, max(1, self.num_others) * NEIGHBOUR)
        return LATENCY + max(self.host * size / link, self.network * size / NETWORK)


def _num_rows(found: Mapping[int, Sequence[Run]]) -> int:
    return sum(run.stop - run.start for runs in found.values() for run in runs)
