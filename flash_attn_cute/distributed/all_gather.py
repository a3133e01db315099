"""All-gather of keys: a rank receives all keys that its queries attend to, then computes.

Llama 3 (arXiv 2407.21783) gathers all of K and V. Here a rank receives only the rows that it needs: those of documents
that it has a share of, and under a window those next to its own. Rows are received where the kernels read them, in the
order of the documents, without a further copy. In the backward pass their gradients go the same way back. The owner of
the rows adds them in the order of the ranks.
"""

import torch
from torch import Tensor

from flash_attn_cute.distributed import call_passes
from flash_attn_cute.distributed.call_passes import Context, Given, Merged, wide
from flash_attn_cute.distributed.key_value_rows import GradientSums, KeyValues
from flash_attn_cute.distributed.packed_calls import Call, Run, calls_of, is_shared, parts_of
from flash_attn_cute.distributed.process_groups import Transfer
from flash_attn_cute.distributed.rank_layout import Layout, common, side_by_side

Rows = list[tuple[int, int]]  # ranges (start, stop)


class AllGather:
    """The all-gather method of one rank, planned once for all layers and both passes."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, *, shares_heads: bool = False) -> None:
        """Plans for a rank of the layout; ``shares_heads``: ranks outside of it have parts of the same dK and dV."""
        self._rank = rank
        held, needed = layout.keys_of(self._rank), layout.needed_by(self._rank)
        collected, self._num_collected = side_by_side(needed)
        parts = parts_of(layout.queries_of(self._rank), collected, layout.bands)
        # For each peer: the ranges of this rank's rows that it needs, and the ranges of collected rows that it sends.
        self._given: list[Rows] = []
        self._taken: list[Rows] = []
        for peer in range(layout.num_ranks):
            given = common(layout.needed_by(peer), held)
            self._given.append([(run.row, run.row + run.stop - run.start) for runs in given.values() for run in runs])
            taken = common(needed, layout.keys_of(peer))
            self._taken.append([_place(run, collected[document]) for document, runs in taken.items() for run in runs])
        self._padding = layout.padding_of(self._rank)
        self._calls = calls_of(parts, device)
        self._largest_first = sorted(self._calls, key=lambda call: call.k_start - call.k_stop)
        self._shares_queries = is_shared((part.q_start, part.q_stop) for part in parts)
        self._sums_parts = shares_heads or layout.num_ranks > 1 or len(self._calls) > 1  # of gradients

    def forward(self, context: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Out and lse of the rank's queries (rows, nheads, d); k and v are its own keys and values."""
        keys = self._collect(context, KeyValues.of(k, v))
        merged = Merged(q, v.shape[-1], shared=self._shares_queries)
        for call in self._calls:
            merged.add(call, *call_passes.forward(context, call, q, keys.k, keys.v, is_part=self._shares_queries))
        return merged.result(sink, self._padding)

    def backward(self, context: Context, given: Given, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the rank's queries, keys and values; sums are float32 or wider."""
        keys = self._collect(context, KeyValues.of(k, v))
        sums = wide(k.dtype)
        dq = torch.zeros_like(given.q, dtype=sums if self._shares_queries else None)
        parts = GradientSums(keys, self._num_collected, sums if self._sums_parts else k.dtype)
        for call in self._largest_first:
            self._add_gradients(context, call, given, keys, dq, parts)
        total = self._give_back(context, keys, parts.result(), k.shape[0])
        return dq, total.k, total.v

    def _add_gradients(
        self,
        context: Context,
        call: Call,
        given: Given,
        keys: KeyValues,
        dq: Tensor,
        parts: GradientSums,
    ) -> None:
        """Adds the gradients of one call, whose tensors are freed before the next call needs as much memory."""
        dq_part, dk, dv = call_passes.backward(context, call, given, keys.k, keys.v, is_part=self._sums_parts)
        dq[call.q_start : call.q_stop] += dq_part
        parts.add(call.k_start, dk, dv)

    def _collect(self, context: Context, own: KeyValues) -> KeyValues:
        """The keys and values that the rank needs, in the order of the documents."""
        keys = own.empty(self._num_collected)
        transfer = Transfer(
            context.group,
            sends=[(own.data[a:b], peer) for peer in self._others for a, b in self._given[peer]],
            receives=[(keys.data[a:b], peer) for peer in self._others for a, b in self._taken[peer]],
        )
        for (a, b), (start, stop) in zip(self._taken[self._rank], self._given[self._rank], strict=True):
            keys.data[a:b] = own.data[start:stop]
        transfer.wait()
        return keys

    def _give_back(self, context: Context, keys: KeyValues, parts: KeyValues, num_own: int) -> KeyValues:
        """The sums, in the order of the ranks, of what each rank has for this rank's own keys; float32 or wider."""
        total = keys.zeros(num_own, wide(keys.data.dtype))
        arriving = [[keys.empty(b - a, parts.data.dtype).data for a, b in given] for given in self._given]
        arriving[self._rank] = [parts.data[a:b] for a, b in self._taken[self._rank]]
        Transfer(
            context.group,
            sends=[(parts.data[a:b], peer) for peer in self._others for a, b in self._taken[peer]],
            receives=[(x, peer) for peer in self._others for x in arriving[peer]],
        ).wait()
        for given, received in zip(self._given, arriving, strict=True):
            for (a, b), x in zip(given, received, strict=True):
                total.data[a:b] += x
        return total

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(len(self._given)) if peer != self._rank]


def _place(run: Run, collected: list[Run]) -> tuple[int, int]:
    """The collected rows (start, stop) that a run of another rank becomes."""
    home = next(c for c in collected if c.start <= run.start and run.stop <= c.stop)
    first = home.row + run.start - home.start
    return first, first + run.stop - run.start
