"""Ring attention: a rank computes with one block of keys while it receives the next one.

The algorithm is that of Liu et al. (arXiv 2310.01889). At step t a rank has the block of the rank t places before it. A
block contains the keys of its owner that any other rank needs. It is sent on while a later rank needs it; under a
window that is only to the next ranks. In the backward pass the sums of its gradients follow it, and the last rank sends
them to the owner. So gradients are added in the order of the ring.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn_cute.distributed import call_passes
from flash_attn_cute.distributed.call_passes import Context, Given, Merged
from flash_attn_cute.distributed.key_value_rows import KeyValues, put
from flash_attn_cute.distributed.packed_calls import calls_of, is_shared, parts_of
from flash_attn_cute.distributed.process_groups import Transfer
from flash_attn_cute.distributed.rank_layout import Layout, side_by_side
from flash_attn_cute.problem.spec import Results, wide


class Ring:
    """The ring method of one rank, planned once for all layers and both passes."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, *, shares_heads: bool = False) -> None:
        """Plans for a rank of the layout; ``shares_heads``: ranks outside of it have parts of the same dK and dV."""
        self._rank, self._size = rank, layout.num_ranks
        self._hops = layout.hops()
        travelling = layout.travelling()
        blocks = [side_by_side(runs) for runs in travelling]
        self._num_rows = [rows for _, rows in blocks]
        # Ranges of the rank's own rows that make up its block.
        self._own_block = [
            (run.row, run.row + run.stop - run.start) for runs in travelling[rank].values() for run in runs
        ]
        self._padding = layout.padding_of(rank)
        keys = [layout.keys_of[rank], *(blocks[self._owner(t)][0] for t in range(1, 1 + max(self._hops)))]
        queries = layout.queries_of[rank]
        parts = [parts_of(queries, seen, layout.bands) for seen in keys]
        self._calls = [calls_of(step, device) for step in parts]
        self._shares_queries = is_shared((part.q_start, part.q_stop) for step in parts for part in step)
        self._sums_parts = shares_heads or self._size > 1 or len(self._calls[0]) > 1  # of gradients

    def forward(self, context: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Results:
        """Results for the rank's queries (rows, nheads, d); k and v are its own keys and values."""
        wants = context.options.max_logits
        merged = Merged(q, v.shape[-1], shared=self._shares_queries, max_logits=wants)
        block = KeyValues.of(k, v)
        for t, calls in enumerate(self._calls):
            transfer, coming = self._exchange(context, t, block if t else block.part(self._own_block))
            for call in calls:
                merged.add(call, call_passes.forward(context, call, q, block.k, block.v, is_part=self._shares_queries))
            transfer.wait()
            block = coming
        return merged.result(sink, self._padding)

    def backward(self, context: Context, given: Given, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the rank's queries, keys and values; sums are float32 or wider."""
        sums = wide(k.dtype)
        dq = torch.zeros_like(given.q, dtype=sums if self._shares_queries else None)
        block = KeyValues.of(k, v)
        own = total = block.zeros(k.shape[0], sums)
        home = own.empty(self._num_rows[self._rank] if self._hops[self._rank] else 0)
        following = Transfer(context.group, (), ())
        for t, calls in enumerate(self._calls):
            transfer, coming = self._exchange(context, t, block if t else block.part(self._own_block))
            parts = []
            for call in calls:
                dq_part, dk, dv = call_passes.backward(context, call, given, block.k, block.v, is_part=self._sums_parts)
                dq[call.q_start : call.q_stop] += dq_part
                parts.append((call.k_start, dk, dv))
            following.wait()
            for part in parts:
                total.add(*part)
            transfer.wait()
            following, total = self._send_sums(context, t, total if t else own.part(self._own_block), home)
            block = coming
        following.wait()
        if self._hops[self._rank]:
            put(own.data, self._own_block, home.data)
        return dq, own.k, own.v

    def _owner(self, t: int) -> int:
        """The rank whose block this rank has at step t."""
        return (self._rank - t) % self._size

    def _goes_on(self, t: int, owner: int) -> bool:
        """Whether a block is sent to another rank after step t."""
        return t < self._hops[owner]

    def _send_sums(self, context: Context, t: int, total: KeyValues, home: KeyValues) -> tuple[Transfer, KeyValues]:
        """Sends the sums of this step's block on, or to its owner; receives the next sums, or its own."""
        owner = self._owner(t)
        sends = [(total.data, owner)] if t == self._hops[owner] and t > 0 else []
        comes_home = t == self._hops[self._rank] and t > 0
        receives = [(home.data, (self._rank + t) % self._size)] if comes_home else []
        return self._exchange(context, t, total, sends, receives)

    def _exchange(
        self,
        context: Context,
        t: int,
        x: KeyValues,
        sends: Sequence[tuple[Tensor, int]] = (),
        receives: Sequence[tuple[Tensor, int]] = (),
    ) -> tuple[Transfer, KeyValues]:
        """Sends this step's block, or its sums, on, and receives those of the next step, beside other messages."""
        following = self._owner(t + 1)
        coming = x.empty(self._num_rows[following] if self._goes_on(t, following) else 0)
        if self._goes_on(t, self._owner(t)):
            sends = [*sends, (x.data, (self._rank + 1) % self._size)]
        receives = [*receives, (coming.data, (self._rank - 1) % self._size)]
        return Transfer(context.group, sends, receives), coming
