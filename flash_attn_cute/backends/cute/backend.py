"""A call on a GPU that has kernels of its own: planned, compiled, launched.

cutlass is imported when the first kernel is compiled, not before.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Gradients
from flash_attn_cute.backends.cute import plan
from flash_attn_cute.backends.cute.counters import next_tile
from flash_attn_cute.backends.packing import as_packed, dense_has_blind, with_blind_apart
from flash_attn_cute.kernels.arguments import BackwardArguments, ForwardArguments
from flash_attn_cute.kernels.registry import Architecture
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Feature, surely

_HAS_COMPILER = importlib.util.find_spec("cutlass") is not None
_MAX_PACKED_ROWS = 2**30  # of the view through which TMA reads and writes packed rows
_LOG2_E = math.log2(math.e)
# Inputs that a call may have or not, and what they ask of the kernels.
_OPTIONAL = (("seqused_q", "seqused_q"), ("seqused_k", "seqused_k"), ("learnable_sink", "sink"))


class CuteBackend:
    """The kernels of one architecture."""

    features = frozenset(Feature) - {Feature.MASK, Feature.BIAS}

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.name = architecture.name
        # Caches are bounded, for specs and shapes hold numbers that can change with every call.
        self._prepare_forward = functools.lru_cache(maxsize=1024)(self._prepared(plan.plan_forward))
        self._prepare_backward = functools.lru_cache(maxsize=1024)(self._prepared(plan.plan_backward))

    def limits(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
        """See ``Backend.limits``."""
        reasons = []
        device = inputs.q.device
        if device.type != "cuda":
            reasons.append(f"tensors on {device.type}")
        else:
            gpu = torch.cuda.get_device_properties(device)
            if (gpu.major, gpu.minor) not in self.architecture.capabilities:
                reasons.append(f"GPUs of compute capability {gpu.major}.{gpu.minor}")
        if plan.DTYPES.get(spec.dtype) not in self.architecture.dtypes:
            reasons.append(str(spec.dtype))
        widest = self.architecture.max_head_dim
        for name, d in (("d", spec.head_dim), ("d_v", spec.head_dim_v)):
            if d % 8 or d > widest:
                reasons.append(f"{name} = {d} (multiples of 8 up to {widest})")
        for name, x in (("q", inputs.q), ("k", inputs.k)):
            rows = math.prod(x.shape[:-2])
            if surely(rows >= _MAX_PACKED_ROWS) and _runs_packed(spec, inputs):
                where = f"total_{name}" if spec.packed else f"{name}, which are packed for this call"
                reasons.append(f"{rows} rows of {where} (expected fewer than 2^30)")
        if not _HAS_COMPILER:
            reasons.append("the package nvidia-cutlass-dsl is not installed")
        return tuple(reasons)

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        if torch.cuda.current_device() != inputs.q.device.index:
            with torch.cuda.device(inputs.q.device):
                return self._forward(spec, inputs)
        return self._forward(spec, inputs)

    def backward(
        self,
        spec: AttentionSpec,
        inputs: AttentionInputs,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        *,
        need_dbias: bool,
        need_dsink: bool,
    ) -> Gradients:
        """See ``Backend.backward``."""
        if torch.cuda.current_device() != inputs.q.device.index:
            with torch.cuda.device(inputs.q.device):
                return self._backward(spec, inputs, out, lse, dout, dlse, need_dsink)
        return self._backward(spec, inputs, out, lse, dout, dlse, need_dsink)

    def _forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        q, k = inputs.q, inputs.k
        out = q.new_empty(*q.shape[:-1], spec.head_dim_v)
        if spec.has_seqused and not spec.packed:
            batch, seqlen_q, nheads, _ = q.shape
            lse = q.new_empty((nheads, batch, seqlen_q), dtype=torch.float32)
            if out.numel():
                self._launch_forward(spec, as_packed(inputs), out.flatten(0, 1), lse.flatten(1, 2))
            return out, lse.transpose(0, 1).contiguous()
        lse = q.new_empty(inputs.lse_shape, dtype=torch.float32)
        if not out.numel():
            return out, lse
        if not k.numel() and not spec.packed:
            sink = inputs.learnable_sink
            return out.zero_(), lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[:, None])
        self._launch_forward(spec, inputs, out, lse)
        return out, lse

    def _backward(
        self,
        spec: AttentionSpec,
        inputs: AttentionInputs,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        need_dsink: bool,
    ) -> Gradients:
        # Twice as fast as new_empty.
        dq, dk, dv = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.q, inputs.k, inputs.v)
        )
        sink = inputs.learnable_sink if need_dsink else None
        no_sequences = inputs.cu_seqlens_q is not None and len(inputs.cu_seqlens_q) == 1
        if no_sequences or not (inputs.q.numel() and inputs.k.numel()):
            dsink = None if sink is None else _dsink_without_keys(sink, lse, dlse)
            return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), None, dsink)
        given, gradients = (inputs, out, lse, dout, dlse), (dq, dk, dv)
        if not spec.packed and _runs_packed(spec, inputs):
            dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
            lse = lse.transpose(0, 1).flatten(1)
            given = as_packed(inputs), out.flatten(0, 1), lse, dout.flatten(0, 1), dlse
            gradients = dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
        stats = self._launch_backward(spec, *given, *gradients)
        dsink = None
        if sink is not None:
            lse_log2, delta = stats()
            dsink = torch.exp2(sink.float()[:, None] * _LOG2_E - lse_log2).mul_(delta).sum(1).neg_().to(sink.dtype)
        return Gradients(dq, dk, dv, None, dsink)

    def _launch_forward(self, spec: AttentionSpec, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        if not k.numel():  # packed sequences of no keys: TMA knows no empty tensors
            k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))
        sink = inputs.learnable_sink
        # Of the longest sequence only matters whether it is short.
        longest = plan.FEW_QUERIES if inputs.max_seqlen_q <= plan.FEW_QUERIES else q.shape[-3]
        shapes = _shapes(q, k, inputs, _given(inputs), longest)
        kernel, planned = self._prepare_forward(spec, shapes, _num_sms(q.device))
        kernel(
            ForwardArguments(
                mQ=_aligned(q),
                mK=_aligned(k),
                mV=_aligned(v),
                mO=out,
                mLSE=lse,
                mCuSeqlensQ=_compact(inputs.cu_seqlens_q),
                mCuSeqlensK=_compact(inputs.cu_seqlens_k),
                mSeqUsedQ=_compact(inputs.seqused_q),
                mSeqUsedK=_compact(inputs.seqused_k),
                mSink=None if sink is None else _compact(sink.float()),
                mNextTile=next_tile() if planned.config.persistent else None,
                **planned.numbers,
            )
        )

    def _launch_backward(
        self,
        spec: AttentionSpec,
        inputs: AttentionInputs,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> Callable[[], Tensor]:
        """Fills dq, dk and dv, and returns what makes a tensor of lse in base 2 and delta, (2, nheads, queries)."""
        inputs = with_blind_apart(inputs, spec.window_right)
        q, k = inputs.q, inputs.k
        given = _given(inputs) if dlse is None else (*_given(inputs), "dlse")
        shapes = _shapes(q, k, inputs, given, inputs.max_seqlen_q)
        kernels, planned = self._prepare_backward(spec, shapes, _num_sms(q.device))
        workspace = torch.empty(planned.workspace_size, dtype=torch.uint8, device=q.device)
        kernels(
            BackwardArguments(
                mQ=_aligned(q),
                mK=_aligned(k),
                mV=_aligned(inputs.v),
                mO=_aligned(out),
                mdO=_aligned(dout),
                mLSE=_compact(lse),
                mdLSE=_compact(dlse),
                mdQ=dq,
                mdK=dk,
                mdV=dv,
                mWorkspace=workspace,
                mCuSeqlensQ=_compact(inputs.cu_seqlens_q),
                mCuSeqlensK=_compact(inputs.cu_seqlens_k),
                mSeqUsedQ=_compact(inputs.seqused_q),
                mSeqUsedK=_compact(inputs.seqused_k),
                mNextTile=next_tile(),
                **planned.numbers,
            )
        )
        shape = planned.stats_shape
        return lambda: workspace[: 4 * math.prod(shape)].view(torch.float32).view(shape)

    def _prepared(self, make_plan: Callable[..., Any]) -> Callable[..., tuple[Callable[..., None], Any]]:
        """From what a plan is made of to its compiled kernels and the plan."""

        def prepare(spec: AttentionSpec, shapes: plan.Shapes, num_sms: int) -> tuple[Callable[..., None], Any]:
            from flash_attn_cute.jit import cache  # not before it is needed: importing the package is to take no time

            planned = make_plan(self.architecture, spec, shapes, num_sms)
            return cache.kernel(planned.config), planned

        return prepare


def _runs_packed(spec: AttentionSpec, inputs: AttentionInputs) -> bool:
    """Whether some pass sees packed sequences: the user's, or a dense batch told as such."""
    return spec.packed or spec.has_seqused or dense_has_blind(inputs, spec.window_right)


def _given(inputs: AttentionInputs) -> tuple[str, ...]:
    return tuple([flag for name, flag in _OPTIONAL if getattr(inputs, name) is not None])


def _shapes(q: Tensor, k: Tensor, inputs: AttentionInputs, given: tuple[str, ...], max_seqlen_q: int) -> plan.Shapes:
    cu_seqlens_q = inputs.cu_seqlens_q
    num_sequences = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return plan.Shapes(q.shape, k.shape, given, num_sequences, max_seqlen_q)


def _dsink_without_keys(sink: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """A sink that is all that real queries see is their lse; queries of padding have one of -inf."""
    if dlse is None:
        return torch.zeros_like(sink)
    by_head = dlse.where(lse != -torch.inf, 0).movedim(-2, 0).flatten(1)
    return by_head.sum(1).to(sink.dtype)


@functools.cache
def _num_sms(device: torch.device) -> int:
    # PyTorch's own function looks for the driver and the device again each time.
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(x: Tensor) -> Tensor:
    """The tensor if TMA can read it, else a copy: data and all strides but the last in multiples of 16 bytes."""
    if x.data_ptr() % 16 == 0 and _fits(x.stride(), 16 // x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _fits(strides: tuple[int, ...], per_vector: int) -> bool:
    return strides[-1] == 1 and math.gcd(per_vector, *strides[:-1]) == per_vector


def _compact(x: Tensor | None) -> Tensor | None:
    """The tensor if its last dimension is contiguous, else a copy."""
    return x if x is None or x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
