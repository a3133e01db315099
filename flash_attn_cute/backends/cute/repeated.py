"""Passes of calls that look like one before: what follows from looks is worked out once, so that the host does little.

A call here allocates, looks at addresses, and launches. These passes serve calls without mask, bias, block mask and
max_logits, whose tensors the kernels can read as they are. All others go the way of ``CuteBackend.forward`` and
``CuteBackend.backward``, to the same kernels with the same arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute import counters
from flash_attn_cute.backends.cute.block_arguments import NO_BLOCKS
from flash_attn_cute.backends.cute.layouts import aligned, fits
from flash_attn_cute.backends.packing import dense_has_fully_masked, may_have_fully_masked
from flash_attn_cute.kernels.arguments import BackwardArguments, ForwardArguments
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Results, residual_columns

# As compiled programs of PyTorch's allocate: past the dispatcher, on the current device, in half the time of ``empty``.
_ALLOCATORS: dict[str, Callable[..., Tensor]] = {"cpu": _empty_strided_cpu, "cuda": _empty_strided_cuda}


def _allocators(device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Two functions that make tensors of a shape, strides and a dtype on a device, which is the current one.

    The first leaves memory as it is. The second fills it as PyTorch does under ``torch.use_deterministic_algorithms``:
    ``torch._C._get_deterministic_algorithms()`` is the index of the one to take.
    """

    def filled(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return _ALLOCATORS[device.type], filled


def has_forward(spec: AttentionSpec, like: AttentionInputs) -> bool:
    """Whether ``RepeatedForward`` serves calls that look like this one."""
    vectors = (like.cu_seqlens_q, like.cu_seqlens_k, like.seqused_q, like.seqused_k, like.learnable_sink)
    return (
        not (spec.has_mask or spec.has_bias or spec.has_block_mask or spec.max_logits or spec.wide)
        and (spec.packed or not spec.has_seqused)
        and like.q.numel() > 0
        and like.k.numel() > 0
        and all(fits(x.stride()) for x in (like.q, like.k, like.v))
        and all(x is None or x.stride()[-1] == 1 for x in vectors)
        and (like.learnable_sink is None or like.learnable_sink.dtype == torch.float32)
    )


def has_backward(call: BackwardCall) -> bool:
    """Whether ``RepeatedBackward`` serves calls that look like this one."""
    spec, inputs = call.spec, call.inputs
    return (
        has_forward(spec, inputs)
        and not (call.need_dbias or call.need_dsink)
        and (spec.packed or not dense_has_fully_masked(inputs, spec.window_right))
        and not may_have_fully_masked(inputs, spec.window_right)
        and (inputs.cu_seqlens_q is None or inputs.cu_seqlens_q.shape[0] > 1)
        and all(fits(x.stride()) for x in (call.out, call.dout))
        and all(x is None or x.stride()[-1] == 1 for x in (call.lse, call.dlse))
        and (call.residual is None or call.residual.is_contiguous())
    )


class RepeatedForward:
    """A forward pass of calls that look alike."""

    def __init__(self, launch: Any, spec: AttentionSpec, like: AttentionInputs) -> None:
        """Works out what such calls share.

        Args:
            launch: the kernel and its plan, as ``CuteBackend`` has them.
            spec: that of the calls.
            like: one of them, which ``has_forward``.
        """
        self._launch = launch
        self._device = like.q.device
        self._index, self._allocators = self._device.index, _allocators(self._device)
        rows = tuple(like.q.shape[:-1])
        self._out = _contiguous((*rows, spec.head_dim_v), spec.dtype)
        self._lse = _contiguous(like.lse_shape, torch.float32)
        self._residual = None
        if spec.precise_gradients:
            self._residual = _contiguous((*rows, residual_columns(spec.head_dim_v)), torch.int8)

    def __call__(self, inputs: AttentionInputs) -> Results:
        """See ``Backend.forward``."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._device):
                return self(inputs)
        q, k, v, offsets_q, offsets_k, used_q, used_k, sink, *_ = inputs
        kernel, plan, takes_tiles = self._launch
        empty = self._allocators[torch._C._get_deterministic_algorithms()]
        out, lse = empty(*self._out), empty(*self._lse)
        residual = None if self._residual is None else empty(*self._residual)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            q, k, v = aligned(q), aligned(k), aligned(v)
        kernel(
            ForwardArguments(  # names would take longer than the launch
                q,
                k,
                v,
                out,
                residual,
                lse,
                None,  # mMaxLogits
                offsets_q,
                offsets_k,
                used_q,
                used_k,
                sink,
                None,  # mMask
                None,  # mBias
                None,  # mWorkspace
                counters.next_tile(self._index) if takes_tiles else None,
                NO_BLOCKS,
                None,  # mIntervals
                plan.numbers,
            )
        )
        return Results(out, lse, None, residual)


class RepeatedBackward:
    """A backward pass of calls that look alike."""

    def __init__(self, launch: Any, general: Callable[[BackwardCall], Gradients], like: BackwardCall) -> None:
        """Works out what such calls share.

        Args:
            launch: the kernel and its plan, as ``CuteBackend`` has them.
            general: serves those among them whose sequences have to be split, which looks do not say.
            like: one of them, which ``has_backward``.
        """
        self._launch, self._general = launch, general
        self._device = like.inputs.q.device
        self._index, self._allocators = self._device.index, _allocators(self._device)
        self._window_right = like.spec.window_right if like.spec.packed else None
        self._grads = [_contiguous(tuple(x.shape), x.dtype) for x in like.inputs[:3]]
        self._workspace = _contiguous((launch.plan.workspace_size,), torch.uint8)

    def __call__(self, call: BackwardCall) -> Gradients:
        """See ``Backend.backward``."""
        _, inputs, out, lse, dout, dlse, residual, *_ = call
        if self._window_right is not None and may_have_fully_masked(inputs, self._window_right):
            return self._general(call)
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._device):
                return self(call)
        q, k, v, offsets_q, offsets_k, used_q, used_k, *_ = inputs
        empty, (of_q, of_k, of_v) = self._allocators[torch._C._get_deterministic_algorithms()], self._grads
        dq, dk, dv, workspace = empty(*of_q), empty(*of_k), empty(*of_v), empty(*self._workspace)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()) % 16:
            q, k, v, out, dout = (aligned(x) for x in (q, k, v, out, dout))
        if residual is not None:
            residual = aligned(residual)
        self._launch.kernel(
            BackwardArguments(
                q,
                k,
                v,
                out,
                residual,
                dout,
                lse,
                dlse,
                dq,
                dk,
                dv,
                None,  # mdBias
                None,  # mdBiasOfKeys
                workspace,
                offsets_q,
                offsets_k,
                used_q,
                used_k,
                None,  # mMask
                None,  # mBias
                counters.next_tile(self._index),
                NO_BLOCKS,
                None,  # mLaunchOrder
                None,  # mContributors
                None,  # mIntervals
                self._launch.plan.numbers,
            )
        )
        return Gradients(dq, dk, dv)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return shape, tuple(reversed(strides)), dtype
