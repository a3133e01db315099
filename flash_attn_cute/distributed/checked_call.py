"""The arguments of one rank: checks before any message, and the plan that they ask for."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn_cute.calls import validate
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.torch_modes import is_same_memory
from flash_attn_cute.distributed.process_groups import Place, Ranks
from flash_attn_cute.distributed.sharding import Sharding, numbers
from flash_attn_cute.problem.spec import Options, Window
from flash_attn_cute.runtime import settings
from flash_attn_cute.sparsity.block_mask import BlockMask

Lengths: TypeAlias = Sequence[int] | Tensor | None

METHODS = ("auto", "all_gather", "ring", "all_to_all")


class RankCall(NamedTuple):
    """The arguments of a rank, but for options; sizes, layouts and lengths are not checked yet."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    sharding: Sharding
    sharding_k: Sharding | None  # None: the same
    seqused_q: Lengths
    seqused_k: Lengths
    groups: tuple[ProcessGroup, ...]  # one, or those of a mesh's two dimensions
    method: str
    dense: bool
    block_mask: BlockMask | None = None

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, k and v of (rows, heads, d), entries of a dense batch one behind another."""
        q, k, v = self[:3]
        return (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)) if self.dense else (q, k, v)

    @property
    def ranks(self) -> Ranks:
        """The grid that the method sees."""
        return grid(self.groups, self.method, has_block_mask=self.block_mask is not None)


def grid(groups: Sequence[ProcessGroup], method: str, *, has_block_mask: bool = False) -> Ranks:
    """The grid that a method sees of a group's dimensions; block masks have ranks trade rows for heads as well."""
    return Ranks.over(groups, by_heads=method == "all_to_all" or has_block_mask)


class Shape(NamedTuple):
    """Heads and dtype of an attention."""

    nheads: int
    nheads_k: int
    d: int
    d_v: int
    itemsize: int  # bytes an element


class PlanRequest(NamedTuple):
    """Everything that a plan depends on beside rank and device; the same on all ranks."""

    queries: Sharding
    keys: Sharding | None  # None: that of queries
    batch: int
    seqused_q: tuple[int, ...] | None
    seqused_k: tuple[int, ...] | None
    window: Window
    method: str
    shape: Shape
    has_block_mask: bool = False
    packing_invariant: bool = False

    @property
    def shardings(self) -> tuple[Sharding, Sharding]:
        """Queries and keys: one object twice if they are sharded alike."""
        return self.queries, self.queries if self.keys is None else self.keys


def plan_request(call: RankCall, options: Options, place: Place) -> PlanRequest:
    """The plan request of a rank's arguments, all of which it checks."""
    q, k, v, sink, sharding, sharding_k, *_ = call
    dense = call.dense
    check_method(call.method, place)
    if dense:
        validate.check(AttentionCall(q, k, v, learnable_sink=sink))
    else:
        validate.check_rows(q, k, v, sink)
    if call.block_mask is not None:
        _check_block_mask(call.block_mask)
    queries, keys = sharding, sharding if sharding_k is None else sharding_k
    for name, sharding, tensor_name, x in (("sharding", queries, "q", q), ("sharding_k", keys, "k", k)):
        check_sharding(name, sharding, place, dense=dense)
        rows = sharding.num_rows(place.rank)
        if x.shape[-3] != rows:
            raise ValueError(
                f"{tensor_name}: expected the {rows} rows of rank {place.rank} of its sharding, "
                f"got shape {tuple(x.shape)}"
            )
    if len(queries.cu_seqlens) != len(keys.cu_seqlens):
        raise ValueError(
            f"sharding_k: expected the {len(queries.cu_seqlens) - 1} documents of sharding, "
            f"got {len(keys.cu_seqlens) - 1}"
        )
    lengths = _lengths_on_host(call, queries, keys)
    for name, sharding, used in zip(("seqused_q", "seqused_k"), (queries, keys), lengths, strict=True):
        _check_owned(name, sharding, used, dense=dense)
    return PlanRequest(
        queries,
        None if keys is queries else keys,
        q.shape[0] if dense else 1,
        *lengths,
        (options.window_left, options.window_right),
        call.method,
        Shape(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.element_size()),
        call.block_mask is not None,
        options.packing_invariant,
    )


def check_method(method: str, place: Place) -> None:
    """Refuses methods that a grid of ranks does not have."""
    if method not in METHODS:
        raise ValueError(f"method: expected one of {list(METHODS)}, got {method!r}")
    if method == "all_to_all" and place.outer_size > 1:
        raise ValueError(
            "method: expected 'auto', 'all_gather' or 'ring', by which keys go over the first dimension of a mesh "
            "(rows are traded for heads along the second one), got 'all_to_all'"
        )


def check_is_sharding(name: str, sharding: Any) -> None:
    """Refuses anything but a Sharding; the plain functions take offsets in its place."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"{name}: expected a Sharding, which Sharding.balanced makes of cu_seqlens, got {type(sharding).__name__}"
        )


def check_sharding(name: str, sharding: Any, place: Place, *, dense: bool) -> None:
    """Refuses shardings over other ranks and, for a dense batch, of more than one document."""
    check_is_sharding(name, sharding)
    if sharding.num_ranks != place.size:
        raise ValueError(f"{name}: expected one over the {place.size} ranks of group, got {sharding.num_ranks}")
    if dense and sharding.cu_seqlens != (0, sharding.total):
        raise ValueError(
            f"{name}: expected one document, an entry of the batch, without padding around it, "
            f"got cu_seqlens {list(sharding.cu_seqlens)} of {sharding.total} rows"
        )


def _check_block_mask(mask: BlockMask) -> None:
    """Refuses masks that differ by head, and selections; the plain functions check its sizes."""
    validate.check_type_of_block_mask(mask)
    if mask.selection_block:
        raise ValueError(
            "block_mask: expected one of blocks of queries over ranks, got key blocks selected per query "
            "(BlockMask.from_selection)"
        )
    if mask.heads != 1:
        raise ValueError(
            f"block_mask: expected one for all heads, as each rank computes some of them, got one of {mask.heads} heads"
        )


def _lengths_on_host(
    call: RankCall, queries: Sharding, keys: Sharding
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Both seqused as numbers: those given, or in the place of tensors on a device those that the shardings keep."""
    used_q, used_k = call.seqused_q, call.seqused_k
    lengths_q = _on_host("seqused_q", used_q, queries.seqused_q)
    lengths_k = _on_host("seqused_k", used_k, queries.seqused_k if keys.seqused_k is None else keys.seqused_k)
    is_same = isinstance(used_q, Tensor) and isinstance(used_k, Tensor) and is_same_memory(used_q, used_k)
    if is_same and lengths_q != lengths_k:
        raise ValueError(
            f"seqused_k: expected another tensor than seqused_q, as the sharding keeps other lengths of keys, "
            f"{list(lengths_k or ())}, than of queries, {list(lengths_q or ())}, got the same"
        )
    return lengths_q, lengths_k


def _check_owned(name: str, sharding: Sharding, used: tuple[int, ...] | None, *, dense: bool) -> None:
    """Refuses calls in which rows are real that the sharding has as padding, and so gives to no document."""
    if sharding.owned is None:
        return
    slots = (stop - start for start, stop in itertools.pairwise(sharding.cu_seqlens))
    owned = sharding.owned * (len(used) if dense and used is not None else 1)
    for number, (length, most) in enumerate(zip(slots if used is None else used, owned, strict=False)):
        if length > most:
            what, got = "entry" if dense else "document", f"all {length}" if used is None else str(length)
            raise ValueError(
                f"{name}: expected at most {most} real rows of {what} {number}, as others are padding by the lengths "
                f"that the sharding was made with, got {got}: make the sharding with these lengths"
            )


def _on_host(name: str, lengths: Lengths, kept: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Lengths as numbers; on a GPU they are read only with FLASH_ATTN_CUTE_CHECK=1, to compare them."""
    if lengths is None or not isinstance(lengths, Tensor) or lengths.device.type == "cpu":
        return None if lengths is None else numbers(name, lengths)
    if kept is None:
        raise ValueError(
            f"{name}: expected lengths on the host, or a sharding that keeps them (Sharding.balanced(..., {name}=...) "
            f"or with_lengths), as ranks plan by them what they exchange, got a tensor on {lengths.device}"
        )
    if lengths.shape != (len(kept),):
        raise ValueError(
            f"{name}: expected shape ({len(kept)},), as many lengths as the sharding keeps, "
            f"got shape {tuple(lengths.shape)}"
        )
    if settings.check_data() and numbers(name, lengths) != kept:
        raise ValueError(f"{name}: expected those that the sharding keeps, {list(kept)}, got {lengths.tolist()}")
    return kept
