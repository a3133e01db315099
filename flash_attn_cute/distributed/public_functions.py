"""The public functions: attention whose rows are sharded over the ranks of a group."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch
from torch import Tensor

from flash_attn_cute.api import SharedKeywords
from flash_attn_cute.calls import validate
from flash_attn_cute.calls.attend import Result
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.torch_modes import autocast
from flash_attn_cute.calls.user_errors import says_where_to_look
from flash_attn_cute.distributed import rank_agreement
from flash_attn_cute.distributed.checked_call import Lengths, RankCall, check_sharding
from flash_attn_cute.distributed.eager_and_compiled import attend_compiled, attend_eagerly
from flash_attn_cute.distributed.process_groups import Group, Ranks, all_gather_rows, dimensions, names_of
from flash_attn_cute.distributed.sharding import Sharding, check_dimension
from flash_attn_cute.problem.spec import Deterministic, Options, Results, Window, check_plain
from flash_attn_cute.sparsity.block_mask import BlockMask

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Keywords(SharedKeywords, total=False):
    """Types of the keywords of both functions, but for those that say what is returned."""

    group: Group
    method: str
    seqused_q: Lengths
    seqused_k: Lengths
    mask: None
    bias: None


class _Attention(Protocol):
    """Types of both functions: results as asked for."""

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sharding: Sharding,
        sharding_k: Sharding | None = ...,
        *,
        return_lse: Literal[False] = ...,
        return_max_logits: Literal[False] = ...,
        **options: "Unpack[Keywords]",
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sharding: Sharding,
        sharding_k: Sharding | None = ...,
        *,
        return_lse: Literal[True],
        return_max_logits: Literal[False] = ...,
        **options: "Unpack[Keywords]",
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sharding: Sharding,
        sharding_k: Sharding | None = ...,
        *,
        return_lse: bool = ...,
        return_max_logits: Literal[True],
        **options: "Unpack[Keywords]",
    ) -> tuple[Tensor, ...]: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sharding: Sharding,
        sharding_k: Sharding | None = ...,
        *,
        return_lse: bool = ...,
        return_max_logits: bool = ...,
        **options: "Unpack[Keywords]",
    ) -> Tensor | tuple[Tensor, ...]: ...


_SHARDING = "a sharding, which Sharding.balanced makes of cu_seqlens, takes the place of cu_seqlens and max_seqlen"


def _typed(function: Callable[..., Result]) -> _Attention:
    """A function of all these arguments, for type checkers."""
    function = says_where_to_look(_SHARDING)(function)
    return function  # type: ignore[return-value]


@_typed
def context_parallel_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = None,
    *,
    group: Group = None,
    method: str = "auto",
    seqused_q: Lengths = None,
    seqused_k: Lengths = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    mask: None = None,
    bias: None = None,
    block_mask: BlockMask | None = None,
    deterministic: Deterministic = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    zero_padding: bool = True,
    backend: str | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """``flash_attn_func`` over a dense batch whose rows are dealt over ranks; every rank calls it with its own rows.

    All entries of the batch are dealt alike. Everything else, arguments that are not listed included, is as in
    ``context_parallel_attn_varlen_func``.

    Args:
        q: (batch, rows, nheads, d), this rank's rows of each entry, as ``sharding.shard(x, rank, dim=1)`` gives them.
        k: (batch, rows_k, nheads_k, d).
        v: (batch, rows_k, nheads_k, d_v).
        sharding: which rows each rank has: of one document, as long as an entry.
        sharding_k: likewise of k and v; None: the same.
        seqused_q: (batch,), the real rows of each entry.
        seqused_k: (batch,), the real keys of each entry.
        block_mask: over all rows of an entry; its batch is 1 or that of q.

    Returns:
        out (batch, rows, nheads, d_v) of q's dtype; with return_lse, (out, lse), lse (batch, nheads, rows); with
        return_max_logits the tuple ends with max_logits (nheads,).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value.
    """
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": return_lse,
        "return_max_logits": return_max_logits,
        "zero_padding": zero_padding,
        "backend": backend,
        "dropout_p": dropout_p,
    }
    tensors = (q, k, v, learnable_sink, mask, bias, block_mask)
    shardings, lengths = (sharding, sharding_k), (seqused_q, seqused_k)
    results = attend(
        tensors, shardings, lengths, lambda: validate.check_options(**options), backend, group, method, dense=True
    )
    return results.asked(return_lse)


@_typed
def context_parallel_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = None,
    *,
    group: Group = None,
    method: str = "auto",
    seqused_q: Lengths = None,
    seqused_k: Lengths = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    mask: None = None,
    bias: None = None,
    block_mask: BlockMask | None = None,
    deterministic: Deterministic = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    zero_padding: bool = True,
    backend: str | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """``flash_attn_varlen_func`` over packed documents whose rows are dealt over ranks; each calls it with its own.

    A sharding takes the place of cu_seqlens and max_seqlen, which it has for all ranks. Semantics are those of the
    plain function on all rows; q, k, v, out and lse are this rank's rows of it. All ranks of the group have to call it,
    in the same order if they call it more than once. If one of them runs the backward pass, all have to, with
    gradients of the same results. With ``FLASH_ATTN_CUTE_CHECK=1`` every call begins by comparing the arguments of all
    ranks, and raises on each of them where ranks disagree or one of them has wrong ones.

    Out and lse of parts of the keys are merged in float32 and rounded once, and dQ, dK and dV are summed so, over ranks
    in a fixed order; float64 stays float64.

    Methods (``docs/context-parallelism.md`` has a picture of each):

    - "all_gather": a rank first collects all keys that its queries see, and no others. Nothing has to be merged.
    - "ring": blocks of keys go round, the next one while a rank computes with the last. A rank has two at a time.
    - "all_to_all": ranks trade rows for heads. Their number divides nheads, and nheads_k or is a multiple of it.
    - "auto": the one by which ranks wait least, by a model of bytes and FLOP (``distributed.cost_model``).

    A two-dimensional mesh mixes them: ranks of its second dimension trade rows for heads, and ``method`` is that of
    the first dimension.

    Args:
        q: (rows, nheads, d), float16, bfloat16, float32 or float64; this rank's rows, in the order of the sharding.
        k: (rows_k, nheads_k, d), of q's dtype; nheads_k divides nheads.
        v: (rows_k, nheads_k, d_v), of q's dtype.
        sharding: which rows each rank has. Use the same object in all layers: what follows from it is kept.
        sharding_k: likewise of k and v; None: the same.
        group: a process group, or a device mesh of one or two dimensions, of as many ranks as the sharding; rank
            (i, j) of a mesh has the rows of rank i * size(1) + j. None: all processes.
        method: "auto", "all_gather", "ring" or "all_to_all".
        seqused_q: (documents,), the real rows of each document if fewer than it owns: numbers or a tensor on the host,
            or a tensor on a GPU, in whose place the lengths that the sharding keeps are taken.
        seqused_k: (documents,), likewise for keys.
        softmax_scale: the factor before softmax; None means 1 / sqrt(d).
        causal: hide the keys behind a query's own position.
        window_size: (left, right), see ``flash_attn_func``.
        softcap: bound on the scores' magnitude; 0 means none.
        learnable_sink: (nheads,), the same on all ranks. A rank's gradient of it is that of its own part of the work:
            like those of all parameters they have to be summed over the ranks.
        mask: None; mask tensors are not supported.
        bias: None; bias tensors are not supported.
        block_mask: the same on every rank, over all rows of queries and keys in their order, for all heads; its batch
            is 1. Ranks then trade rows for heads (method "auto" or "all_to_all", a group of one dimension), and each
            computes all rows of some heads. ``torch.compile`` breaks its graph there.
        deterministic: the same inputs on as many ranks of the same kind of GPU give the same bits. "invariant": as in
            ``flash_attn_func``, for documents that are not cut.
        return_lse: also return the log-sum-exp of the scores.
        return_max_logits: also return the largest logit of each head, over the rows of all ranks; see
            ``flash_attn_func``. Every rank has to ask for it, and takes part in a reduction over all of them.
        zero_padding: padding rows are zero either way.
        backend: of every rank's calls; None picks the best that can serve them.
        dropout_p: 0.0, as in the plain function.

    Returns:
        out (rows, nheads, d_v) of q's dtype; with return_lse, (out, lse), lse being natural logarithms, (nheads, rows),
        float32 (float64 for float64 inputs); with return_max_logits the tuple ends with max_logits (nheads,), the same
        on every rank.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value; a sharding of another number of ranks or
            rows; or a method that cannot serve the call. Either message names the argument, what was expected and what
            came.
    """
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": return_lse,
        "return_max_logits": return_max_logits,
        "zero_padding": zero_padding,
        "backend": backend,
        "dropout_p": dropout_p,
    }
    tensors = (q, k, v, learnable_sink, mask, bias, block_mask)
    shardings, lengths = (sharding, sharding_k), (seqused_q, seqused_k)
    results = attend(
        tensors, shardings, lengths, lambda: validate.check_options(**options), backend, group, method, dense=False
    )
    return results.asked(return_lse)


def rank_of(group: Group = None) -> int:
    """The number by which shardings know this process.

    Args:
        group: a process group (None: all processes), or a mesh of one or two dimensions.

    Returns:
        Its rank in the group; in a mesh of two dimensions ``i * mesh.size(1) + j`` for process (i, j).

    Raises:
        TypeError: neither a process group nor a mesh.
        ValueError: a mesh of more than two dimensions, or one of two whose processes are not in ascending order along
            each, or a group that this process is not in.
    """
    return Ranks.of(group).place.rank


def gather(x: Tensor, sharding: Sharding, group: Group = None, *, dim: int = 0) -> Tensor:
    """All rows in their order, on every rank, from each rank's own ones. No gradient goes through it.

    Args:
        x: any tensor that has this rank's rows.
        sharding: which rows each rank has.
        group: its ranks; as in ``context_parallel_attn_varlen_func``.
        dim: the dimension of rows.

    Returns:
        A tensor of x's dtype and device, with the ``total`` rows of the sharding in that dimension.

    Raises:
        TypeError: neither a process group nor a mesh, x is no tensor, or dim no int.
        ValueError: a group or a tensor that does not fit the sharding, or a tensor without that dimension. With
            ``FLASH_ATTN_CUTE_CHECK=1`` all ranks raise what one of them does, and if they disagree.
    """
    ranks = Ranks.of(group)
    rank, _, size = ranks.place

    def stated() -> dict[str, str]:
        check_dimension("x", x, dim)
        check_plain("x", x)
        check_sharding("sharding", sharding, ranks.place, dense=False)
        if x.shape[dim] != sharding.num_rows(rank):
            expected = f"{sharding.num_rows(rank)} rows in dimension {dim}"
            raise ValueError(f"x: expected {expected}, got shape {tuple(x.shape)}")
        return {
            "sharding": rank_agreement.layout_of(sharding),
            "x, but its rows": str(tuple(x.movedim(dim, 0).shape[1:])),
            "dtype": str(x.dtype),
            "device": x.device.type,
        }

    rank_agreement.check_if_asked(ranks, stated)
    counts = [sharding.num_rows(each) for each in range(sharding.num_ranks)]
    first = rank - rank % size
    own = torch.cat(all_gather_rows(x.detach().movedim(dim, 0), counts[first : first + size], ranks.inner))
    sums = [sum(counts[i : i + size]) for i in range(0, len(counts), size)]
    everything = torch.cat(all_gather_rows(own, sums, ranks.outer))
    return sharding.unshard(everything.split(counts)).movedim(0, dim)


def attend(
    tensors: tuple[Any, ...],
    shardings: tuple[Sharding, Sharding | None],
    lengths: tuple[Lengths, Lengths],
    checked: Callable[[], Options],
    backend: str | None,
    group: Group,
    method: str,
    *,
    dense: bool,
) -> Results:
    """Results of this rank's rows, for both functions.

    ``tensors`` are q, k, v, learnable_sink, mask, bias and block_mask. ``checked`` gives the options, or raises what is
    wrong with them.
    """
    q, k, v, sink, mask, bias, block_mask = tensors

    def options() -> Options:
        for name, x in (("q", q), ("k", k), ("v", v), ("learnable_sink", sink)):
            check_plain(name, x, " of this rank's rows and heads")  # which placements cannot express
        refuse_scores(mask, bias)
        # A call leaves rows of others unwritten: of its rank's other calls, and of other ranks.
        return checked()._replace(zero_padding=True)

    cast = autocast(AttentionCall(q, k, v, learnable_sink=sink))
    q, k, v, sink = cast.q, cast.k, cast.v, cast.learnable_sink
    arguments = (q, k, v, sink, *shardings, *lengths)
    if block_mask is not None:
        return _attend_apart(RankCall(*arguments, dimensions(group), method, dense, block_mask), options, backend)
    if torch.compiler.is_compiling():
        return attend_compiled(arguments, names_of(group), method, dense, options(), backend)
    return attend_eagerly(RankCall(*arguments, dimensions(group), method, dense), options, backend)


_attend_apart = torch.compiler.disable(attend_eagerly, reason="operators over ranks take no block masks")


def refuse_scores(mask: Any, bias: Any) -> None:
    """Raises ValueError for tensors with an element a score."""
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            raise ValueError(
                f"{name}: expected None, tensors with an element a score are not dealt over ranks, "
                f"got {type(x).__name__}"
            )
