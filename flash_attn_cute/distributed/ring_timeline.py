"""When the ranks of a ring have finished: what they compute in each step, and whom they wait for.

A message starts when both neighbours have come to it, so that a rank which has much to do in one step delays others in
the next ones. Packed documents, which few ranks share, are like that; parts of one causal sequence cost the same.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.distributed.balanced_rows import Band
from flash_attn_cute.distributed.packed_calls import Run
from flash_attn_cute.distributed.rank_layout import Layout, side_by_side

# Runs of a document, and the rank that has each.
_Runs = list[tuple[int, Run]]
# Seconds of messages of so many rows, one a rank.
_Seconds = Callable[[Tensor], Tensor]


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
        pairs, queries = (torch.zeros(size, size, dtype=torch.float64, device="cpu") for _ in range(2))
        whole = [[0, 0] for _ in range(size)]
        for document, of_queries, of_keys in _documents(layout):
            band, ranks = layout.bands[document], {rank for rank, _ in (*of_queries, *of_keys)}
            if len(ranks) > 1:
                _add(pairs, queries, band, of_queries, of_keys)
            else:  # most documents, and all of what is below takes longer
                own, length = whole[ranks.pop()], layout.lengths_q[document]
                own[0] += band.area(0, length, layout.lengths_k[document])
                own[1] += length
        for table, numbers in zip((pairs, queries), zip(*whole, strict=True), strict=True):
            table.diagonal().add_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        rows = [side_by_side(runs)[1] for runs in layout.travelling()]
        blocks = torch.tensor(rows, dtype=torch.float64, device="cpu")
        rank, last = torch.arange(size, device="cpu")[:, None], torch.tensor(hops, device="cpu")
        step = torch.arange(max(hops) + 1, device="cpu")
        owner, following = (rank - step) % size, (rank - step - 1) % size
        home = blocks[:, None] * ((step == last[:, None]) & (step > 0))
        return cls(pairs[rank, owner], queries[rank, owner], blocks[following] * (step < last[following]), home)

    def finished(self, computing: Tensor, of_keys: _Seconds, of_sums: _Seconds | None) -> float:
        """Seconds until the last rank has finished.

        Args:
            computing: seconds of each rank in each step.
            of_keys: seconds of messages of rows of keys and values.
            of_sums: likewise of their gradients, in a backward pass.
        """
        now = line = summed = computing.new_zeros(len(computing))  # computed, exchanged, gradients exchanged
        for t in range(computing.shape[1]):
            line = _exchanged(torch.maximum(now, line), of_keys(self.coming[:, t]))
            now = torch.stack((now + computing[:, t], line, summed)).amax(0)
            if of_sums is not None:
                begin, home = torch.maximum(now, line), of_sums(self.home[:, t])
                from_last = torch.maximum(begin, begin.roll(-t)) + home
                line = _exchanged(begin, of_sums(self.coming[:, t]))
                line = summed = torch.where(home > 0, torch.maximum(line, from_last), line)
        return torch.maximum(now, summed).max().item()


def _exchanged(begin: Tensor, seconds: Tensor) -> Tensor:
    """When each rank is done with a message from the rank before it, and one to the next; of 0 seconds: with none."""
    after = seconds.roll(-1)
    ready = torch.where(seconds > 0, torch.maximum(begin, begin.roll(1)), begin)
    ready = torch.where(after > 0, torch.maximum(ready, begin.roll(-1)), ready)
    return ready + torch.maximum(seconds, after)


def _documents(layout: Layout) -> Iterator[tuple[int, _Runs, _Runs]]:
    """Each document with its runs of queries and of keys."""
    found: tuple[dict[int, _Runs], dict[int, _Runs]] = {}, {}
    for rank in range(layout.num_ranks):
        for runs_of, held in zip(found, (layout.queries_of(rank), layout.keys_of(rank)), strict=True):
            for document, runs in held.items():
                runs_of.setdefault(document, []).extend((rank, run) for run in runs)
    for document in found[0].keys() & found[1].keys():
        yield document, found[0][document], found[1][document]


def _add(pairs: Tensor, queries: Tensor, band: Band, of_queries: _Runs, of_keys: _Runs) -> None:
    """Adds what is visible of one document to the tables (rank of the queries, rank of the keys)."""
    (q_rank, q_start, q_stop), (k_rank, k_start, k_stop) = map(_columns, (of_queries, of_keys))
    q_rank, q_start, q_stop = q_rank[:, None], q_start[:, None], q_stop[:, None]
    num_keys = k_stop - k_start
    # Query i sees keys of a run up to and without those at i + lower - start and i + upper + 1 - start of it.
    first, last, area = q_start, q_stop, (q_stop - q_start) * num_keys
    if band.upper is not None:
        shift = band.upper + 1 - k_start
        area = _sum_below(q_stop + shift, num_keys) - _sum_below(q_start + shift, num_keys)
        first = torch.maximum(first, k_start - band.upper)
    if band.lower is not None:
        shift = band.lower - k_start
        area = area - _sum_below(q_stop + shift, num_keys) + _sum_below(q_start + shift, num_keys)
        last = torch.minimum(last, k_stop - band.lower)
    where = q_rank.expand_as(area), k_rank.expand_as(area)
    pairs.index_put_(where, area.double(), accumulate=True)
    queries.index_put_(where, (last - first).clamp(min=0).expand_as(area).double(), accumulate=True)


def _columns(runs: _Runs) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks, starts and stops, int64."""
    table = torch.tensor([(rank, run.start, run.stop) for rank, run in runs], dtype=torch.int64, device="cpu")
    return table[:, 0], table[:, 1], table[:, 2]


def _sum_below(stop: Tensor, most: Tensor) -> Tensor:
    """The sum of the ints 0 .. stop, each at most ``most``."""
    stop = stop.clamp(min=0)
    ramp = torch.minimum(stop, most + 1)
    return ramp * (ramp - 1) // 2 + (stop - ramp) * most
