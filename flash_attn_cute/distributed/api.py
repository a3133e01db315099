"""The public functions: attention whose rows are dealt over the ranks of a group."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from flash_attn_cute import ops, settings, validate
from flash_attn_cute.distributed import agreement, attention, model
from flash_attn_cute.distributed.groups import Group, Place, Ranks, all_gather_rows
from flash_attn_cute.distributed.sharding import Sharding, numbers
from flash_attn_cute.spec import Options

# ``out``, or ``(out, lse)`` with return_lse=True.
Result: TypeAlias = Tensor | tuple[Tensor, Tensor]
Lengths: TypeAlias = Sequence[int] | Tensor | None


@overload
def context_parallel_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = ...,
    *,
    group: Group = ...,
    method: str = ...,
    seqused_q: Lengths = ...,
    seqused_k: Lengths = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: validate.Window = ...,
    softcap: float = ...,
    learnable_sink: Tensor | None = ...,
    mask: None = ...,
    bias: None = ...,
    block_mask: None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    zero_padding: bool = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
) -> Tensor: ...


@overload
def context_parallel_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = ...,
    *,
    group: Group = ...,
    method: str = ...,
    seqused_q: Lengths = ...,
    seqused_k: Lengths = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: validate.Window = ...,
    softcap: float = ...,
    learnable_sink: Tensor | None = ...,
    mask: None = ...,
    bias: None = ...,
    block_mask: None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    zero_padding: bool = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def context_parallel_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = ...,
    *,
    group: Group = ...,
    method: str = ...,
    seqused_q: Lengths = ...,
    seqused_k: Lengths = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: validate.Window = ...,
    softcap: float = ...,
    learnable_sink: Tensor | None = ...,
    mask: None = ...,
    bias: None = ...,
    block_mask: None = ...,
    deterministic: bool = ...,
    return_lse: bool = ...,
    zero_padding: bool = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    window_size: validate.Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    mask: None = None,
    bias: None = None,
    block_mask: None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    zero_padding: bool = True,
    backend: str | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """``flash_attn_func`` over a dense batch whose rows are dealt over ranks; every rank calls it with its own rows.

    All entries of the batch are dealt alike. Everything else is as in ``context_parallel_attn_varlen_func``.

    Args:
        q: (batch, rows, nheads, d), this rank's rows of each entry, as ``sharding.shard(x, rank, dim=1)`` gives them.
        k: (batch, rows_k, nheads_k, d).
        v: (batch, rows_k, nheads_k, d_v).
        sharding: which rows each rank has: of one document, as long as an entry.
        sharding_k: likewise of k and v; None: the same.
        group: the ranks, of a process group or of a device mesh.
        method: how queries come to see keys of other ranks.
        seqused_q: (batch,) on the host, the real rows of each entry.
        seqused_k: (batch,) on the host, the real keys of each entry.
        softmax_scale: the factor before softmax.
        causal: hide the keys behind a query's own position.
        window_size: (left, right).
        softcap: bound on the scores' magnitude.
        learnable_sink: (nheads,).
        mask: None.
        bias: None.
        block_mask: None.
        deterministic: the same inputs on as many ranks give the same bits.
        return_lse: also return the log-sum-exp of the scores.
        zero_padding: padding rows are zero either way.
        backend: of every rank's calls.
        dropout_p: 0.0.

    Returns:
        out (batch, rows, nheads, d_v) of q's dtype; with return_lse, (out, lse), lse (batch, nheads, rows).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value.
    """
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": return_lse,
        "zero_padding": zero_padding,
        "backend": backend,
        "dropout_p": dropout_p,
    }
    tensors = (q, k, v, learnable_sink, mask, bias, block_mask)
    lengths = (seqused_q, seqused_k)
    out, lse = _attend(tensors, (sharding, sharding_k), lengths, options, group, method, dense=True)
    return (out, lse) if return_lse else out


@overload
def context_parallel_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = ...,
    *,
    group: Group = ...,
    method: str = ...,
    seqused_q: Lengths = ...,
    seqused_k: Lengths = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: validate.Window = ...,
    softcap: float = ...,
    learnable_sink: Tensor | None = ...,
    mask: None = ...,
    bias: None = ...,
    block_mask: None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    zero_padding: bool = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
) -> Tensor: ...


@overload
def context_parallel_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = ...,
    *,
    group: Group = ...,
    method: str = ...,
    seqused_q: Lengths = ...,
    seqused_k: Lengths = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: validate.Window = ...,
    softcap: float = ...,
    learnable_sink: Tensor | None = ...,
    mask: None = ...,
    bias: None = ...,
    block_mask: None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    zero_padding: bool = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def context_parallel_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    sharding_k: Sharding | None = ...,
    *,
    group: Group = ...,
    method: str = ...,
    seqused_q: Lengths = ...,
    seqused_k: Lengths = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: validate.Window = ...,
    softcap: float = ...,
    learnable_sink: Tensor | None = ...,
    mask: None = ...,
    bias: None = ...,
    block_mask: None = ...,
    deterministic: bool = ...,
    return_lse: bool = ...,
    zero_padding: bool = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    window_size: validate.Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    mask: None = None,
    bias: None = None,
    block_mask: None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    zero_padding: bool = True,
    backend: str | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """``flash_attn_varlen_func`` over packed documents whose rows are dealt over ranks; each calls it with its own.

    A sharding takes the place of cu_seqlens and max_seqlen, which it has for all ranks. Semantics are those of the
    plain function on all rows; q, k, v, out and lse are this rank's rows of it. All ranks of the group have to call it,
    in the same order if they call it more than once, and have to run the backward pass if one of them does. With
    ``FLASH_ATTN_CUTE_CHECK=1`` every call begins by comparing the arguments of all ranks, and raises on each of them
    where ranks disagree or one of them has wrong ones.

    Out and lse of parts of the keys are merged in float32 and rounded once, and dQ, dK and dV are summed so, over ranks
    in a fixed order; float64 stays float64. Kernels round the results of each part to q's dtype before. An option to
    write float32 there would spare that error.

    Methods (``docs/context-parallelism.md`` has a picture of each):

    - "all_gather": a rank first collects all keys that its queries see, and no others. Nothing has to be merged.
    - "ring": blocks of keys go round, the next one while a rank computes with the last. A rank has two at a time.
    - "all_to_all": ranks trade rows for heads. Their number divides nheads, and nheads_k or is a multiple of it.
    - "auto": the one by which ranks wait least, by a model of bytes and FLOP (``distributed.model``).

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
        seqused_q: (documents,) on the host, the real rows of each document if fewer than it owns.
        seqused_k: (documents,) on the host, likewise for keys.
        softmax_scale: the factor before softmax; None means 1 / sqrt(d).
        causal: hide the keys behind a query's own position.
        window_size: (left, right), see ``flash_attn_func``.
        softcap: bound on the scores' magnitude; 0 means none.
        learnable_sink: (nheads,), the same on all ranks. A rank's gradient of it is that of its own part of the work:
            like those of all parameters they have to be summed over the ranks.
        mask: None; mask tensors are not supported.
        bias: None; bias tensors are not supported.
        block_mask: None; block masks are not supported.
        deterministic: the same inputs on as many ranks of the same kind of GPU give the same bits.
        return_lse: also return the log-sum-exp of the scores.
        zero_padding: padding rows are zero either way.
        backend: of every rank's calls; None picks the best that can serve them.
        dropout_p: 0.0, as in the plain function.

    Returns:
        out (rows, nheads, d_v) of q's dtype; with return_lse, (out, lse), lse being natural logarithms, (nheads, rows),
        float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, strides, device or value; a sharding of another number of ranks or
            rows; or a method that cannot serve the call. Either message names the argument, what was expected and what
            came.
    """
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": return_lse,
        "zero_padding": zero_padding,
        "backend": backend,
        "dropout_p": dropout_p,
    }
    tensors = (q, k, v, learnable_sink, mask, bias, block_mask)
    lengths = (seqused_q, seqused_k)
    out, lse = _attend(tensors, (sharding, sharding_k), lengths, options, group, method, dense=False)
    return (out, lse) if return_lse else out


def rank_of(group: Group = None) -> int:
    """The number by which shardings know this process in a group, or in a mesh of one or two dimensions.

    Raises:
        TypeError: neither a process group nor a mesh.
        ValueError: a mesh of more than two dimensions, or a group that this process is not in.
    """
    return Ranks.of(group).place.rank


def gather(x: Tensor, sharding: Sharding, group: Group = None, *, dim: int = 0) -> Tensor:
    """All rows in their order, on every rank, from each rank's own ones. No gradient goes through it.

    Args:
        x: any tensor that has this rank's rows.
        sharding: which rows each rank has.
        group: its ranks; as in ``context_parallel_attn_varlen_func``.
        dim: the dimension of rows.

    Raises:
        TypeError: neither a process group nor a mesh.
        ValueError: a group or a tensor that does not fit the sharding.
    """
    ranks = Ranks.of(group)
    check_sharding("sharding", sharding, ranks.place, dense=False)
    counts = [sharding.num_rows(rank) for rank in range(sharding.num_ranks)]
    rank, _, size = ranks.place
    if x.shape[dim] != counts[rank]:
        raise ValueError(f"x: expected {counts[rank]} rows in dimension {dim}, got shape {tuple(x.shape)}")
    first = rank - rank % size
    own = torch.cat(all_gather_rows(x.detach().movedim(dim, 0), counts[first : first + size], ranks.inner))
    sums = [sum(counts[i : i + size]) for i in range(0, len(counts), size)]
    everything = torch.cat(all_gather_rows(own, sums, ranks.outer))
    return sharding.unshard(everything.split(counts)).movedim(0, dim)


@torch.compiler.disable  # its collectives go by plans made on the host
def _attend(
    tensors: tuple[Any, ...],
    shardings: tuple[Sharding, Sharding | None],
    lengths: tuple[Lengths, Lengths],
    given: dict[str, Any],
    group: Group,
    method: str,
    *,
    dense: bool,
) -> tuple[Tensor, Tensor]:
    ranks = Ranks.of(group, by_heads=method == "all_to_all")
    tensors, backend = _autocast(tensors), given["backend"]
    try:
        options = validate.check_options(**given)
        question = _question(tensors, shardings, lengths, options, ranks.place, method, dense=dense)
        chosen = attention.plan(question, ranks.place, tensors[0].device)
    except (TypeError, ValueError) as error:
        if settings.check_data():
            agreement.check(Ranks.of(group), error)
        raise
    if settings.check_data():
        agreement.check(Ranks.of(group), _statement(tensors, question, options, backend))
    q, k, v, sink, *_ = tensors
    if not dense:
        return attention.attend(q, k, v, sink, chosen, ranks, options, backend)
    entries = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = attention.attend(q, k, v, sink, chosen, ranks, options, backend)
    return out.unflatten(0, entries), lse.unflatten(1, entries).transpose(0, 1).contiguous()


def _autocast(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, sink, *refused = tensors
    q, k, v, *_, sink, _, _ = ops.autocast((q, k, v, None, None, None, None, sink, None, None))
    return q, k, v, sink, *refused


def _question(
    tensors: tuple[Any, ...],
    shardings: tuple[Sharding, Sharding | None],
    lengths: tuple[Lengths, Lengths],
    options: Options,
    place: Place,
    method: str,
    *,
    dense: bool,
) -> attention.Question:
    """All arguments of a rank checked, and what they come to."""
    q, k, v, sink, mask, bias, block_mask = tensors
    check_method(method, place)
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            raise ValueError(
                f"{name}: expected None, tensors with an element a score are not dealt over ranks, "
                f"got {type(x).__name__}"
            )
    if block_mask is not None:
        raise ValueError(
            f"block_mask: expected None, block masks are not dealt over ranks, got {type(block_mask).__name__}"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor) and x.ndim != (4 if dense else 3):
            dims = "(batch, rows, heads, d)" if dense else "(rows, heads, d)"
            raise ValueError(f"{name}: expected shape {dims}, got shape {tuple(x.shape)}")
    validate.check_dense(
        *((x if dense or not isinstance(x, Tensor) else x[None]) for x in (q, k, v)),
        seqused_q=None,
        seqused_k=None,
        learnable_sink=sink,
        mask=None,
        bias=None,
    )
    queries, keys = shardings[0], shardings[0] if shardings[1] is None else shardings[1]
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
    return attention.Question(
        queries,
        None if keys is queries else keys,
        q.shape[0] if dense else 1,
        _on_host("seqused_q", lengths[0]),
        _on_host("seqused_k", lengths[1]),
        (options.window_left, options.window_right),
        method,
        model.Shape(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.element_size()),
    )


def check_method(method: str, place: Place) -> None:
    """Whether there is such a method for a grid of ranks."""
    if method not in attention.METHODS:
        raise ValueError(f"method: expected one of {list(attention.METHODS)}, got {method!r}")
    if method == "all_to_all" and place.outer_size > 1:
        raise ValueError(
            "method: expected 'auto', 'all_gather' or 'ring', by which keys go over the first dimension of a mesh "
            "(rows are traded for heads along the second one), got 'all_to_all'"
        )


def check_sharding(name: str, sharding: Any, place: Place, *, dense: bool) -> None:
    """Whether it is one over those ranks and, for a dense batch, of one document."""
    if not isinstance(sharding, Sharding):
        raise TypeError(f"{name}: expected a Sharding, got {type(sharding).__name__}")
    if sharding.num_ranks != place.size:
        raise ValueError(f"{name}: expected one over the {place.size} ranks of group, got {sharding.num_ranks}")
    if dense and sharding.cu_seqlens != (0, sharding.total):
        raise ValueError(
            f"{name}: expected one document, an entry of the batch, without padding around it, "
            f"got cu_seqlens {list(sharding.cu_seqlens)} of {sharding.total} rows"
        )


def _on_host(name: str, lengths: Lengths) -> tuple[int, ...] | None:
    if isinstance(lengths, Tensor) and lengths.device.type != "cpu":
        raise ValueError(
            f"{name}: expected lengths on the host, by which ranks plan what they exchange, "
            f"got a tensor on {lengths.device}"
        )
    return None if lengths is None else numbers(lengths)


def _statement(
    tensors: tuple[Any, ...], question: attention.Question, options: Options, backend: str | None
) -> dict[str, str]:
    """Everything on which ranks have to agree."""
    q, _, _, sink, *_ = tensors
    names = ("q", "k", "v", "learnable_sink")
    leaves = [name for name, x in zip(names, tensors, strict=False) if x is not None and x.requires_grad]
    dealt = {
        name: hashlib.sha256(repr((x.cu_seqlens, x.total, x.segments)).encode()).hexdigest()[:12]
        for name, x in (("sharding", question.queries), ("sharding_k", question.keys or question.queries))
    }
    return {
        "method": question.method,
        "heads, d and d_v": str(question.shape[:4]),
        "batch": str(question.batch),
        "dtype": str(q.dtype),
        "device": q.device.type,
        "sink": "None" if sink is None else str(sink.dtype),
        **{name: f"layout {digest}" for name, digest in dealt.items()},
        "seqused_q": str(question.seqused_q),
        "seqused_k": str(question.seqused_k),
        **{name: str(value) for name, value in options._asdict().items()},
        "backend": str(backend),
        "inputs that require gradients": ", ".join(leaves if torch.is_grad_enabled() else []) or "none",
    }
