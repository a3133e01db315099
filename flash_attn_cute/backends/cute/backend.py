"""A call on a GPU that has kernels of its own: planned, compiled, launched.

cutlass is imported when the first kernel is compiled, not before.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients, PassPlan
from flash_attn_cute.backends.cute import counters, plan, selection
from flash_attn_cute.backends.cute.document_sums import sum_by_documents
from flash_attn_cute.backends.cute.layouts import NO_BLOCKS, aligned, compact
from flash_attn_cute.backends.cute.repeated import RepeatedBackward, RepeatedForward, has_backward, has_forward
from flash_attn_cute.backends.cute.selection_tables import in_halves
from flash_attn_cute.backends.packing import (
    as_one_batch,
    as_packed,
    dense_has_fully_masked,
    may_have_fully_masked,
    needs_intervals,
    over_scores,
    sees,
    split_fully_masked,
    without_padding,
    without_padding_of_queries,
    zeroed,
)
from flash_attn_cute.kernels.arguments import (
    BackwardArguments,
    BiasGradientArguments,
    BlockArguments,
    ForwardArguments,
    described,
)
from flash_attn_cute.kernels.registry import Architecture, pass_of
from flash_attn_cute.sparsity.bits import HALF
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Feature, Results, residual_columns, statically_true

_HAS_COMPILER = importlib.util.find_spec("cutlass") is not None
_MAX_PACKED_ROWS = 2**30  # of the view through which TMA reads and writes packed rows
_ENTRIES_STEP = 1 << 12  # of a block mask's, so that masks with nearly as many have one plan
_MAX_TABLE = 2**31  # numbers of a block mask's table
_TILES_ALIGN = 16  # bytes, of its bits
_LOG2_E = math.log2(math.e)
_NO_SCORES = plan.ScoreLayout()


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
        self.is_supposed = is_supposed
        self._kernel_of = kernel_of
        # Caches are bounded, for specs and shapes hold numbers that can change with every call.
        self._prepare_forward = functools.lru_cache(maxsize=1024)(self._plan_forward)
        self._prepare_backward = functools.lru_cache(maxsize=1024)(self._plan_backward)
        self._prepare_bias_gradient = functools.lru_cache(maxsize=1024)(self._plan_bias_gradient)
        self._prepare_selection = functools.lru_cache(maxsize=1024)(self._plan_selection)
        self._prepare_selection_backward = functools.lru_cache(maxsize=1024)(self._plan_selection_backward)

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
        if plan.DTYPES.get(spec.dtype) not in self.architecture.dtypes:
            reasons.append(str(spec.dtype))
        widest = self.architecture.max_head_dim
        for name, d in (("d", spec.head_dim), ("d_v", spec.head_dim_v)):
            if d % 8 or d > widest:
                reasons.append(f"{name} = {d} (multiples of 8 up to {widest})")
        for name, x in (("q", inputs.q), ("k", inputs.k)):
            rows = math.prod(x.shape[:-2])
            if statically_true(rows >= _MAX_PACKED_ROWS) and _runs_packed(spec, inputs):
                where = f"total_{name}" if spec.packed else f"{name}, which are packed for this call"
                reasons.append(f"{rows} rows of {where} (expected fewer than 2^30)")
        if spec.has_block_mask:
            if spec.has_mask:
                reasons.append("block_mask beside mask")
            if spec.has_bias and needs_intervals(spec):
                reasons.append("block_mask and bias beside cu_seqlens, seqused or a window of these")
        if spec.selection_block and Feature.SELECTION in self.features:
            reasons += selection.limits(spec)
        if not _HAS_COMPILER and not self.is_supposed:
            reasons.append("the package nvidia-cutlass-dsl is not installed")
        return tuple(reasons)

    def is_made_for(self, device: torch.device) -> bool:
        """See ``Backend.is_made_for``."""
        if self.is_supposed or device.type != "cuda":
            return self.is_supposed
        gpu = torch.cuda.get_device_properties(device)
        return (gpu.major, gpu.minor) in self.architecture.targets

    def num_sms(self, device: torch.device) -> int:
        """SMs of a GPU that it is made for."""
        return self.architecture.num_sms if self.is_supposed else _num_sms(device)

    def planned(
        self, spec: AttentionSpec, inputs: AttentionInputs, num_sms: int, *, need_dbias: bool, blocks: Any = None
    ) -> tuple[PassPlan | None, PassPlan | None]:
        """The launches of both passes of a call on a GPU of so many SMs; None where nothing is launched.

        Args:
            spec: the call's.
            inputs: on the meta device, where nothing is computed; offsets that are the same memory are the same tensor.
            num_sms: SMs of the GPU.
            need_dbias: whether the bias has a gradient.
            blocks: of a block mask, which is not among the inputs: batch entries and heads that differ, and those
                whose launch orders do.
        """
        intervals = needs_intervals(spec)
        if intervals:
            spec, inputs, _ = as_one_batch(spec, inputs)
        bias, inputs = inputs.bias if need_dbias else None, over_scores(inputs)
        has_queries, has_keys = inputs.q.numel() > 0, inputs.k.numel() > 0
        forward = backward = None
        if has_queries and (has_keys or spec.packed or spec.has_seqused):
            given = as_packed(inputs) if spec.has_seqused and not spec.packed else inputs
            k_shape = given.k.shape if has_keys else torch.Size((1, *given.k.shape[1:]))
            few_queries = given.max_seqlen_q <= plan.FEW_QUERIES
            layout = _layout(given, blocks=blocks)._replace(intervals=intervals)
            shapes = _forward_shapes(given.q.shape, k_shape, _num_sequences(given), few_queries, layout)
            forward = _for_people(plan.plan_forward(self.architecture, spec, shapes, num_sms))
        no_sequences = inputs.cu_seqlens_q is not None and inputs.cu_seqlens_q.shape[0] == 1
        if has_queries and has_keys and not no_sequences:
            repacked = _runs_packed(spec, inputs) and not spec.packed
            layout = _layout(inputs, bias, is_repacked=repacked, blocks=blocks)._replace(intervals=intervals)
            given = as_packed(inputs) if repacked else inputs
            num_sequences = _num_sequences(given)
            if may_have_fully_masked(given, spec.window_right):
                num_sequences *= 2
            shapes = plan.Shapes(given.q.shape, given.k.shape, num_sequences, given.max_seqlen_q, False, layout)
            backward = _for_people(plan.plan_backward(self.architecture, spec, shapes, num_sms))
        return forward, backward

    def planned_selection(
        self, spec: AttentionSpec, inputs: AttentionInputs, num_sms: int, selected: tuple[int, ...]
    ) -> tuple[PassPlan | None, PassPlan | None]:
        """The first launches of both passes in which each query selects key blocks, of tensors as in ``planned``.

        ``selected`` is the shape of the selected blocks, (batch, heads, rows, top). None where nothing is launched.
        """
        if not (inputs.q.numel() and inputs.k.numel()):
            return None, None
        shapes = plan.Shapes(inputs.q.shape, inputs.k.shape, _num_sequences(inputs), 0)
        forward = selection.plan_selection(self.architecture, spec, shapes, selected, num_sms)
        halves = *selected[:-1], selected[-1] * spec.selection_block // HALF
        backward = selection.plan_selection_backward(self.architecture, spec, shapes, halves, num_sms)
        return _for_people(forward), _for_people(backward)

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> Results:
        """See ``Backend.forward``."""
        if torch.cuda.current_device() != inputs.q.device.index:
            with torch.cuda.device(inputs.q.device):
                return self._forward(spec, inputs)
        return self._forward(spec, inputs)

    def backward(self, call: BackwardCall) -> Gradients:
        """See ``Backend.backward``."""
        device = call.inputs.q.device
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self._backward(call)
        return self._backward(call)

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
        launch = self._backward_launch(like, like.inputs, _NO_SCORES)
        return RepeatedBackward(launch, self.backward, like)

    def _backward_config(self, spec: AttentionSpec, inputs: AttentionInputs) -> Any:
        """The configuration of a call's backward pass, unless lse or bias have gradients; None if it has none."""
        device = inputs.q.device
        kernels = CuteBackend(self._architecture_on(device))
        _, backward = kernels.planned(spec, inputs, self.num_sms(device), need_dbias=False)
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
        if spec.selection_block:
            lse = torch.empty(inputs.lse_shape, dtype=torch.float32, device=q.device)
            return self._forward_selected(spec, inputs, Results(out, lse))
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

    def _forward_selected(self, spec: AttentionSpec, inputs: AttentionInputs, results: Results) -> Results:
        """Fills the results of a call in which each query selects key blocks."""
        k, num_sequences = inputs.k, _num_sequences(inputs)
        if not results.out.numel():
            return results
        if not (num_sequences if spec.packed else k.numel()):
            return selection.without_keys(inputs, results)
        if not k.numel():  # packed sequences of no keys: TMA knows no empty tensors
            k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, inputs.v))
            inputs = inputs._replace(k=k, v=v)
        assert inputs.selected is not None
        shapes = inputs.q.shape, k.shape, num_sequences, inputs.selected.shape
        launch = self._prepare_selection(spec, *shapes, k.device)
        selection.launch(launch.kernel, launch.plan, spec, inputs, results)
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
            dsink = None if sink is None else _dsink_without_keys(spec, inputs, sink, lse, dlse)
            dbias = None if bias is None else bias.new_zeros(bias.shape)
            return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), dbias, dsink)
        if spec.selection_block:
            return self._backward_selected(call, Gradients(dq, dk, dv))
        inputs = over_scores(inputs)
        runs_packed = _runs_packed(spec, inputs)
        layout = _layout(inputs, bias, is_repacked=runs_packed and not spec.packed)
        layout = layout._replace(half_entries=_half_entries(inputs))
        grads = Gradients(dq, dk, dv)
        if not spec.packed and runs_packed:
            inputs, out, dout, residual = as_packed(inputs), out.flatten(0, 1), dout.flatten(0, 1), _as_rows(residual)
            dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
            lse = compact(lse.transpose(0, 1).flatten(1))
            grads = Gradients(dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))
        done = self._launch_backward(BackwardCall(spec, inputs, out, lse, dout, dlse, residual), layout, grads)
        dbias = done.arguments.mdBias
        if dbias is not None and bias is not None:
            dbias = dbias.view(bias.shape)
        elif bias is not None:
            # Of no keys there may be a bias of nothing.
            dbias = self._launch_bias_gradient(spec, done, bias) if bias.numel() else bias.new_zeros(bias.shape)
        dsink = None
        if sink is not None:
            lse, delta = done.stats()
            logits = sink.float()[:, None]
            weights = torch.exp(logits - lse) if spec.has_bias else torch.exp2(logits * _LOG2_E - lse)
            weights.mul_(delta)
            sums = sum_by_documents(weights, done.first_rows()) if spec.packing_invariant else weights.sum(1)
            dsink = sums.neg_().to(sink.dtype)
        return Gradients(dq, dk, dv, dbias, dsink)

    def _backward_selected(self, call: BackwardCall, grads: Gradients) -> Gradients:
        """Fills gradients where each query selects key blocks, of which larger ones are cut into such of 64 keys."""
        spec, inputs = call.spec, call.inputs
        while spec.selection_block > HALF:
            inputs, spec = in_halves(inputs), spec._replace(selection_block=spec.selection_block // 2)
        assert inputs.selected is not None
        shapes = inputs.q.shape, inputs.k.shape, _num_sequences(inputs), inputs.selected.shape
        launch = self._prepare_selection_backward(spec, *shapes, call.dlse is not None, inputs.q.device)
        dsink = selection.launch_backward(launch.kernel, launch.plan, call._replace(spec=spec, inputs=inputs), grads)
        return grads._replace(dsink=dsink)

    def _launch_forward(self, spec: AttentionSpec, inputs: AttentionInputs, results: Results) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        if not k.numel():  # packed sequences of no keys: TMA knows no empty tensors
            k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))
        sink = inputs.learnable_sink
        offsets_q, offsets_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        launch = self._forward_launch(spec, inputs._replace(k=k))
        workspace = None
        if launch.plan.workspace_size:
            workspace = torch.empty(launch.plan.workspace_size, dtype=torch.uint8, device=q.device)
        launch.kernel(
            ForwardArguments(
                mQ=aligned(q),
                mK=aligned(k),
                mV=aligned(v),
                mO=results.out,
                mResidual=results.residual,
                mLSE=results.lse,
                mMaxLogits=results.max_logits,
                mCuSeqlensQ=None if offsets_q is None else compact(offsets_q),
                mCuSeqlensK=None if offsets_k is None else compact(offsets_k),
                mSeqUsedQ=None if inputs.seqused_q is None else compact(inputs.seqused_q),
                mSeqUsedK=None if inputs.seqused_k is None else compact(inputs.seqused_k),
                mSink=None if sink is None else compact(sink.float()),
                mMask=None if inputs.mask is None else inputs.mask.view(torch.uint8),
                mBias=inputs.bias,
                mWorkspace=workspace,
                mNextTile=counters.next_tile() if launch.takes_tiles else None,
                blocks=_rows_of(inputs, launch.plan.config),
                mIntervals=_seen(inputs, 0),
                numbers=launch.plan.numbers,
            )
        )

    def _forward_launch(self, spec: AttentionSpec, inputs: AttentionInputs) -> "_Launch":
        q, k = inputs.q, inputs.k
        few_queries = inputs.max_seqlen_q <= plan.FEW_QUERIES
        return self._prepare_forward(
            spec, q.shape, k.shape, _num_sequences(inputs), few_queries, _layout(inputs), q.device
        )

    def _backward_launch(self, call: BackwardCall, inputs: AttentionInputs, layout: plan.ScoreLayout) -> "_Launch":
        """Launch of a call whose inputs may have been split."""
        q, k = inputs.q, inputs.k
        num_sequences, has_dlse = _num_sequences(inputs), call.dlse is not None
        return self._prepare_backward(
            call.spec, q.shape, k.shape, num_sequences, inputs.max_seqlen_q, has_dlse, layout, q.device
        )

    def _launch_backward(self, call: BackwardCall, layout: plan.ScoreLayout, grads: Gradients) -> "_Backward":
        """Fills dq, dk and dv, and returns what is left to others."""
        spec, dlse = call.spec, call.dlse
        inputs = split_fully_masked(call.inputs, spec.window_right)
        q, k = inputs.q, inputs.k
        offsets_q, offsets_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        launch = self._backward_launch(call, inputs, layout)
        dbias = _room_for_gradient(spec, inputs) if launch.plan.config.features.dbias else None
        workspace = torch.empty(launch.plan.workspace_size, dtype=torch.uint8, device=q.device)
        arguments = BackwardArguments(
            mQ=aligned(q),
            mK=aligned(k),
            mV=aligned(inputs.v),
            mO=aligned(call.out),
            mResidual=call.residual,
            mdO=aligned(call.dout),
            mLSE=call.lse,
            mdLSE=None if dlse is None else compact(dlse),
            mdQ=grads.dq,
            mdK=grads.dk,
            mdV=grads.dv,
            mdBias=dbias,
            mWorkspace=workspace,
            mCuSeqlensQ=None if offsets_q is None else compact(offsets_q),
            mCuSeqlensK=None if offsets_k is None else compact(offsets_k),
            mSeqUsedQ=None if inputs.seqused_q is None else compact(inputs.seqused_q),
            mSeqUsedK=None if inputs.seqused_k is None else compact(inputs.seqused_k),
            mMask=None if inputs.mask is None else inputs.mask.view(torch.uint8),
            mBias=inputs.bias,
            mNextTile=counters.next_tile(),
            **_columns_of(inputs, launch.plan.config),
            numbers=launch.plan.numbers,
        )
        launch.kernel(arguments)
        return _Backward(inputs, layout, arguments, launch.plan)

    def _launch_bias_gradient(self, spec: AttentionSpec, done: "_Backward", bias: Tensor) -> Tensor:
        """The gradient of a bias, in its own shape."""
        inputs, given = done.inputs, done.arguments
        shape = (*[1] * (4 - bias.ndim), *bias.shape)
        entries = sequences = 0
        if inputs.cu_seqlens_q is not None and not spec.packed:
            entries = given.mBias.shape[0]
            sequences = _num_sequences(inputs) // entries
        launch = self._prepare_bias_gradient(
            spec,
            inputs.q.shape,
            inputs.k.shape,
            _num_sequences(inputs),
            done.layout,
            done.plan,
            (entries, sequences),
            shape,
            inputs.q.device,
        )
        dbias = bias.new_empty(shape)
        sizes = launch.plan.tables_size, launch.plan.sums_size
        tables, sums = (torch.empty(n, dtype=torch.uint8, device=bias.device) if n else None for n in sizes)
        launch.kernel(
            BiasGradientArguments(
                mQ=given.mQ,
                mK=given.mK,
                mV=given.mV,
                mdO=given.mdO,
                mWorkspace=given.mWorkspace,
                mdBias=dbias,
                mCuSeqlensQ=given.mCuSeqlensQ,
                mCuSeqlensK=given.mCuSeqlensK,
                mSeqUsedQ=given.mSeqUsedQ,
                mSeqUsedK=given.mSeqUsedK,
                mMask=given.mMask,
                mBias=given.mBias,
                mTables=tables,
                mSums=sums,
                blocks=_rows_of(inputs, launch.plan.config),
                numbers=launch.plan.numbers,
            )
        )
        return dbias.view(bias.shape)

    def _plan_forward(
        self,
        spec: AttentionSpec,
        q_shape: torch.Size,
        k_shape: torch.Size,
        num_sequences: int,
        few_queries: bool,
        scores: plan.ScoreLayout,
        device: torch.device,
    ) -> "_Launch":
        shapes = _forward_shapes(q_shape, k_shape, num_sequences, few_queries, scores)
        return self._launch_of(plan.plan_forward(self._architecture_on(device), spec, shapes, _num_sms(device)))

    def _plan_backward(
        self,
        spec: AttentionSpec,
        q_shape: torch.Size,
        k_shape: torch.Size,
        num_sequences: int,
        max_seqlen_q: int,
        has_dlse: bool,
        scores: plan.ScoreLayout,
        device: torch.device,
    ) -> "_Launch":
        shapes = plan.Shapes(q_shape, k_shape, num_sequences, max_seqlen_q, has_dlse, scores)
        return self._launch_of(plan.plan_backward(self._architecture_on(device), spec, shapes, _num_sms(device)))

    def _plan_selection(
        self,
        spec: AttentionSpec,
        q_shape: torch.Size,
        k_shape: torch.Size,
        num_sequences: int,
        selected: torch.Size,
        device: torch.device,
    ) -> "_Launch":
        shapes = plan.Shapes(q_shape, k_shape, num_sequences, 0)
        architecture, num_sms = self._architecture_on(device), _num_sms(device)
        return self._launch_of(selection.plan_selection(architecture, spec, shapes, selected, num_sms))

    def _plan_selection_backward(
        self,
        spec: AttentionSpec,
        q_shape: torch.Size,
        k_shape: torch.Size,
        num_sequences: int,
        selected: torch.Size,
        has_dlse: bool,
        device: torch.device,
    ) -> "_Launch":
        shapes = plan.Shapes(q_shape, k_shape, num_sequences, 0, has_dlse)
        architecture, num_sms = self._architecture_on(device), _num_sms(device)
        return self._launch_of(selection.plan_selection_backward(architecture, spec, shapes, selected, num_sms))

    def _launch_of(self, planned: Any) -> "_Launch":
        from flash_attn_cute.jit import cache  # not before it is needed: importing the package is to take no time

        kernel = (self._kernel_of or cache.kernel)(planned.config)
        return _Launch(kernel, planned, _takes_tiles(planned.config))

    def _architecture_on(self, device: torch.device) -> Architecture:
        """With the kernels for a GPU."""
        if len(self.architecture.targets) == 1:
            return self.architecture
        gpu = torch.cuda.get_device_properties(device)
        return self.architecture.on((gpu.major, gpu.minor))

    def _plan_bias_gradient(
        self,
        spec: AttentionSpec,
        q_shape: torch.Size,
        k_shape: torch.Size,
        num_sequences: int,
        scores: plan.ScoreLayout,
        backward: plan.BackwardPlan,
        slots: tuple[int, int],
        bias_shape: tuple[int, ...],
        device: torch.device,
    ) -> "_Launch":
        shapes = plan.Shapes(q_shape, k_shape, num_sequences, 0, scores=scores)
        architecture, num_sms = self._architecture_on(device), _num_sms(device)
        return self._launch_of(
            plan.plan_bias_gradient(architecture, spec, shapes, backward, slots, bias_shape, num_sms)
        )


class _Launch(NamedTuple):
    """A compiled kernel and its plan, for all calls that look alike."""

    kernel: Callable[..., None]
    plan: Any  # a plan of ``plan``
    takes_tiles: bool  # from a counter


class _Backward(NamedTuple):
    """A backward pass that has run, for the gradients of bias and sink."""

    inputs: AttentionInputs  # as the kernels got them
    layout: plan.ScoreLayout
    arguments: BackwardArguments
    plan: plan.BackwardPlan

    def stats(self) -> Tensor:
        """Lse, in base 2 or with a bias natural, and delta, (2, nheads, queries)."""
        shape = self.plan.stats_shape
        return self.arguments.mWorkspace[: 4 * math.prod(shape)].view(torch.float32).view(shape)

    def first_rows(self) -> Tensor:
        """The first row of each sequence in ``stats``, (sequences,) int32."""
        tile_m, offsets = self.plan.config.tile_m, self.inputs.cu_seqlens_q
        if offsets is None:
            batch, seqlen = self.inputs.q.shape[:2]
            return _first_rows(batch, -(-seqlen // tile_m) * tile_m, self.inputs.q.device)
        # As ``kernels.common.lengths.packed_block`` has it.
        return offsets[:-1] // tile_m * tile_m + _first_rows(_num_sequences(self.inputs), tile_m, offsets.device)


def _takes_tiles(config: Any) -> bool:
    next_tile = described(pass_of(config).arguments).get("mNextTile")
    return next_tile is not None and next_tile.is_given(config)


def _for_people(planned: plan.ForwardPlan | plan.BackwardPlan | selection.SelectionPlan) -> PassPlan:
    config, is_ordered = planned.config, not isinstance(planned, plan.BackwardPlan)
    return PassPlan(
        packed=config.features.packed,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        stages=getattr(config, "stages", None),
        cluster=config.ctas_a_tile,
        persistent=_takes_tiles(config),
        deterministic=is_ordered or config.features.deterministic,
        workspace_bytes=planned.workspace_size,
        config=config,
        numbers=planned.numbers,
    )


def _forward_shapes(
    q_shape: torch.Size, k_shape: torch.Size, num_sequences: int, few_queries: bool, scores: plan.ScoreLayout
) -> plan.Shapes:
    # Of the longest sequence only matters whether it is short.
    longest = plan.FEW_QUERIES if few_queries else q_shape[-3]
    return plan.Shapes(q_shape, k_shape, num_sequences, longest, scores=scores)


def _num_sequences(inputs: AttentionInputs) -> int:
    """Packed ones; 0 of dense calls."""
    return 0 if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1


def _runs_packed(spec: AttentionSpec, inputs: AttentionInputs) -> bool:
    """Whether some pass sees packed sequences: the user's, or a dense batch rewritten as such."""
    return spec.packed or spec.has_seqused or dense_has_fully_masked(inputs, spec.window_right)


def _layout(
    inputs: AttentionInputs, wanted: Tensor | None = None, *, is_repacked: bool = False, blocks: Any = None
) -> plan.ScoreLayout:
    """Layout of mask and bias, which are ``over_scores``.

    ``wanted`` is the bias as the user gave it, if it has a gradient. ``blocks`` are the sizes of a block
    mask's lists and orders, if that is not among the inputs.
    """
    mask, bias, tables = inputs.mask, inputs.bias, inputs.block_mask
    if tables is not None:
        blocks = tables.rows.spans.shape[:2], (1, 1) if tables.columns is None else tables.columns.order.shape[:2]
    if mask is None and bias is None and blocks is None:
        return _NO_SCORES
    some = bias if mask is None else mask
    rows_a_slot = 1 if some is None else some.shape[2]
    strided = bias is not None and bias.stride(-1) != 1
    paired = bias is not None and not strided and _is_paired(bias)
    uniform = bias is not None and bias.stride(-2) == 0
    own_gradients = False
    if bias is not None and wanted is not None:
        # Packed to the kernels, entries of the batch have no tiles of queries in common, and zeros between them.
        own_gradients = math.prod(wanted.shape) == math.prod(bias.shape) and not is_repacked
    is_float32 = bias is not None and bias.dtype == torch.float32
    keys, varies = 1, (False, False, False)
    if mask is not None:
        keys = max(1, mask.shape[3])
        batch, heads, queries = (
            size > 1 and step != 0 for size, step in zip(mask.shape[:3], mask.stride(), strict=False)
        )
        varies = batch, heads, queries
    sets: Any = () if blocks is None else tuple(map(tuple, blocks))
    layout = plan.ScoreLayout(rows_a_slot, is_float32, strided, paired, uniform, own_gradients, keys, varies, *sets)
    return layout if tables is None or tables.intervals is None else layout._replace(intervals=True)


def _is_paired(x: Tensor) -> bool:
    # Kernels compute addresses of rows behind the last one, too.
    return x.data_ptr() % (2 * x.element_size()) == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])


def _rows_of(inputs: AttentionInputs, config: Any) -> BlockArguments:
    """A block mask's tables, from the side of queries."""
    if inputs.block_mask is None:
        return NO_BLOCKS
    rows = inputs.block_mask.rows
    return _blocks(rows.spans, rows.entries, rows.tiles, config)


def _columns_of(inputs: AttentionInputs, config: Any) -> dict[str, Any]:
    """From the side of keys, with the configuration's blocks of queries; and what else a backward pass needs of it."""
    tables = inputs.block_mask
    if tables is None:
        return {"blocks": NO_BLOCKS, "mLaunchOrder": None, "mContributors": None, "mIntervals": None}
    columns = tables.half_columns if config.tile_n == HALF else tables.columns
    assert columns is not None, "block_mask: has no columns, though gradients are wanted"
    is_half = config.tile_m == HALF
    return {
        "blocks": _blocks(columns.spans[0 if is_half else 1], columns.entries, tables.rows.tiles, config),
        "mLaunchOrder": columns.order.flatten(),
        "mContributors": columns.contributors.flatten() if is_half else tables.rows.spans.flatten()[1::2],
        "mIntervals": _seen(inputs, 1),
    }


def _half_entries(inputs: AttentionInputs) -> int:
    """Blocks of 64 x 64 that a block mask of blocks of 64 keys lists, rounded up; 0 of other calls."""
    tables = inputs.block_mask
    if tables is None or tables.half_columns is None:
        return 0
    return -(-max(1, len(tables.half_columns.entries)) // _ENTRIES_STEP) * _ENTRIES_STEP


def _seen(inputs: AttentionInputs, side: int) -> Tensor | None:
    """Intervals that queries (0) or keys (1) see beside a block mask; None if they see all."""
    tables = inputs.block_mask
    return None if tables is None or tables.intervals is None else tables.intervals[side].flatten()


def _blocks(spans: Tensor, entries: Tensor, tiles: Tensor, config: Any) -> BlockArguments:
    if max(entries.numel(), tiles.numel()) >= _MAX_TABLE:
        raise ValueError(
            f"block_mask: expected fewer than 2^31 numbers in a table, got {entries.numel()} of blocks and "
            f"{tiles.numel()} of elements"
        )
    if not len(entries):  # kernels take no tensors without memory
        entries = entries.new_zeros(1, entries.shape[1])
    if not len(tiles):
        tiles = tiles.new_zeros(1, *tiles.shape[1:])
    if tiles.data_ptr() % _TILES_ALIGN:
        tiles = tiles.clone()
    bits = tiles.new_empty(len(tiles) * config.mask_tile.words_a_block) if config.reorders_bits else None
    return BlockArguments(spans.flatten(), entries.flatten(), tiles.flatten(), bits)


def _as_rows(residual: Tensor | None) -> Tensor | None:
    """The residuals of a dense batch as those of packed sequences."""
    return None if residual is None else residual.flatten(0, 1)


def _room_for_gradient(spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """For that of a bias with an element for every score; zeros, unless all of it will be written."""
    assert inputs.bias is not None
    # Kernels come to all scores, but for those that a window or a mask hides by whole blocks.
    is_whole = (
        not (spec.packed or spec.has_mask or spec.has_block_mask)
        and spec.window_left is None
        and spec.window_right is None
    )
    room = inputs.bias.new_empty if is_whole else inputs.bias.new_zeros
    return room(inputs.bias.shape)


def _first_rows(num: int, rows: int, device: torch.device) -> Tensor:
    """The first row of each of so many sequences that have as many rows, int32."""
    return torch.arange(num, dtype=torch.int32, device=device).mul_(rows)


def _dsink_without_keys(
    spec: AttentionSpec, inputs: AttentionInputs, sink: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor:
    """A sink that is all that real queries see is their lse; queries of padding have one of -inf."""
    if dlse is None:
        return torch.zeros_like(sink)
    by_head = dlse.where(lse != -torch.inf, 0).movedim(-2, 0).flatten(1)
    if not spec.packing_invariant:
        return by_head.sum(1).to(sink.dtype)
    offsets = inputs.cu_seqlens_q
    if offsets is None:
        batch, seqlen = inputs.q.shape[:2]
        return sum_by_documents(by_head, _first_rows(batch, seqlen, inputs.q.device)).to(sink.dtype)
    return sum_by_documents(by_head, offsets[:-1]).to(sink.dtype)


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
