"""The Hopper backend: a call becomes a configuration, a compiled kernel and a launch.

cutlass is imported when the first kernel is compiled, not before.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Gradients
from flash_attn_cute.backends.packing import as_packed, dense_has_blind, with_blind_apart
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS, BackwardWideConfig, backward_config, forward_config
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Feature, surely

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_HAS_COMPILER = importlib.util.find_spec("cutlass") is not None
_MAX_HEAD_DIM = max(HEAD_DIMS)
_MAX_PACKED_ROWS = 2**30  # of the view through which TMA reads and writes packed rows
# What the heads that run at the same time read again and again: what fits the L2 cache beside everything else. Tiles of
# the backward pass that follow each other are further apart in what they read, and add to more than they read.
_CACHE_BYTES_FORWARD, _CACHE_BYTES_BACKWARD = 40_000_000, 16_000_000
# At the end of a backward pass in no order more run together: their longest tiles come first, their shortest end it.
_CACHE_BYTES_BACKWARD_LAST = 40_000_000
# Query heads of a group whose dK and dV a tile sums, or a divisor of that: of more, too much would have to stay in the
# cache, and of fewer, more is added up in global memory.
_HEADS_A_TILE = 2
_FEW_QUERIES = 64
_NUM_COUNTERS = 2  # of tiles, and in the backward pass of blocks to round
_NEARLY_ZERO = 1e-30  # a scale that is none: its product with infinity is infinite, in float32, too
_LOG2_E = math.log2(math.e)
_counters: dict[tuple[torch.device, int], Tensor] = {}


class Sm90Backend(PortableBackend):
    """Warp-specialised kernels for Hopper GPUs, float16 and bfloat16, head dimensions up to 256."""

    name = "sm90"
    features = frozenset(Feature) - {Feature.MASK, Feature.BIAS}

    def limits(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
        """See ``Backend.limits``."""
        reasons = []
        device = inputs.q.device
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
        q, k = inputs.q, inputs.k
        out = q.new_empty(*q.shape[:-1], spec.head_dim_v)
        if spec.has_seqused and not spec.packed:
            batch, seqlen_q, nheads, _ = q.shape
            lse = q.new_empty((nheads, batch, seqlen_q), dtype=torch.float32)
            if out.numel():
                _launch_forward(spec, as_packed(inputs), out.flatten(0, 1), lse.flatten(1, 2))
            return out, lse.transpose(0, 1).contiguous()
        lse = q.new_empty(inputs.lse_shape, dtype=torch.float32)
        if not out.numel():
            return out, lse
        if not k.numel() and not spec.packed:
            sink = inputs.learnable_sink
            return out.zero_(), lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[:, None])
        _launch_forward(spec, inputs, out, lse)
        return out, lse

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
        if not (inputs.q.numel() and inputs.k.numel()):
            return super().backward(spec, inputs, out, lse, dout, dlse, need_dbias=need_dbias, need_dsink=need_dsink)
        # Twice as fast as new_empty.
        dq, dk, dv = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.q, inputs.k, inputs.v)
        )
        given, gradients = (inputs, out, lse, dout, dlse), (dq, dk, dv)
        sink = inputs.learnable_sink if need_dsink else None
        if inputs.cu_seqlens_q is not None and len(inputs.cu_seqlens_q) == 1:  # all rows are padding
            for x in gradients:
                x.zero_()
            return Gradients(dq, dk, dv, None, None if sink is None else torch.zeros_like(sink))
        if not spec.packed and _runs_packed(spec, inputs):
            dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
            lse = lse.transpose(0, 1).flatten(1)
            given = as_packed(inputs), out.flatten(0, 1), lse, dout.flatten(0, 1), dlse
            gradients = dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
        stats = _launch_backward(spec, *given, *gradients)
        dsink = None
        if sink is not None:
            lse_log2, delta = stats()
            dsink = torch.exp2(sink.float()[:, None] * _LOG2_E - lse_log2).mul_(delta).sum(1).neg_().to(sink.dtype)
        return Gradients(dq, dk, dv, None, dsink)


def _runs_packed(spec: AttentionSpec, inputs: AttentionInputs) -> bool:
    """Whether some pass sees packed sequences: the user's, or a dense batch told as such."""
    return spec.packed or spec.has_seqused or dense_has_blind(inputs, spec.window_right)


class _ForwardLaunch(NamedTuple):
    """What a forward call launches, but for its tensors."""

    kernel: Callable[..., None]
    persistent: bool
    numbers: tuple[float, float, int, int, int]  # its arguments from softmax_scale to heads_in_cache


class _BackwardLaunch(NamedTuple):
    """What a backward call launches, but for its tensors."""

    kernels: Callable[..., None]
    stats_shape: tuple[int, int, int]  # of lse and delta, which begin the workspace
    workspace_size: int
    numbers: tuple[int, int, float, float, int, int, int, int, int]  # its arguments from blocks to heads_a_tile


# PyTorch's own function looks for the driver and the device again each time.
_device_properties = functools.cache(torch.cuda.get_device_properties)


def _launch_forward(spec: AttentionSpec, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    if not k.numel():  # packed sequences of no keys: TMA knows no empty tensors
        k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))
    seqused_q, seqused_k, sink = inputs.seqused_q, inputs.seqused_k, inputs.learnable_sink
    few_queries = inputs.max_seqlen_q <= _FEW_QUERIES
    launch = _forward_launch(spec, q.shape, k.shape, seqused_q is not None, seqused_k is not None, few_queries)
    arguments = (
        _aligned(q),
        _aligned(k),
        _aligned(v),
        out,
        lse,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        seqused_q,
        seqused_k,
        None if sink is None else sink.float(),
        *launch.numbers,
        _next_tile(q.device) if launch.persistent else None,
        _device_properties(q.device).multi_processor_count,
    )
    launch.kernel(arguments)


def _launch_backward(
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
    q, k, v = inputs.q, inputs.k, inputs.v
    cu_q, cu_k, seqused_q, seqused_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k
    sequences = 0 if cu_q is None else cu_q.shape[0] - 1
    num_sms = _device_properties(q.device).multi_processor_count
    launch = _backward_launch(
        spec,
        q.shape,
        k.shape,
        sequences,
        inputs.max_seqlen_q,
        num_sms,
        seqused_q is not None,
        seqused_k is not None,
        dlse is not None,
    )
    workspace = torch.empty(launch.workspace_size, dtype=torch.uint8, device=q.device)
    if dlse is not None and dlse.stride(-1) != 1:
        dlse = dlse.contiguous()
    arguments = (
        _aligned(q),
        _aligned(k),
        _aligned(v),
        _aligned(out),
        _aligned(dout),
        lse,
        dlse,
        dq,
        dk,
        dv,
        workspace,
        cu_q,
        cu_k,
        seqused_q,
        seqused_k,
        *launch.numbers,
        _next_tile(q.device),
        num_sms,
    )
    launch.kernels(arguments)
    shape = launch.stats_shape
    return lambda: workspace[: 4 * math.prod(shape)].view(torch.float32).view(shape)


def _next_tile(device: torch.device) -> Tensor:
    """Counters from which CTAs take tiles: 0, and 0 again after each kernel, so they serve all of a stream's kernels.

    A graph may be replayed beside its stream, and gets counters of its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index)  # without making a Stream of it
    counter = _counters.get(key)
    if counter is None:
        # By another thread: this one's memory may come from a pool, under torch.cuda.use_mem_pool or in torch.compile's
        # warm-up for CUDA graphs, which then gives it to others, whoever holds it. A pool is entered by one thread.
        with ThreadPoolExecutor(1) as executor:
            counter = executor.submit(_new_counter, device, torch.cuda.current_stream(device)).result()
        _counters[key] = counter
    return counter


def _new_counter(device: torch.device, stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):  # whose kernels come behind the zero
        return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)


# Caches are bounded, for specs and shapes hold numbers that can change with every call.
@functools.lru_cache(maxsize=1024)
def _forward_launch(
    spec: AttentionSpec,
    q_shape: torch.Size,
    k_shape: torch.Size,
    has_seqused_q: bool,
    has_seqused_k: bool,
    few_queries: bool,
) -> _ForwardLaunch:
    from flash_attn_cute.jit import cache  # not before it is needed: importing the package is to take no time

    # Heads of a group share a tile where queries alone would leave half of it empty.
    group = spec.nheads // spec.nheads_k
    group = group if few_queries and 64 % group == 0 else 1
    config = forward_config(
        _DTYPES[spec.dtype],
        spec.head_dim,
        spec.head_dim_v,
        group=group,
        has_sink=spec.has_sink,
        **_features(spec, q_shape, has_seqused_q, has_seqused_k),
    )
    heads = spec.nheads // group
    bytes_a_head = 2 * k_shape[-3] * (spec.head_dim + spec.head_dim_v)
    heads_sharing = heads // spec.nheads_k
    heads_in_cache = max(1, _CACHE_BYTES_FORWARD // bytes_a_head) * heads_sharing
    heads_in_cache = _in_equal_sections(heads * math.prod(q_shape[:-3]), heads_in_cache)
    return _ForwardLaunch(cache.kernel(config), config.persistent, (*_numbers(spec, q_shape, k_shape), heads_in_cache))


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    spec: AttentionSpec,
    q_shape: torch.Size,
    k_shape: torch.Size,
    sequences: int,
    longest: int,
    num_sms: int,
    has_seqused_q: bool,
    has_seqused_k: bool,
    has_dlse: bool,
) -> _BackwardLaunch:
    from flash_attn_cute.jit import cache

    config = backward_config(
        _DTYPES[spec.dtype],
        spec.head_dim,
        spec.head_dim_v,
        has_dlse=has_dlse,
        grouped=spec.nheads > spec.nheads_k,
        deterministic=spec.deterministic,
        **_features(spec, q_shape, has_seqused_q, has_seqused_k),
    )
    main = config.main
    tile_m, tile_n, tile_d = main.tile_m, main.tile_n, main.tile_d
    blocks, blocks_k = (
        shape[-3] // rows + sequences if len(shape) == 3 else shape[0] * -(-shape[-3] // rows)
        for shape, rows in ((q_shape, tile_m), (k_shape, tile_n))
    )
    longest = max(1, longest)
    group = spec.nheads // spec.nheads_k
    heads_a_tile = 1 if isinstance(main, BackwardWideConfig) else math.gcd(group, _HEADS_A_TILE)
    bytes_a_head = heads_a_tile * longest * (2 * (spec.head_dim + spec.head_dim_v) + 4 * tile_d)
    heads_in_cache = max(1, _CACHE_BYTES_BACKWARD // bytes_a_head)
    if main.deterministic and (spec.window_right is None or main.turns_last):
        # Where all tiles of a head start with the same queries, one is best begun when the one before has passed its
        # first turn on, two and a half steps later. Of all that are under way, one a head begins in so many steps.
        # Dense causal passes gain by as many; packed ones and grouped heads lose by more than the cache has room for.
        tiles_under_way = num_sms // main.ctas_a_tile
        steps_a_tile = heads_a_tile * -(-longest // tile_m)
        heads_in_cache = max(heads_in_cache, -(-5 * tiles_under_way // (2 * steps_a_tile)))
    # Of packed sequences the first heads of all groups have sections of their own, and so on.
    heads = spec.nheads_k if len(q_shape) == 3 else spec.nheads // heads_a_tile * q_shape[0]
    heads_in_cache = heads_in_last = min(heads_in_cache, heads)
    if not main.deterministic:
        heads_in_last = max(heads_in_last, _CACHE_BYTES_BACKWARD_LAST // bytes_a_head)
    sections = max(0, heads - heads_in_last) // heads_in_cache
    return _BackwardLaunch(
        cache.kernel(config),
        stats_shape=(2, spec.nheads, blocks * tile_m),
        # No sums of dK and dV are left to others if each tile sums over all heads of a group.
        workspace_size=config.workspace_size(spec.nheads, blocks, spec.nheads_k, blocks_k, group > heads_a_tile),
        numbers=(blocks, blocks_k, *_numbers(spec, q_shape, k_shape), heads_in_cache, sections, heads_a_tile),
    )


def _features(spec: AttentionSpec, q_shape: torch.Size, has_seqused_q: bool, has_seqused_k: bool) -> dict[str, bool]:
    """What is compiled into the kernels of both passes."""
    return {
        "packed": len(q_shape) == 3,
        "has_seqused_q": has_seqused_q,
        "has_seqused_k": has_seqused_k,
        "has_left": spec.window_left is not None,
        "has_right": spec.window_right is not None,
        "has_softcap": spec.softcap > 0,
        "zero_padding": spec.zero_padding,
    }


def _numbers(spec: AttentionSpec, q_shape: torch.Size, k_shape: torch.Size) -> tuple[float, float, int, int]:
    """The kernels' arguments from softmax_scale to window_right."""
    # No window need be wider than this, and the kernels add positions to it in 32 bits.
    widest = q_shape[-3] + k_shape[-3]
    left, right = min(spec.window_left or 0, widest), min(spec.window_right or 0, widest)
    scale = spec.softmax_scale if abs(spec.softmax_scale) > _NEARLY_ZERO else _NEARLY_ZERO
    return scale, spec.softcap, left, right


def _in_equal_sections(heads: int, at_once: int) -> int:
    """How many heads run together, if they are to be about so many: all sections of the same size.

    A small last one would start its longest tiles when the others have finished.
    """
    sections = -(-heads // at_once)
    return -(-heads // sections)


def _aligned(x: Tensor) -> Tensor:
    """X itself if TMA can read it, else a copy: data and all strides but the last in multiples of 16 bytes."""
    if x.data_ptr() % 16 == 0 and _fits(x.stride(), 16 // x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _fits(strides: tuple[int, ...], per_vector: int) -> bool:
    return strides[-1] == 1 and math.gcd(per_vector, *strides[:-1]) == per_vector
