"""When the ranks of a ring have finished: what they compute in each step, and whom they wait for.

A message starts when both neighbours have come to it, so that a rank which has much to do in one step delays others in
the next ones. Packed documents, which few ranks share, are like that; parts of one causal sequence cost the same.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.distributed.packed_calls import Run
from flash_attn_cute.distributed.rank_layout import Layout, side_by_side
from flash_attn_cute.problem.band import Band

# Runs of a document, and the rank that has each.
_Runs = list[tuple[int, Run]]
# A bound of a band that hides nothing, and can be multiplied by a length.
_UNBOUNDED = 2**40


class Steps(NamedTuple):
    """Work and messages of each rank (first dimension) in each step (second one), float64."""

    pairs: Tensor  # visible pairs of the rank's queries and the step's keys
    queries: Tensor  # queries in such pairs
    coming: Tensor  # rows of keys that arrive for the next step
    home: Tensor  # rows of its own keys whose summed gradients arrive

    @classmethod
    def of(cls, layout: Layout) -> "Steps":
        """One step more than the ranks that the farthest keys travel to."""
        size, hops = layout.num_ranks, layout.hops()
        pairs, queries = _visible(layout)
        rows = [side_by_side(runs)[1] for runs in layout.travelling()]
        blocks = torch.tensor(rows, dtype=torch.float64, device="cpu")
        rank, last = torch.arange(size, device="cpu")[:, None], torch.tensor(hops, device="cpu")
        step = torch.arange(max(hops) + 1, device="cpu")
        owner, following = (rank - step) % size, (rank - step - 1) % size
        home = blocks[:, None] * ((step == last[:, None]) & (step > 0))
        return cls(pairs[rank, owner], queries[rank, owner], blocks[following] * (step < last[following]), home)


def finished(computing: Tensor, keys: Tensor, sums: tuple[Tensor, Tensor] | None = None) -> float:
    """Seconds until the last rank has finished; those of each rank in each step are given.

    ``computing`` is of its calls, ``keys`` of a message with keys and values for the next step. In a backward pass
    ``sums`` are of messages with gradients: for keys of the next step, and for its own keys.
    """
    now = line = summed = computing.new_zeros(len(computing))  # computed, exchanged, gradients exchanged
    for t, (took, arriving) in enumerate(zip(computing.T, keys.T, strict=True)):
        line = _exchanged(torch.maximum(now, line), arriving)
        now = torch.maximum(torch.maximum(now + took, line), summed)
        if sums is not None:
            coming, home = (x[:, t] for x in sums)
            begin = torch.maximum(now, line)
            from_last = torch.maximum(begin, begin.roll(-t)) + home
            line = _exchanged(begin, coming)
            line = summed = torch.where(home > 0, torch.maximum(line, from_last), line)
    return torch.maximum(now, summed).max().item()


def _exchanged(begin: Tensor, seconds: Tensor) -> Tensor:
    """When each rank is done with a message from the rank before it, and one to the next; of 0 seconds: with none."""
    after = seconds.roll(-1)
    ready = torch.where(seconds > 0, torch.maximum(begin, begin.roll(1)), begin)
    ready = torch.where(after > 0, torch.maximum(ready, begin.roll(-1)), ready)
    return ready + torch.maximum(seconds, after)


def _visible(layout: Layout) -> tuple[Tensor, Tensor]:
    """Visible pairs, and queries in such, of a rank's queries (first dimension) and a rank's keys (second one)."""
    own, shared = [[0, 0] for _ in range(layout.num_ranks)], []
    for document, of_queries, of_keys in _documents(layout):
        ranks = {rank for rank, _ in (*of_queries, *of_keys)}
        if len(ranks) > 1:
            shared.append(_table(layout.bands[document], of_queries, of_keys))
        else:  # most documents, and much quicker
            sums = own[ranks.pop()]
            sums[0] += layout.areas[document]
            sums[1] += layout.lengths_q[document]
    pairs, queries = (torch.tensor(sums, dtype=torch.float64, device="cpu").diag() for sums in zip(*own, strict=True))
    if shared:
        q_rank, q_start, q_stop, k_rank, k_start, k_stop, lower, upper = torch.cat(shared).unbind(1)
        # Query i sees the keys of a run from the one at i + lower - k_start on, up to the one at i + upper - k_start.
        begin, end, num_keys = lower - k_start, upper + 1 - k_start, k_stop - k_start
        area = _sum_below(q_stop + end, num_keys) - _sum_below(q_start + end, num_keys)
        area += _sum_below(q_start + begin, num_keys) - _sum_below(q_stop + begin, num_keys)
        seeing = torch.minimum(q_stop, k_stop - lower) - torch.maximum(q_start, k_start - upper)
        for table, numbers in ((pairs, area), (queries, seeing.clamp(min=0))):
            table.index_put_((q_rank, k_rank), numbers.double(), accumulate=True)
    return pairs, queries


def _documents(layout: Layout) -> Iterator[tuple[int, _Runs, _Runs]]:
    """Each document with its runs of queries and of keys."""
    found: tuple[dict[int, _Runs], dict[int, _Runs]] = {}, {}
    for rank in range(layout.num_ranks):
        for runs_of, held in zip(found, (layout.queries_of[rank], layout.keys_of[rank]), strict=True):
            for document, runs in held.items():
                runs_of.setdefault(document, []).extend((rank, run) for run in runs)
    for document in found[0].keys() & found[1].keys():
        yield document, found[0][document], found[1][document]


def _table(band: Band, of_queries: _Runs, of_keys: _Runs) -> Tensor:
    """Rank, start and stop of queries, those of keys, and the band, int64, a row for each two runs of a document."""
    q, k = (
        torch.tensor([(rank, run.start, run.stop) for rank, run in runs], dtype=torch.int64, device="cpu")
        for runs in (of_queries, of_keys)
    )
    lower, upper = -_UNBOUNDED if band.lower is None else band.lower, _UNBOUNDED if band.upper is None else band.upper
    bounds = torch.tensor((lower, upper), device="cpu")
    parts = q[:, None], k, bounds
    return torch.cat([x.expand(len(q), len(k), -1) for x in parts], -1).flatten(0, 1)


def _sum_below(stop: Tensor, most: Tensor) -> Tensor:
    """The sum of the ints 0 .. stop, each at most ``most``."""
    stop = stop.clamp(min=0)
    ramp = torch.minimum(stop, most + 1)
    return ramp * (ramp - 1) // 2 + (stop - ramp) * most
