"""Attention with a block mask over ranks: each rank has all rows of its part of the heads, and makes one call of them.

A block mask counts rows in their order. So ranks first trade rows for heads (``head_trade``), whichever rows each of
them had, and the mask is that of a call on one GPU.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Backend, BackwardCall
from flash_attn_cute.calls import dispatch, lowering
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.prepared_call import prepare
from flash_attn_cute.distributed.call_passes import Context, Given
from flash_attn_cute.distributed.sharding import Sharding
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Results


class AllRows(NamedTuple):
    """All rows of queries or of keys: the offsets and the bound that the plain functions take."""

    cu_seqlens: Tensor  # of packed documents
    longest: int  # rows of a document; of a dense batch, rows of each entry

    @classmethod
    def of(cls, sharding: Sharding, device: torch.device) -> "AllRows":
        """All rows of a sharding; of a dense batch, of one entry.

        Raises:
            ValueError: there are rows before the first document.
        """
        cu_seqlens = sharding.cu_seqlens
        if cu_seqlens[0] != 0:
            raise ValueError(
                f"block_mask: expected None where rows before the first document are padding, as block masks count "
                f"rows; got cu_seqlens from {cu_seqlens[0]} on"
            )
        lengths = (stop - start for start, stop in itertools.pairwise(cu_seqlens))
        return cls(int32(cu_seqlens, device), max(lengths, default=0))


class BlockMaskMethod(NamedTuple):
    """The method of a rank that has all rows of some heads: one call under ``context.block_mask``."""

    queries: AllRows
    keys: AllRows
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    shares_heads: bool  # with other ranks, which have parts of the same dK and dV

    def forward(self, context: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Results:
        """Out (rows, heads, d_v), lse (heads, rows) and max_logits (heads,).

        Raises:
            ValueError: a mask that does not fit the rows, or what backends refuse.
        """
        backend, spec, inputs = self._prepared(context, q, k, v, sink, backward=False)
        results = backend.forward(spec, inputs)
        if inputs.packed:
            return results
        return results._replace(out=results.out.flatten(0, 1), lse=results.lse.transpose(0, 1).flatten(1))

    def backward(self, context: Context, given: Given, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; not rounded if ranks share heads of k and v, and so have parts of theirs."""
        backend, spec, inputs = self._prepared(context, given.q, k, v, None, backward=True)
        out, lse, dout, dlse = given.out, given.lse, given.dout, given.dlse
        if not inputs.packed:
            out, dout = (x.unflatten(0, inputs.q.shape[:2]) for x in (out, dout))
            lse, dlse = _by_entry(lse, inputs), None if dlse is None else _by_entry(dlse, inputs)
        spec = spec._replace(wide=self.shares_heads)
        grads = backend.backward(BackwardCall(spec, inputs, out, lse, dout, dlse))
        dq, dk, dv = (x if inputs.packed else x.flatten(0, 1) for x in (grads.dq, grads.dk, grads.dv))
        return dq, dk, dv

    def _prepared(
        self, context: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *, backward: bool
    ) -> tuple[Backend, AttentionSpec, AttentionInputs]:
        """The backend that serves the call, and its arguments; ``call_passes.prepared`` is the one without a mask."""
        call = AttentionCall(q, k, v, seqused_q=self.seqused_q, seqused_k=self.seqused_k, learnable_sink=sink)
        call = call._replace(block_mask=context.block_mask, options=context.options, backend=context.backend)
        if context.entries is None:
            queries, keys = self.queries, self.keys
            bounds = (queries.longest, keys.longest)
            call = call._replace(cu_seqlens_q=queries.cu_seqlens, cu_seqlens_k=keys.cu_seqlens, bounds=bounds)
        else:
            q, k, v = (x.unflatten(0, (context.entries, -1)) for x in (q, k, v))
            call = call._replace(q=q, k=k, v=v)
        inputs, plan = prepare(lowering.of(call).call, backward)
        return dispatch.BACKENDS[plan.backend], plan.spec, inputs


def _by_entry(x: Tensor, inputs: AttentionInputs) -> Tensor:
    """Lse or its gradient (heads, rows) as (batch, heads, seqlen), in memory as backends write it."""
    return x.unflatten(1, inputs.q.shape[:2]).transpose(0, 1).contiguous()


def int32(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of the host as a tensor."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
