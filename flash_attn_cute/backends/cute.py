"""The Hopper backend: a call becomes a configuration, a compiled kernel and a launch.

cutlass is imported when the first kernel is compiled, not before. The backward pass is still the portable one, and
inherited.
"""

import functools
import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS, ForwardConfig, forward_config
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Feature

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_HAS_COMPILER = importlib.util.find_spec("cutlass") is not None
_MAX_HEAD_DIM = max(HEAD_DIMS)
# Keys and values of the heads that run at the same time: what fits the L2 cache beside everything else.
_CACHE_BYTES = 40_000_000
_FEW_QUERIES = 64
_NEARLY_ZERO = 1e-30
_counters: dict[tuple[torch.device, int], Tensor] = {}


class Sm90Backend(PortableBackend):
    """A warp-specialised forward kernel for Hopper GPUs, float16 and bfloat16, head dimensions up to 256."""

    name = "sm90"
    features = frozenset(Feature) - {Feature.MASK, Feature.BIAS}

    def limits(self, spec: AttentionSpec, device: torch.device) -> tuple[str, ...]:
        """See ``Backend.limits``."""
        reasons = []
        if device.type != "cuda":
            reasons.append(f"tensors on {device.type}")
        else:
            gpu = torch.cuda.get_device_properties(device)
            if (gpu.major, gpu.minor) != (9, 0):
                reasons.append(f"GPUs of compute capability {gpu.major}.{gpu.minor}")
        if spec.dtype not in _DTYPES:
            reasons.append(str(spec.dtype))
        for name, d in (("d", spec.head_dim), ("d_v", spec.head_dim_v)):
            if d % 8 or d > _MAX_HEAD_DIM:
                reasons.append(f"{name} = {d} (multiples of 8 up to {_MAX_HEAD_DIM})")
        if not _HAS_COMPILER:
            reasons.append("the package nvidia-cutlass-dsl")
        return tuple(reasons)

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        q, k, v = inputs.q, inputs.k, inputs.v
        out = q.new_empty(*q.shape[:-1], spec.head_dim_v)
        if spec.has_seqused and not spec.packed:
            return _forward_as_packed(spec, inputs, out)
        lse = q.new_empty(inputs.lse_shape, dtype=torch.float32)
        if not out.numel():
            return out, lse
        if not k.numel() and not spec.packed:
            sink = inputs.learnable_sink
            return out.zero_(), lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[:, None])
        _launch(spec, inputs, q, k, v, out, lse, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        return out, lse


# PyTorch's own function looks for the driver and the device again each time.
_device_properties = functools.cache(torch.cuda.get_device_properties)


def _forward_as_packed(spec: AttentionSpec, inputs: AttentionInputs, out: Tensor) -> tuple[Tensor, Tensor]:
    """A dense batch with padding is packed sequences whose slots are of one size."""
    batch, seqlen_q, nheads, _ = inputs.q.shape
    lse = inputs.q.new_empty((nheads, batch, seqlen_q), dtype=torch.float32)
    if out.numel():
        cu_q, cu_k = (
            torch.arange(batch + 1, dtype=torch.int32, device=out.device).mul_(x.shape[1]) for x in (inputs.q, inputs.k)
        )
        q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        _launch(spec, inputs, q, k, v, out.flatten(0, 1), lse.flatten(1, 2), cu_q, cu_k)
    return out, lse.transpose(0, 1).contiguous()


def _launch(
    spec: AttentionSpec,
    inputs: AttentionInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> None:
    packed = cu_seqlens_q is not None
    if not k.numel():  # packed sequences of no keys: TMA knows no empty tensors
        k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))
    longest = inputs.max_seqlen_q if spec.packed else inputs.q.shape[1]
    group = _group(spec, longest)
    kernel, persistent = _kernel(spec, packed, inputs.seqused_q is not None, inputs.seqused_k is not None, group)
    sink = inputs.learnable_sink
    arguments = (
        _aligned(q),
        _aligned(k),
        _aligned(v),
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        inputs.seqused_q,
        inputs.seqused_k,
        None if sink is None else sink.float(),
        *_numbers(spec, packed, group, q.shape, k.shape),
        _next_tile(q.device) if persistent else None,
        _device_properties(q.device).multi_processor_count,
    )
    kernel(arguments)


def _next_tile(device: torch.device) -> Tensor:
    """The counter from which CTAs take tiles: 0, and 0 again after each kernel, so one serves a stream's kernels.

    A graph may be replayed beside its stream, and gets a counter of its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index)  # without making a Stream of it
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter


# Caches are bounded, for specs and shapes hold numbers that can change with every call.
@functools.lru_cache(maxsize=1024)
def _kernel(
    spec: AttentionSpec, packed: bool, has_seqused_q: bool, has_seqused_k: bool, group: int
) -> tuple[Callable[..., None], bool]:
    """The kernel that serves a call, and whether it is persistent."""
    from flash_attn_cute.jit import cache  # not before it is needed: importing the package is to take no time

    config = _config(spec, packed, has_seqused_q, has_seqused_k, group)
    return cache.forward_kernel(config), config.persistent


@functools.lru_cache(maxsize=1024)
def _numbers(
    spec: AttentionSpec, packed: bool, group: int, q_shape: torch.Size, k_shape: torch.Size
) -> tuple[float, float, int, int, int]:
    """The kernel's arguments from softmax_scale to heads_in_cache."""
    bytes_a_head = 2 * k_shape[-3] * (spec.head_dim + spec.head_dim_v)
    # Sections of equal size: a small last one would start its longest tiles when the others have finished.
    pairs = spec.nheads // group * (1 if packed else q_shape[0])
    sections = -(-pairs // (max(1, _CACHE_BYTES // bytes_a_head) * (spec.nheads // group // spec.nheads_k)))
    heads_in_cache = -(-pairs // sections)
    # No window need be wider than this, and the kernel adds positions to it in 32 bits.
    widest = q_shape[-3] + k_shape[-3]
    left, right = min(spec.window_left or 0, widest), min(spec.window_right or 0, widest)
    return spec.softmax_scale or _NEARLY_ZERO, spec.softcap, left, right, heads_in_cache


def _config(spec: AttentionSpec, packed: bool, has_seqused_q: bool, has_seqused_k: bool, group: int) -> ForwardConfig:
    return forward_config(
        _DTYPES[spec.dtype],
        spec.head_dim,
        spec.head_dim_v,
        group=group,
        packed=packed,
        has_seqused_q=has_seqused_q,
        has_seqused_k=has_seqused_k,
        has_left=spec.window_left is not None,
        has_right=spec.window_right is not None,
        has_softcap=spec.softcap > 0,
        has_sink=spec.has_sink,
        zero_padding=spec.zero_padding,
    )


def _group(spec: AttentionSpec, seqlen_q: int) -> int:
    """How many heads share a tile: those of a group, where queries alone would leave half of it empty."""
    group = spec.nheads // spec.nheads_k
    return group if seqlen_q <= _FEW_QUERIES and 64 % group == 0 else 1


def _aligned(x: Tensor) -> Tensor:
    """X itself if TMA can read it, else a copy: data and all strides but the last in multiples of 16 bytes."""
    per_vector = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and math.gcd(per_vector, *x.stride()[:-1]) == per_vector:
        return x
    return x.clone(memory_format=torch.contiguous_format)
