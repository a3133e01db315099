"""Explanations: what a call would run, found without running it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.cute.explained import PassPlan, planned, planned_selection
from flash_attn_cute.calls import dispatch, lowering, nested, validate
from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.calls.prepared_call import spec_of
from flash_attn_cute.calls.torch_modes import autocast, is_same_memory
from flash_attn_cute.problem.spec import AttentionSpec, Deterministic, Window
from flash_attn_cute.sparsity.block_mask import BlockMask


@dataclass(frozen=True)
class Explanation:
    """Explanation of a call; ``str()`` of it is for people.

    Attributes:
        backend: the name of the backend that serves the call.
        passed_over: the name of every backend that would be preferred to it, and why each cannot serve the call.
        on_request: the names of backends made for the device that serve the call only if ``backend`` names them.
        refusal: why they do: what the self-check has found, or that it has not run. Nothing runs it here.
        spec: what the call asks for, as backends see it.
        device: that of the tensors, or the GPU that was to be supposed.
        num_sms: SMs of the GPU; None for a backend without kernels of its own.
        forward: what the forward pass launches: tile sizes, stages, whether CTAs form clusters and are persistent,
            whether the kernels get packed sequences, the configuration and the numbers they are given. None for a
            backend without kernels of its own, and where nothing is launched, as there are no rows.
        backward: likewise of the backward pass, if lse has no gradient.
    """

    backend: str
    passed_over: Mapping[str, tuple[str, ...]]
    on_request: tuple[str, ...]
    refusal: str
    spec: AttentionSpec
    device: str
    num_sms: int | None
    forward: PassPlan | None
    backward: PassPlan | None

    def __str__(self) -> str:
        lines = [f"backend {self.backend} on {self.device}"]
        lines += [f"  {name} cannot: {'; '.join(reasons)}" for name, reasons in self.passed_over.items()]
        lines += [f"  {name} serves it only with backend={name!r}: {self.refusal}" for name in self.on_request]
        spec = self.spec
        heads = f"{spec.nheads} heads" if spec.nheads == spec.nheads_k else f"{spec.nheads} heads on {spec.nheads_k}"
        width = (
            f"d = {spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d = {spec.head_dim}, {spec.head_dim_v}"
        )
        needs = [feature.value for feature in spec.required]
        lines.append("  " + "; ".join([str(spec.dtype).removeprefix("torch."), heads, width, *needs]))
        if self.num_sms is None:
            lines.append("  no kernels of its own: PyTorch's operators, and offsets are read by the host")
        else:
            lines.append(f"  {self.num_sms} SMs")
            for name, launched in (("forward", self.forward), ("backward", self.backward)):
                what = "nothing is launched" if launched is None else launched.describe(name, spec.packing_invariant)
                lines.append(f"  {name}: {what}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: BlockMask | None = None,
    deterministic: Deterministic = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    zero_padding: bool = True,
    precise_gradients: bool = False,
    backend: str | None = None,
    dropout_p: float = 0.0,
    gpu: str | None = None,
) -> Explanation:
    """Which backend a call gets, why not a faster one, and what that backend launches.

    Takes the arguments of ``flash_attn_func`` or, with cu_seqlens_q, those of ``flash_attn_varlen_func``. Nothing is
    computed, compiled or read: tensors may be on the meta device or fake, and no GPU is needed.

    Args:
        block_mask: its tables are not made, so all blocks count as visible that may be. One in the order
            "auto" or "permutation" that has not been built is explained as if an order of query blocks that the model
            finds were worth it.
        gpu: the backend of a GPU to suppose, whatever device the tensors are on: ``"sm90"`` supposes an H100 SXM or
            H200 (132 SMs), ``"sm100"`` a B200 (148 SMs). None: the device of the tensors.

    Returns:
        An ``Explanation``; print it.

    Raises:
        TypeError: what the call raises.
        ValueError: likewise; a gpu that is not known; or tensors on CUDA devices that are not there, without gpu.
    """
    options = validate.check_options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        zero_padding=zero_padding,
        precise_gradients=precise_gradients,
        backend=backend,
        dropout_p=dropout_p,
    )
    backends = dispatch.BACKENDS if gpu is None else dispatch.supposing(gpu)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, learnable_sink, mask, bias)
    call = AttentionCall(*tensors, None, block_mask, options, backend)
    if any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)):
        call = call._replace(bounds=validate.check_bounds(max_seqlen_q, max_seqlen_k))
    elif nested.is_nested(call):
        call, _ = nested.as_packed(call)
    call = lowering.of(call).call
    device = call.q.device if isinstance(call.q, Tensor) else None
    if gpu is None and device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"q: expected gpu= to say which GPU is meant, as PyTorch finds none, got a tensor on {device}")
    copies = _on_meta(call)
    with _disable_current_modes():
        inputs = validate.check(copies, device)
        spec = spec_of(copies, inputs)
        selection = dispatch.select(spec, inputs._replace(q=call.q), backend, backends, is_run=False)
        chosen = backends[selection.name]
        passes: tuple[PassPlan | None, PassPlan | None] = (None, None)
        num_sms = None
        if isinstance(chosen, CuteBackend):
            num_sms = chosen.num_sms(inputs.q.device if device is None else device)
            need_dbias = bias is not None and bias.requires_grad
            left = call.block_mask
            if left is not None and left.selection_block:
                passes = planned_selection(chosen.architecture, spec, inputs, num_sms, left.selection_shape)
            else:
                blocks, halves = None, 0
                if left is not None:
                    blocks = left.sizes[:2], left.order_sets
                    halves = left.most_halves * math.prod(left.sizes[:2])
                    if halves > 4 * chosen.most_listed(spec, inputs, left):
                        halves = 0
                passes = planned(
                    chosen.architecture, spec, inputs, num_sms, need_dbias=need_dbias, blocks=blocks, halves=halves
                )
    where = str(device) if gpu is None else f"a supposed GPU of {gpu}"
    passed_over = MappingProxyType(selection.passed_over)
    others = selection.on_request, selection.refusal
    return Explanation(selection.name, passed_over, *others, spec, where, num_sms, *passes)


def _on_meta(call: AttentionCall) -> AttentionCall:
    """The call after autocast, with tensors without memory that look like its own; what is the same memory is one."""
    given = dict(zip(call._fields, call[:NUM_TENSORS], strict=False))
    usable = {
        name: x for name, x in given.items() if isinstance(x, Tensor) and not x.is_nested and x.layout is torch.strided
    }
    cast = autocast(call.with_tensors(**{name: x.new_empty(0) for name, x in usable.items()}))
    copies: dict[str, Tensor] = {}
    for name, x in usable.items():
        if isinstance(call.q, Tensor) and x.device != call.q.device:
            raise ValueError(f"{name}: expected the device of q, {call.q.device}, got {x.device}")
        same = next((other for other in copies if is_same_memory(x, usable[other])), None)
        copies[name] = _without_memory(x, getattr(cast, name).dtype) if same is None else copies[same]
    return call.with_tensors(**copies)


def _without_memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    with _disable_current_modes():
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        memory = torch.empty(x.storage_offset() + max(0, last) + 1, dtype=dtype, device="meta")
        return memory.as_strided(x.shape, x.stride(), x.storage_offset())
