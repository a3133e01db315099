"""Attention with a block mask over ranks: each has all rows of its part of the heads, and calls the plain functions.

A block mask is a rule about all rows in their order. So ranks trade rows for heads (``heads``), whatever rows each of
them had, and nothing has to be known of the mask here.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn_cute import api
from flash_attn_cute.distributed import heads
from flash_attn_cute.distributed.attention import Question, of_both
from flash_attn_cute.distributed.groups import Place
from flash_attn_cute.distributed.sharding import Sharding, real_lengths
from flash_attn_cute.sparsity.blocks import BlockMask
from flash_attn_cute.spec import Options


def plan(question: Question, place: Place, device: torch.device) -> "Whole":
    """This rank's part, which the sharding of the queries remembers: the next layer finds it made.

    Raises:
        ValueError: a method or ranks that cannot serve it, or a seqused that does not fit.
    """
    key = ("block_mask", question[1:], place, device)
    known = question.queries.plans.get(key)
    if known is None:
        known = question.queries.plans[key] = _new_plan(question, place, device)
    return known


def _new_plan(question: Question, place: Place, device: torch.device) -> "Whole":
    if question.method not in ("auto", "all_to_all"):
        raise ValueError(
            f"method: expected 'auto' or 'all_to_all' with a block_mask, as ranks trade rows for heads, "
            f"got {question.method!r}"
        )
    if place.outer_size > 1:
        raise ValueError(
            f"group: expected one dimension with a block_mask, along which ranks trade rows for heads, "
            f"got {place.outer_size} x {place.inner_size} ranks"
        )
    refusal = heads.refusal(question.shape.nheads, question.shape.nheads_k, place.size)
    if refusal is not None:
        raise ValueError(f"block_mask: expected None where ranks cannot trade rows for heads ({refusal})")
    queries, keys = question.queries, question.queries if question.keys is None else question.keys
    rows_q, rows_k = of_both(queries, keys, lambda x: Rows.of(x, device))
    if question.batch != 1:
        queries, keys = of_both(queries, keys, lambda x: x.batched(question.batch))
    used_q, used_k = (
        None if used is None else _int32(real_lengths(name, used, sharding.cu_seqlens), device)
        for name, used, sharding in (
            ("seqused_q", question.seqused_q, queries),
            ("seqused_k", question.seqused_k, keys),
        )
    )
    traded = of_both(queries, keys, lambda x: heads.Rows(x, _in_order(x), place.rank, device))
    return Whole(rows_q, rows_k, used_q, used_k, heads.Trade.of(*traded, question.shape.nheads_k))


def _in_order(sharding: Sharding) -> Sharding:
    """The same rows on one rank, in their order."""
    return Sharding.contiguous(sharding.cu_seqlens, 1, total=sharding.total)


class Rows(NamedTuple):
    """All rows of queries or of keys, as the plain functions want to be told of them."""

    cu_seqlens: Tensor  # of packed documents
    longest: int  # rows of a document; of a dense batch, rows of each entry

    @classmethod
    def of(cls, sharding: Sharding, device: torch.device) -> "Rows":
        """Those of a sharding; of a dense batch, of an entry.

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
        return cls(_int32(cu_seqlens, device), max(lengths, default=0))


class Whole(NamedTuple):
    """A rank's part in attention over all rows, worked out once for all layers."""

    queries: Rows
    keys: Rows
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    trade: heads.Trade

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        sink: Tensor | None,
        mask: BlockMask,
        group: ProcessGroup | None,
        options: Options,
        backend: str | None,
        entries: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Out (rows, nheads, d_v) and lse (nheads, rows) of this rank's rows, differentiable.

        Args:
            qkv: this rank's rows, (rows, heads, d).
            sink: (nheads,) or None.
            mask: over all rows.
            group: the ranks that trade rows for heads; None: there is one.
            options: of the call.
            backend: the name of one, or None.
            entries: of a dense batch, which rows are then those of, one behind another; None: packed documents.

        Raises:
            ValueError: a mask that does not fit the rows; or what the plain functions refuse.
        """
        q, k, v, sink = self.trade.split(*qkv, sink, group)
        given: dict[str, Any] = {
            "seqused_q": self.seqused_q,
            "seqused_k": self.seqused_k,
            "softmax_scale": options.softmax_scale,
            "window_size": (options.window_left, options.window_right),
            "softcap": options.softcap,
            "learnable_sink": sink,
            "block_mask": mask,
            "deterministic": options.deterministic,
            "return_lse": True,
            "backend": backend,
        }
        if entries is None:
            where = self.queries.cu_seqlens, self.keys.cu_seqlens, self.queries.longest, self.keys.longest
            out, lse = api.flash_attn_varlen_func(q, k, v, *where, **given)
        else:
            q, k, v = (
                x.unflatten(0, (entries, rows.longest))
                for x, rows in zip((q, k, v), (self.queries, self.keys, self.keys), strict=True)
            )
            out, lse = api.flash_attn_func(q, k, v, **given)
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return self.trade.join(out, lse, group)


def _int32(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
