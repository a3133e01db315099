"""A call on a GPU that has kernels of its own: planned, compiled, launched.

cutlass is imported when the first kernel is compiled, not before.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute import column_sums, counters, selection
from flash_attn_cute.backends.cute.block_arguments import columns_of, intervals_of, rows_of
from flash_attn_cute.backends.cute.explained import planned
from flash_attn_cute.backends.cute.layouts import aligned, compact, operands_of, with_a_key
from flash_attn_cute.backends.cute.plan import (
    DTYPES,
    Plan,
    ScoreLayout,
    Shapes,
    most_listed,
    plan_backward,
    plan_bias_gradient,
    plan_forward,
    takes_tiles,
)
from flash_attn_cute.backends.cute.repeated import RepeatedBackward, RepeatedForward, has_backward, has_forward
from flash_attn_cute.backends.cute.score_layout import (
    NO_SCORES,
    as_four,
    forward_shapes,
    half_entries,
    num_sequences,
    runs_packed,
    score_layout,
)
from flash_attn_cute.backends.cute.sink_gradients import sink_gradient, sink_gradient_without_keys
from flash_attn_cute.backends.packing import (
    as_one_batch,
    as_packed,
    needs_intervals,
    over_scores,
    sees,
    split_fully_masked,
    without_padding,
    without_padding_of_queries,
    zeroed,
)
from flash_attn_cute.kernels.arguments import BackwardArguments, BiasGradientArguments, ForwardArguments
from flash_attn_cute.kernels.registry import ARCHITECTURES, Architecture
from flash_attn_cute.problem.spec import (
    AttentionInputs,
    AttentionSpec,
    Feature,
    Results,
    residual_columns,
    statically_true,
)
from flash_attn_cute.sparsity.block_mask import BlockMask

T = TypeVar("T")

_HAS_COMPILER = importlib.util.find_spec("cutlass") is not None
_MAX_PACKED_ROWS = 2**30  # of the view through which TMA reads and writes packed rows


class CuteBackend:
    """The kernels of one architecture."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        is_supposed: bool = False,
        kernel_of: Callable[[Any], Callable[..., None]] | None = None,
    ) -> None:
        """Serves calls with the kernels of an architecture.

        Args:
            architecture: whose kernels.
            is_supposed: explains calls as on a machine with the architecture's usual GPU, and runs none.
            kernel_of: makes what launches the kernel of a configuration; None: ``jit.cache.kernel``.
        """
        self.architecture = architecture
        self.name = architecture.name
        self.features = frozenset(Feature) - (set() if "selection" in architecture.passes else {Feature.SELECTION})
        self.has_residual = True
        self.has_column_sums = "column_sums" in architecture.passes
        self.is_supposed = is_supposed
        self._kernel_of = kernel_of
        # Caches are bounded, for specs and shapes hold numbers that can change with every call.
        self.launch_of = functools.lru_cache(maxsize=4096)(self._launch_of)

    def limits(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
        """See ``Backend.limits``."""
        reasons = []
        device = inputs.q.device
        if not self.is_made_for(device):
            if device.type == "cuda":
                gpu = torch.cuda.get_device_properties(device)
                reasons.append(f"GPUs of compute capability {gpu.major}.{gpu.minor}")
            else:
                reasons.append(f"tensors on {device.type}")
        if DTYPES.get(spec.dtype) not in self.architecture.dtypes:
            reasons.append(str(spec.dtype))
        widest = self.architecture.max_head_dim
        for name, d in (("d", spec.head_dim), ("d_v", spec.head_dim_v)):
            if d % 8 or d > widest:
                reasons.append(f"{name} = {d} (multiples of 8 up to {widest})")
        if reasons and torch.compiler.is_compiling():
            return tuple(reasons)  # to compare rows, for one more reason, would bound those of the program
        for name, x in (("q", inputs.q), ("k", inputs.k)):
            rows = math.prod(x.shape[:-2])
            if statically_true(rows >= _MAX_PACKED_ROWS) and runs_packed(spec, inputs):
                where = f"total_{name}" if spec.packed else f"{name}, which are packed for this call"
                reasons.append(f"{rows} rows of {where} (expected fewer than 2^30)")
        if spec.has_block_mask:
            if spec.has_mask:
                reasons.append("block_mask beside mask")
            if spec.has_bias and needs_intervals(spec):
                reasons.append("block_mask and bias beside cu_seqlens, seqused or a window of these")
        if spec.selection_block and Feature.SELECTION in self.features and spec.precise_gradients:
            reasons.append("precise_gradients=True beside BlockMask.from_selection")
        if not _HAS_COMPILER and not self.is_supposed:
            reasons.append("the package nvidia-cutlass-dsl is not installed")
        return tuple(reasons)

    def is_made_for(self, device: torch.device) -> bool:
        """See ``Backend.is_made_for``."""
        if self.is_supposed or device.type != "cuda":
            return self.is_supposed
        gpu = torch.cuda.get_device_properties(device)
        return (gpu.major, gpu.minor) in self.architecture.targets

    def most_listed(self, spec: AttentionSpec, inputs: AttentionInputs, block_mask: BlockMask) -> int:
        """See ``Backend.most_listed``."""
        batch = 1 if spec.packed else inputs.q.shape[0]
        return most_listed(self.architecture, spec, batch, block_mask.sizes, block_mask.half_columns > 0)

    def num_sms(self, device: torch.device) -> int:
        """SMs of a GPU that it is made for."""
        if self.is_supposed:
            return self.architecture.num_sms
        return torch.cuda.get_device_properties(device).multi_processor_count

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> Results:
        """See ``Backend.forward``."""
        return _on(inputs.q.device, self._forward, spec, inputs)

    def backward(self, call: BackwardCall) -> Gradients:
        """See ``Backend.backward``."""
        return _on(call.inputs.q.device, self._backward, call)

    def column_sums(self, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """See ``Backend.column_sums``."""
        return _on(inputs.q.device, column_sums.column_sums, self.launch_of, spec, inputs, lse)

    def forward_for(self, spec: AttentionSpec, like: AttentionInputs) -> Callable[[AttentionInputs], Results]:
        """See ``Backend.forward_for``."""
        if not has_forward(spec, like):
            return lambda inputs: self.forward(spec, inputs)
        if not any(x.requires_grad for x in (like.q, like.k, like.v)):
            return RepeatedForward(self._forward_launch(spec, like), spec, like)
        from flash_attn_cute.jit import cache

        with cache.compiling_beside(lambda: self._backward_config(spec, like)):
            return RepeatedForward(self._forward_launch(spec, like), spec, like)

    def backward_for(self, like: BackwardCall) -> Callable[[BackwardCall], Gradients]:
        """See ``Backend.backward_for``."""
        if not has_backward(like):
            return lambda call: self.backward(call)
        launch = self._backward_launch(like, like.inputs, NO_SCORES)
        return RepeatedBackward(launch, self.backward, like)

    def _backward_config(self, spec: AttentionSpec, inputs: AttentionInputs) -> Any:
        """The configuration of a call's backward pass, unless lse or bias have gradients; None if it has none."""
        device = inputs.q.device
        _, backward = planned(self._architecture_on(device), spec, inputs, self.num_sms(device), need_dbias=False)
        return None if backward is None else backward.config

    def _forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> Results:
        if needs_intervals(spec):
            one_spec, one, seen = as_one_batch(spec, inputs)
            results = self._forward(one_spec, one)
            out, lse, residual = results.out, results.lse, results.residual
            if spec.has_sink:  # which is what lse holds of padding
                lse.masked_fill_(~seen.real_q[:, None], -torch.inf)
            if not spec.packed:
                return results
            return results._replace(out=out[0], lse=lse[0], residual=None if residual is None else residual[0])
        inputs = over_scores(without_padding(inputs))
        q, k = inputs.q, inputs.k
        if spec.head_dim == spec.head_dim_v and not spec.wide:  # twice as fast as new_empty
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = q.new_empty(*q.shape[:-1], spec.head_dim_v, dtype=torch.float32 if spec.wide else None)
        max_logits = q.new_full((spec.nheads,), -torch.inf, dtype=torch.float32) if spec.max_logits else None
        residual = None
        if spec.precise_gradients:
            residual = q.new_empty(*q.shape[:-1], residual_columns(spec.head_dim_v), dtype=torch.int8)
        if spec.has_seqused and not spec.packed:
            batch, seqlen_q, nheads, _ = q.shape
            lse = q.new_empty((nheads, batch, seqlen_q), dtype=torch.float32)
            if out.numel():
                packed = Results(out.flatten(0, 1), lse.flatten(1, 2), max_logits, _as_rows(residual))
                self._launch_forward(spec, as_packed(inputs), packed)
            return Results(out, lse.transpose(0, 1).contiguous(), max_logits, residual)
        lse = torch.empty(inputs.lse_shape, dtype=torch.float32, device=q.device)
        results = Results(out, lse, max_logits, residual)
        if not out.numel():
            return results
        if not k.numel() and not spec.packed:
            sink = inputs.learnable_sink
            out.zero_()
            lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[:, None])
            return results
        self._launch_forward(spec, inputs, results)
        return results

    def _backward(self, call: BackwardCall) -> Gradients:
        spec, inputs, out, lse, dout, dlse, residual, need_dbias, need_dsink = call
        if needs_intervals(spec):
            one_spec, one, seen = as_one_batch(spec, inputs)
            if spec.packed:
                out, lse, dout = out[None], lse[None], dout[None]
                dlse, residual = (None if x is None else x[None] for x in (dlse, residual))
            dout = zeroed(dout, sees(seen.keys))
            found = self._backward(BackwardCall(one_spec, one, out, lse, dout, dlse, residual, need_dbias, need_dsink))
            return found._replace(dq=found.dq[0], dk=found.dk[0], dv=found.dv[0]) if spec.packed else found
        # Hooks of saved tensors may return them in any layout.
        lse, residual = compact(lse), None if residual is None else aligned(residual.contiguous())
        inputs, dout = without_padding(inputs), without_padding_of_queries(dout, inputs)
        dtype = torch.float32 if spec.wide else None
        # Twice as fast as new_empty.
        dq, dk, dv = (
            torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
            for x in (inputs.q, inputs.k, inputs.v)
        )
        sink, bias = inputs.learnable_sink if need_dsink else None, inputs.bias if need_dbias else None
        no_sequences = inputs.cu_seqlens_q is not None and inputs.cu_seqlens_q.shape[0] == 1
        if no_sequences or not (inputs.q.numel() and inputs.k.numel()):
            dsink = None if sink is None else sink_gradient_without_keys(spec, inputs, sink, lse, dlse)
            dbias = None if bias is None else bias.new_zeros(bias.shape)
            return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), dbias, dsink)
        inputs = over_scores(inputs)
        is_packed = runs_packed(spec, inputs)
        layout = score_layout(inputs, bias, is_repacked=is_packed and not spec.packed)
        layout = layout._replace(half_entries=half_entries(inputs))
        grads = Gradients(dq, dk, dv)
        if not spec.packed and is_packed:
            inputs, out, dout, residual = as_packed(inputs), out.flatten(0, 1), dout.flatten(0, 1), _as_rows(residual)
            dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
            lse = compact(lse.transpose(0, 1).flatten(1))
            grads = Gradients(dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))
        call = BackwardCall(spec, inputs, out, lse, dout, dlse, residual)
        if spec.selection_block:
            return Gradients(dq, dk, dv, dsink=selection.backward(self.launch_of, call, grads, sink))
        done = self._launch_backward(call, layout, grads)
        dbias, by_keys = done.arguments.mdBias, done.arguments.mdBiasOfKeys
        dbias = by_keys[:, :, None] if by_keys is not None else dbias
        if dbias is not None and bias is not None:
            dbias = _summed(dbias, bias)
        elif bias is not None:
            # Of no keys there may be a bias of nothing.
            dbias = self._launch_bias_gradient(spec, done, bias) if bias.numel() else bias.new_zeros(bias.shape)
        dsink = None
        if sink is not None:
            dsink = sink_gradient(spec, done.inputs, done.plan, done.arguments.mWorkspace, sink)
        return Gradients(dq, dk, dv, dbias, dsink)

    def _launch_forward(self, spec: AttentionSpec, inputs: AttentionInputs, results: Results) -> None:
        if spec.selection_block:
            selection.forward(self.launch_of, spec, inputs, results)
            return
        inputs = with_a_key(inputs)
        sink = inputs.learnable_sink
        launch = self._forward_launch(spec, inputs)
        workspace = None
        if launch.plan.workspace_size:
            workspace = torch.empty(launch.plan.workspace_size, dtype=torch.uint8, device=inputs.q.device)
        launch.kernel(
            ForwardArguments(
                **operands_of(inputs),
                mO=results.out,
                mResidual=results.residual,
                mLSE=results.lse,
                mMaxLogits=results.max_logits,
                mSink=None if sink is None else compact(sink.float()),
                mMask=None if inputs.mask is None else inputs.mask.view(torch.uint8),
                mBias=inputs.bias,
                mWorkspace=workspace,
                mNextTile=counters.next_tile() if launch.takes_tiles else None,
                blocks=rows_of(inputs, launch.plan.config),
                mIntervals=intervals_of(inputs, 0),
                numbers=launch.plan.numbers,
            )
        )

    def _forward_launch(self, spec: AttentionSpec, inputs: AttentionInputs) -> "Launch":
        return self.launch_of(plan_forward, inputs.q.device, spec, forward_shapes(inputs, score_layout(inputs)))

    def _backward_launch(self, call: BackwardCall, inputs: AttentionInputs, layout: ScoreLayout) -> "Launch":
        """Launch of a call whose inputs may have been split."""
        sequences, has_dlse = num_sequences(inputs), call.dlse is not None
        shapes = Shapes(inputs.q.shape, inputs.k.shape, sequences, inputs.max_seqlen_q, has_dlse, layout)
        return self.launch_of(plan_backward, inputs.q.device, call.spec, shapes)

    def _launch_backward(self, call: BackwardCall, layout: ScoreLayout, grads: Gradients) -> "_Backward":
        """Fills dq, dk and dv, and returns what is left to others."""
        spec, dlse = call.spec, call.dlse
        inputs = split_fully_masked(call.inputs, spec.window_right)
        launch = self._backward_launch(call, inputs, layout)
        q, features, by_keys = inputs.q, launch.plan.config.features, None
        dbias = _room_for_gradient(spec, inputs) if features.dbias else None
        if features.dbias_of_keys:  # of keys that are fully masked, nothing is written
            by_keys = q.new_zeros(q.shape[0], q.shape[2], inputs.k.shape[1], dtype=torch.float32)
        workspace = torch.empty(launch.plan.workspace_size, dtype=torch.uint8, device=inputs.q.device)
        arguments = BackwardArguments(
            **operands_of(inputs),
            mO=aligned(call.out),
            mResidual=call.residual,
            mdO=aligned(call.dout),
            mLSE=call.lse,
            mdLSE=None if dlse is None else compact(dlse),
            mdQ=grads.dq,
            mdK=grads.dk,
            mdV=grads.dv,
            mdBias=dbias,
            mdBiasOfKeys=by_keys,
            mWorkspace=workspace,
            mMask=None if inputs.mask is None else inputs.mask.view(torch.uint8),
            mBias=inputs.bias,
            mNextTile=counters.next_tile(),
            **columns_of(inputs, launch.plan.config),
            numbers=launch.plan.numbers,
        )
        launch.kernel(arguments)
        return _Backward(inputs, layout, arguments, launch.plan)

    def _launch_bias_gradient(self, spec: AttentionSpec, done: "_Backward", bias: Tensor) -> Tensor:
        """The gradient of a bias, in its own shape."""
        inputs, given = done.inputs, done.arguments
        shape = as_four(bias)
        entries = sequences = 0
        if inputs.cu_seqlens_q is not None and not spec.packed:
            entries = given.mBias.shape[0]
            sequences = num_sequences(inputs) // entries
        shapes = Shapes(inputs.q.shape, inputs.k.shape, num_sequences(inputs), 0, scores=done.layout)
        slots = entries, sequences
        launch = self.launch_of(plan_bias_gradient, bias.device, spec, shapes, done.plan, slots, shape)
        sizes = launch.plan.tables_size, launch.plan.sums_size
        tables, sums = (torch.empty(n, dtype=torch.uint8, device=bias.device) if n else None for n in sizes)
        dbias = bias.new_empty(shape)
        shared = {name: x for name, x in given._asdict().items() if name in BiasGradientArguments._fields}
        own = {"mdBias": dbias, "mTables": tables, "mSums": sums, "blocks": rows_of(inputs, launch.plan.config)}
        launch.kernel(BiasGradientArguments(**shared | own | {"numbers": launch.plan.numbers}))
        return dbias.view(bias.shape)

    def _architecture_on(self, device: torch.device) -> Architecture:
        if len(self.architecture.targets) == 1:
            return self.architecture
        gpu = torch.cuda.get_device_properties(device)
        return self.architecture.on((gpu.major, gpu.minor))

    def _launch_of(
        self, plan_pass: Callable[..., Any], device: torch.device, spec: AttentionSpec, *given: Any
    ) -> "Launch":
        """The launch of a pass on a GPU.

        ``plan_pass``, of ``plan`` or ``selection_plan``, makes the plan of an architecture, ``spec``, what is ``given``
        and a number of SMs.
        """
        from flash_attn_cute.jit import cache  # not before it is needed: importing the package is to take no time

        planned = plan_pass(self._architecture_on(device), spec, *given, self.num_sms(device))
        kernel = (self._kernel_of or cache.kernel)(planned.config)
        return Launch(kernel, planned, takes_tiles(planned.config))


class Launch(NamedTuple):
    """A compiled kernel and its plan, for all calls that look alike."""

    kernel: Callable[..., None]
    plan: Any  # of ``plan`` or ``selection_plan``
    takes_tiles: bool  # from a counter


class _Backward(NamedTuple):
    """A backward pass that has run, for the gradients of bias and sink."""

    inputs: AttentionInputs  # as the kernels got them
    layout: ScoreLayout
    arguments: BackwardArguments
    plan: Plan


def _on(device: torch.device, run: Callable[..., T], *given: Any) -> T:
    """Runs a function with a GPU as the current one."""
    if torch.cuda.current_device() == device.index:  # as it nearly always is
        return run(*given)
    with torch.cuda.device(device):
        return run(*given)


def _as_rows(residual: Tensor | None) -> Tensor | None:
    """The residuals of a dense batch as those of packed sequences."""
    return None if residual is None else residual.flatten(0, 1)


def _room_for_gradient(spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """For that of a bias with an element for every score; zeros, unless all of it will be written."""
    assert inputs.bias is not None
    # Kernels come to all scores, but for those that a window or a mask hides by whole blocks.
    is_whole = (
        not (inputs.packed or spec.has_mask or spec.has_block_mask)
        and spec.window_left is None
        and spec.window_right is None
    )
    room = inputs.bias.new_empty if is_whole else inputs.bias.new_zeros
    return room(inputs.bias.shape)


def _summed(gradients: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a bias from those of all that it is broadcast to, summed in float32."""
    dims = [i for i, (size, all_of) in enumerate(zip(as_four(bias), gradients.shape, strict=True)) if size < all_of]
    if dims:
        gradients = gradients.sum(dims)
    return gradients.to(bias.dtype).view(bias.shape)


CUTE_BACKENDS = {name: CuteBackend(architecture) for name, architecture in ARCHITECTURES.items()}
