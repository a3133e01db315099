"""PyTorch's ``context_parallel`` with this package's attention: ranks share buffers, and calls see all rows."""

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flash_attn_cute.calls.attend import replaced
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.prepared_call import Plan
from flash_attn_cute.distributed import public_functions, rank_agreement
from flash_attn_cute.distributed.checked_call import check_method, check_sharding, grid
from flash_attn_cute.distributed.process_groups import Group, Place, Ranks, dimensions
from flash_attn_cute.distributed.sharding import Sharding, check_dimension, check_sequence
from flash_attn_cute.integrations import sdpa
from flash_attn_cute.problem.spec import AttentionInputs, Results, check_plain
from flash_attn_cute.runtime import settings


class _Context(NamedTuple):
    """A context that is open, and the thread that has entered it."""

    sharding: Sharding
    thread: int


_open: list[_Context] = []  # the innermost one last


@contextmanager
def context_parallel(
    mesh: Group,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    sharding: Sharding | None = None,
    method: str = "auto",
) -> Iterator[Sharding]:
    """Deals the rows of buffers over ranks, and has all attention inside run over the ranks; a context manager.

    It takes the arguments of ``torch.distributed.tensor.experimental.context_parallel`` and can stand in its place, as
    in torchtitan's ``create_context_parallel_ctx``. What runs over the ranks is
    ``torch.nn.functional.scaled_dot_product_attention``, where it is called by this name, and every function of this
    package, its integrations included, in all threads. Each call has to be on this rank's rows; masks, biases and block
    masks are refused. What else there is, FlexAttention for one, sees this rank's rows alone.

    Inside, each buffer is this rank's rows of what it was, in other memory; afterwards it is what it was, unless it is
    in ``no_restore_buffers``. Rows are dealt in balance for causal attention, whatever their number. Forward and
    backward pass belong inside: activation checkpointing calls attention once more.

    Args:
        mesh: the ranks, a device mesh of one or two dimensions or a process group; None: all processes.
        buffers: tensors with all rows of the sequence, the same on every rank: tokens, targets, positions or rotary
            embeddings. None of them requires a gradient.
        buffer_seq_dims: the dimension of rows of each buffer.
        no_restore_buffers: those of the buffers that stay as they are inside.
        sharding: who has which rows; None: ``Sharding.balanced`` for one causal sequence as long as the first buffer.
            One of packed documents serves packed calls, whose ``cu_seqlens`` are those of all rows.
        method: as in ``context_parallel_attn_varlen_func``.

    Yields:
        The sharding, with which ``gather`` puts results together.

    Raises:
        TypeError: buffers or dimensions that are no sequence, a buffer that is no tensor, a sharding that is none, or
            neither a process group nor a mesh.
        ValueError: neither buffers nor a sharding; not as many dimensions as buffers; a buffer that requires gradients
            or has another number of rows; one not to be restored that is no buffer; a sharding or a method that does
            not fit the mesh. With ``FLASH_ATTN_CUTE_CHECK=1`` all ranks raise what one of them does, and if they
            disagree. Inside, calls raise what ``context_parallel_attn_varlen_func`` raises.
        RuntimeError: another thread is inside. Contexts of one thread may be nested.
    """
    given = [] if buffers is None else list(check_sequence("buffers", buffers))
    dims = [] if buffer_seq_dims is None else list(check_sequence("buffer_seq_dims", buffer_seq_dims))
    kept = [] if no_restore_buffers is None else list(check_sequence("no_restore_buffers", no_restore_buffers))
    place = grid(dimensions(mesh, "mesh"), method).place
    sharding = rank_agreement.on_all_ranks(
        mesh,
        lambda: _checked_sharding(given, dims, kept, sharding, place, method),
        lambda found: {"sharding": rank_agreement.layout_of(found), "method": method},
    )
    shards = [sharding.shard(x, place.rank, dim) for x, dim in zip(given, dims, strict=True)]
    context = _Context(sharding, threading.get_ident())
    with ExitStack() as restored:
        _open.append(context)
        restored.callback(_open.remove, context)
        if _open[0].thread != context.thread:  # it would leave before the other one, or be served by its sharding
            raise RuntimeError(
                "context_parallel: expected one thread at a time, as it replaces the attention of all threads, "
                "got a second one while another is inside"
            )
        for x, shard in zip(given, shards, strict=True):
            if all(x is not other for other in kept):
                restored.callback(_hold, x, x.detach())
            # Memory of its own: targets are often a view of the same rows as tokens, one further on.
            _hold(x, shard)
        restored.enter_context(replaced(_OverRanks(sharding, mesh, method).attend))
        # Every caller looks it up there, functions of PyTorch included.
        restored.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = sdpa.scaled_dot_product_attention  # type: ignore[assignment]
        yield sharding


def _checked_sharding(
    buffers: list[Tensor], dims: list[int], kept: list[Tensor], sharding: Sharding | None, place: Place, method: str
) -> Sharding:
    """Checks the arguments of ``context_parallel``, and returns the sharding that is given or the default one."""
    if len(dims) != len(buffers):
        raise ValueError(f"buffer_seq_dims: expected {len(buffers)}, one a buffer, got {len(dims)}")
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        check_dimension(f"buffers[{i}]", x, dim)
        check_plain(f"buffers[{i}]", x)
        if x.requires_grad:
            raise ValueError(f"buffers[{i}]: expected a tensor that requires no gradient, got one that does")
    if any(all(x is not buffer for buffer in buffers) for x in kept):
        raise ValueError("no_restore_buffers: expected some of buffers, got another tensor")
    if sharding is None:
        if not buffers:
            raise ValueError("buffers: expected at least one, whose rows are the sequence, got none and no sharding")
        sharding = _balanced(buffers[0].shape[dims[0]], place.size)
    check_sharding("sharding", sharding, place, dense=False)
    check_method(method, place)
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if x.shape[dim] != sharding.total:
            raise ValueError(
                f"buffers[{i}]: expected {sharding.total} rows in dimension {dim}, got shape {tuple(x.shape)}"
            )
    return sharding


def context_parallel_unshard(mesh: Group, buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[Tensor]:
    """All rows in their order, on every rank, of results from within ``context_parallel``, as PyTorch's does it.

    It asks all ranks for their number of rows, which costs a collective and a wait. Within ``context_parallel`` the
    sharding of the context serves as many rows as it has. Elsewhere, and for other numbers of rows, the default one
    does. ``gather`` takes any sharding, and does not have to ask. No gradient goes through it.

    Args:
        mesh: as in ``context_parallel``.
        buffers: tensors that have this rank's rows, all of the same number.
        seq_dims: the dimension of rows of each.

    Raises:
        TypeError: neither a process group nor a mesh, buffers or seq_dims that are no sequence, a buffer that is no
            tensor, or a dimension that is no int.
        ValueError: not as many dimensions as buffers, a dimension that its buffer lacks, or rows of another number than
            the sharding gives this rank. With ``FLASH_ATTN_CUTE_CHECK=1`` all ranks raise what one of them does.
    """
    ranks = Ranks.over(dimensions(mesh, "mesh"))

    def stated() -> dict[str, str]:
        check_sequence("buffers", buffers)
        check_sequence("seq_dims", seq_dims)
        if len(seq_dims) != len(buffers):
            raise ValueError(f"seq_dims: expected {len(buffers)}, one a buffer, got {len(seq_dims)}")
        for i, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
            check_dimension(f"buffers[{i}]", x, dim)
            check_plain(f"buffers[{i}]", x)
        return {"the number of buffers": str(len(buffers))}

    rank_agreement.check_if_asked(ranks, stated)
    if not buffers:
        return []
    rows = torch.tensor(buffers[0].shape[seq_dims[0]], device=buffers[0].device)
    for group in ranks:
        if group is not None:
            dist.all_reduce(rows, group=group)
    total, size = int(rows), ranks.place.size
    of_context = [x.sharding for x in _open[-1:] if (x.sharding.total, x.sharding.num_ranks) == (total, size)]
    sharding = of_context[0] if of_context else _balanced(total, size)
    return [public_functions.gather(x, sharding, mesh, dim=dim) for x, dim in zip(buffers, seq_dims, strict=True)]


@functools.lru_cache(maxsize=16)
def _balanced(rows: int, num_ranks: int) -> Sharding:
    """One object for all batches of a length, which remembers what attention has worked out for it."""
    return Sharding.balanced([0, rows], num_ranks, causal=True)


class _OverRanks(NamedTuple):
    """The attention that replaces that of one GPU inside ``context_parallel``."""

    sharding: Sharding
    group: Group
    method: str

    def attend(self, call: AttentionCall, prepared: Callable[[], tuple[AttentionInputs, Plan]]) -> Results:
        """Results of a call on this rank's rows."""

        def checked() -> tuple[AttentionInputs, Plan]:
            _refuse(call)
            inputs, plan = prepared()
            self._check_lengths(inputs)
            return inputs, plan

        inputs, plan = rank_agreement.on_all_ranks(self.group, checked)
        return public_functions.attend(
            (inputs.q, inputs.k, inputs.v, inputs.learnable_sink, None, None, None),
            (self.sharding, None),
            (inputs.seqused_q, inputs.seqused_k),
            lambda: plan.options,
            plan.backend,
            self.group,
            self.method,
            dense=not inputs.packed,
        )

    def _check_lengths(self, inputs: AttentionInputs) -> None:
        """Refuses lengths that are not those of the sharding."""
        for name in ("seqused_q", "seqused_k"):
            used, kept = getattr(inputs, name), getattr(self.sharding, name)
            if used is not None and kept is not None:
                _check_numbers(name, used, kept)
        if inputs.packed:
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                _check_offsets(name, getattr(inputs, name), self.sharding)


def _refuse(call: AttentionCall) -> None:
    """Refuses what no call over ranks takes, of whatever shape: one of all rows would else be found too large."""
    public_functions.refuse_scores(call.mask, call.bias)
    if call.block_mask is not None:
        raise ValueError(
            "block_mask: expected None within context_parallel, where calls see this rank's rows alone; "
            "context_parallel_attn_func takes one over all rows"
        )
    if call.options.precise_gradients:
        raise ValueError(
            "precise_gradients: expected False within context_parallel, where out of several ranks is merged, got True"
        )


def _hold(x: Tensor, other: Tensor) -> None:
    """Makes x a view of all that the other one is."""
    x.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())


def _check_offsets(name: str, offsets: Tensor, sharding: Sharding) -> None:
    """Whether packed sequences are the documents of a sharding; what is on a GPU is waited for only by request."""
    expected = len(sharding.cu_seqlens)
    if offsets.shape[0] != expected:
        raise ValueError(
            f"{name}: expected the {expected} offsets of the sharding, got {offsets.shape[0]}; "
            "within context_parallel cu_seqlens are those of all rows, as in the sharding"
        )
    _check_numbers(name, offsets, sharding.cu_seqlens)


def _check_numbers(name: str, given: Tensor, expected: tuple[int, ...]) -> None:
    """Whether offsets or lengths are those of a sharding; likewise."""
    if torch.compiler.is_compiling() or (given.device.type != "cpu" and not settings.check_data()):
        return
    if tuple(given.tolist()) != expected:
        raise ValueError(f"{name}: expected those of the sharding, {list(expected)}, got {given.tolist()}")
