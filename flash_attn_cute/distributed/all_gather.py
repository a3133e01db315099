"""All-gather of keys: a rank receives all keys that its queries attend to, then computes.

Llama 3 (arXiv 2407.21783) gathers all of K and V. Here a rank receives only the rows that it needs: those of documents
that it shares with others, and under a window those next to its own. Rows are received where the kernels read them, in
the order of the documents, without a further copy. In the backward pass their gradients go the same way back. The owner
of the rows adds them in the order of the ranks.

Documents that a rank has alone are one plain call on its own rows, without sums and copies. It runs while keys of the
others arrive, and in the backward pass while their gradients go back.
"""

import torch
from torch import Tensor

from flash_attn_cute.distributed import call_passes
from flash_attn_cute.distributed.call_passes import Context, Given, Merged
from flash_attn_cute.distributed.key_value_rows import GradientSums, KeyValues, put, take
from flash_attn_cute.distributed.packed_calls import Call, Run, call_of_all_rows, calls_of, is_shared, parts_of
from flash_attn_cute.distributed.process_groups import Transfer
from flash_attn_cute.distributed.rank_layout import Layout, common, rows_of, side_by_side, union
from flash_attn_cute.problem.spec import Results, wide

Rows = list[tuple[int, int]]  # ranges (start, stop)


class AllGather:
    """The all-gather method of one rank, planned once for all layers and both passes."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, *, shares_heads: bool = False) -> None:
        """Plans for a rank of the layout; ``shares_heads``: ranks outside of it have parts of the same dK and dV."""
        self._rank = rank
        whole, held = layout.whole_documents(rank), layout.keys_of[rank]
        num_q, num_k = layout.queries.num_rows(rank), layout.keys.num_rows(rank)
        self._own_call = call_of_all_rows(list(whole.values()), num_q, num_k, device)
        # Queries of the other documents lie side by side where calls read them, and so do the keys that they need.
        queries = {document: runs for document, runs in layout.queries_of[rank].items() if document not in whole}
        needed = {document: ranges for document, ranges in layout.needed_by[rank].items() if document not in whole}
        collected, self._num_collected = side_by_side(needed)
        shared, num_shared = side_by_side(queries)
        parts = parts_of(shared, collected, layout.bands)
        self._queries = union(row for runs in queries.values() for row in rows_of(runs))
        self._keys = union(row for document, runs in held.items() if document not in whole for row in rows_of(runs))
        # For each peer: the ranges of this rank's rows that it needs, and the ranges of collected rows that it sends.
        self._given: list[Rows] = []
        self._taken: list[Rows] = []
        for peer in range(layout.num_ranks):
            given = common(needed if peer == rank else layout.needed_by[peer], held)
            self._given.append([row for runs in given.values() for row in rows_of(runs)])
            taken = common(needed, layout.keys_of[peer])
            self._taken.append([_place(run, collected[document]) for document, runs in taken.items() for run in runs])
        self._shares_queries = is_shared((part.q_start, part.q_stop) for part in parts)
        self._calls = calls_of(parts, device, None if self._shares_queries else num_shared)
        # Each on its own rows alone, as gradients of the first one are added to like those of the others.
        self._largest_first = sorted(calls_of(parts, device), key=lambda call: call.k_start - call.k_stop)
        self._shares_heads = shares_heads
        self._sums_parts = shares_heads or layout.num_ranks > 1 or len(self._calls) > 1  # of gradients

    def forward(self, context: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Results:
        """Results for the rank's queries (rows, nheads, d); k and v are its own keys and values."""
        transfer, keys = self._collect(context, KeyValues.of(k, v))
        own = None if self._shares_all(q) else self._attend_to_own(context, q, k, v, sink)
        transfer.wait()
        shared, wants = take(q, self._queries), context.options.max_logits
        merged = Merged(shared, v.shape[-1], shared=self._shares_queries, max_logits=wants)
        for call in self._calls:
            merged.add(call, call_passes.forward(context, call, shared, keys.k, keys.v, is_part=self._shares_queries))
        results = merged.result(sink, ())
        if own is None:
            return results
        put(own.out, self._queries, results.out)
        put(own.lse, self._queries, results.lse, dim=1)
        if own.max_logits is not None and results.max_logits is not None:
            torch.maximum(own.max_logits, results.max_logits, out=own.max_logits)
        return own

    def backward(self, context: Context, given: Given, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the rank's queries, keys and values; sums are float32 or wider."""
        transfer, keys = self._collect(context, KeyValues.of(k, v))
        transfer.wait()
        dq, parts = self._shared_gradients(context, given, keys)
        transfer, arriving = self._give_back(context, parts)
        own = None
        if self._own_call is not None:
            own = call_passes.backward(context, self._own_call, given, k, v, is_part=self._shares_heads)
        transfer.wait()
        total = self._sums(parts, arriving, k.shape[0])
        if self._shares_all(given.q):
            return dq, total.k, total.v
        if own is None:
            own = torch.zeros_like(given.q), total.k, total.v
        else:
            for x, sums in ((own[1], total.k), (own[2], total.v)):
                put(x, self._keys, take(sums, self._keys))
        put(own[0], self._queries, dq)
        return own

    def _shares_all(self, q: Tensor) -> bool:
        """Whether all rows are queries of documents that the rank does not have alone."""
        return self._queries == [(0, q.shape[0])]

    def _attend_to_own(self, context: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Results:
        """Results of documents that the rank has alone; 0 and -inf in other rows, or what a sink leaves there."""
        if self._own_call is None:
            return Merged(q, v.shape[-1], shared=False, max_logits=context.options.max_logits).result(None, ())
        return call_passes.forward(context, self._own_call, q, k, v, sink, is_part=False)

    def _shared_gradients(self, context: Context, given: Given, keys: KeyValues) -> tuple[Tensor, KeyValues]:
        """dQ of the shared documents' queries, side by side, and the gradients of all keys that they need."""
        dlse = None if given.dlse is None else take(given.dlse, self._queries, 1)
        q, out, dout = (take(x, self._queries) for x in (given.q, given.out, given.dout))
        shared, sums = Given(q, out, take(given.lse, self._queries, 1), dout, dlse), wide(q.dtype)
        dq = torch.zeros_like(q, dtype=sums if self._shares_queries else None)
        parts = GradientSums(keys, self._num_collected, sums if self._sums_parts else q.dtype)
        for call in self._largest_first:
            self._add_gradients(context, call, shared, keys, dq, parts)
        return dq, parts.result()

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

    def _collect(self, context: Context, own: KeyValues) -> tuple[Transfer, KeyValues]:
        """The keys and values that the shared documents need, in their order, once the transfer has ended."""
        keys = own.empty(self._num_collected)
        transfer = Transfer(
            context.group,
            sends=[(own.data[a:b], peer) for peer in self._others for a, b in self._given[peer]],
            receives=[(keys.data[a:b], peer) for peer in self._others for a, b in self._taken[peer]],
        )
        for (a, b), (start, stop) in zip(self._taken[self._rank], self._given[self._rank], strict=True):
            keys.data[a:b] = own.data[start:stop]
        return transfer, keys

    def _give_back(self, context: Context, parts: KeyValues) -> tuple[Transfer, list[list[Tensor]]]:
        """Returns a transfer, and the gradients of each rank for ranges of this rank's own keys, there at its end."""
        arriving = [[parts.empty(b - a).data for a, b in given] for given in self._given]
        arriving[self._rank] = [parts.data[a:b] for a, b in self._taken[self._rank]]
        transfer = Transfer(
            context.group,
            sends=[(parts.data[a:b], peer) for peer in self._others for a, b in self._taken[peer]],
            receives=[(x, peer) for peer in self._others for x in arriving[peer]],
        )
        return transfer, arriving

    def _sums(self, parts: KeyValues, arriving: list[list[Tensor]], num_own: int) -> KeyValues:
        """The sums, in the order of the ranks, of what arrived; float32 or wider, and zeros in other rows."""
        total = parts.zeros(num_own, wide(parts.data.dtype))
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
