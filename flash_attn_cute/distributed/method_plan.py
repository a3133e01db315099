"""The plan of a rank: which method it attends by, and whether it trades rows for heads."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from flash_attn_cute.distributed import cost_model, head_trade
from flash_attn_cute.distributed.all_gather import AllGather
from flash_attn_cute.distributed.autograd import Plan
from flash_attn_cute.distributed.block_mask_method import AllRows, BlockMaskMethod, int32
from flash_attn_cute.distributed.checked_call import PlanRequest, Shape
from flash_attn_cute.distributed.process_groups import Place
from flash_attn_cute.distributed.rank_layout import Layout
from flash_attn_cute.distributed.ring import Ring
from flash_attn_cute.distributed.sharding import Sharding, real_lengths

T = TypeVar("T")

# The methods that move keys; "all_to_all" leaves one rank a head, which has all keys.
KEY_METHODS: dict[str, type[AllGather | Ring]] = {"all_gather": AllGather, "ring": Ring}


def plan(request: PlanRequest, place: Place, device: torch.device) -> Plan:
    """The plan of this rank, made once for all layers: the sharding of the queries keeps it.

    Raises:
        ValueError: a method or ranks that cannot serve the call, or a seqused that does not fit.
    """
    make = partial(_block_mask_plan if request.has_block_mask else _new_plan, request, place, device)
    return request.queries.plan((request[1:], place, device), device, make)


def _new_plan(request: PlanRequest, place: Place, device: torch.device) -> Plan:
    queries, keys = request.shardings
    if request.batch != 1:
        queries, keys = _of_both(queries, keys, lambda x: x.batched(request.batch))
    lengths_q = real_lengths("seqused_q", request.seqused_q, queries.cu_seqlens)
    lengths_k = real_lengths("seqused_k", request.seqused_k, keys.cu_seqlens)
    method, shape = request.method, request.shape
    if method == "auto" and place.inner_size == 1:
        layout = Layout.of(queries, keys, lengths_q, lengths_k, request.window)
        method = _best(layout, shape, request.packing_invariant)
        if method == "all_to_all":
            place = Place(place.rank, 1, place.size)
    trade, size = None, place.inner_size
    if size > 1:
        refusal = head_trade.refusal(shape.nheads, shape.nheads_k, size)
        if refusal is not None:
            if request.method == "all_to_all":
                raise ValueError(f"method: expected one that exchanges no heads ({refusal}), got 'all_to_all'")
            raise ValueError(
                f"group: expected a mesh whose ranks can trade rows for heads along its second dimension ({refusal}), "
                f"got {place.outer_size} x {size} ranks"
            )
        rows = _of_both(queries, keys, lambda x: head_trade.Rows(x, x.merged(size), place.rank, device))
        trade = head_trade.Trade.of(*rows, shape.nheads_k)
        if request.packing_invariant and trade.ranks_a_head > 1:
            raise ValueError(
                f"deterministic: expected a bool where ranks share heads of k, whose gradients they sum, got "
                f"'invariant', and {size} ranks for {shape.nheads_k} heads"
            )
        queries, keys = _of_both(queries, keys, lambda x: x.merged(size))
        shape = shape._replace(nheads=shape.nheads // size, nheads_k=max(1, shape.nheads_k // size))
    layout = Layout.of(queries, keys, lengths_q, lengths_k, request.window)
    if method not in KEY_METHODS:
        method = _best(layout, shape, request.packing_invariant, ranks_a_row=size)
    if request.packing_invariant and method == "ring":
        raise ValueError(
            "method: expected 'auto', 'all_gather' or 'all_to_all' with deterministic='invariant', as a ring computes "
            "documents in parts, got 'ring'"
        )
    shares_heads = trade is not None and trade.ranks_a_head > 1
    return Plan(KEY_METHODS[method](layout, place.rank // size, device, shares_heads=shares_heads), trade)


def _block_mask_plan(request: PlanRequest, place: Place, device: torch.device) -> Plan:
    if request.method not in ("auto", "all_to_all"):
        raise ValueError(
            f"method: expected 'auto' or 'all_to_all' with a block_mask, as ranks trade rows for heads, "
            f"got {request.method!r}"
        )
    if place.outer_size > 1:
        raise ValueError(
            f"group: expected one dimension with a block_mask, along which ranks trade rows for heads, "
            f"got {place.outer_size} x {place.inner_size} ranks"
        )
    refusal = head_trade.refusal(request.shape.nheads, request.shape.nheads_k, place.size)
    if refusal is not None:
        raise ValueError(f"block_mask: expected None where ranks cannot trade rows for heads ({refusal})")
    queries, keys = request.shardings
    rows_q, rows_k = _of_both(queries, keys, lambda x: AllRows.of(x, device))
    if request.batch != 1:
        queries, keys = _of_both(queries, keys, lambda x: x.batched(request.batch))
    used_q, used_k = (
        None if used is None else int32(real_lengths(name, used, sharding.cu_seqlens), device)
        for name, used, sharding in (
            ("seqused_q", request.seqused_q, queries),
            ("seqused_k", request.seqused_k, keys),
        )
    )

    def traded(x: Sharding) -> head_trade.Rows:
        in_order = Sharding.contiguous(x.cu_seqlens, 1, total=x.total)
        return head_trade.Rows(x, in_order, place.rank, device)

    trade = head_trade.Trade.of(*_of_both(queries, keys, traded), request.shape.nheads_k)
    return Plan(BlockMaskMethod(rows_q, rows_k, used_q, used_k, shares_heads=trade.ranks_a_head > 1), trade)


def _of_both(queries: Sharding, keys: Sharding, change: Callable[[Sharding], T]) -> tuple[T, T]:
    """Queries and keys changed; one object if they are one."""
    changed = change(queries)
    return changed, changed if keys is queries else change(keys)


def _best(layout: Layout, shape: Shape, packing_invariant: bool, *, ranks_a_row: int | None = None) -> str:
    """The method that "auto" chooses; with one rank, one that sends nothing.

    ``ranks_a_row``: neighbours that have each row of the layout, as they trade rows for heads; None: this is to be
    chosen, too.
    """
    if layout.num_ranks == 1:
        return "all_gather"  # whose documents are all one rank's, so that one call serves them
    found = cost_model.estimates(layout, shape, max(1, cost_model.HOST // (ranks_a_row or 1)))
    if ranks_a_row is not None or (packing_invariant and layout.num_ranks > shape.nheads_k):
        found.pop("all_to_all", None)
    if packing_invariant:
        del found["ring"]
    return cost_model.best(found)
