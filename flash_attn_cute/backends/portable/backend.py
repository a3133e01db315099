"""The portable backend: the host takes sequences run by run, each to the fused, the blockwise or the selected path."""

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.packing import without_padding, without_padding_of_queries
from flash_attn_cute.backends.portable import blockwise, fused, selected
from flash_attn_cute.backends.portable.listed import Lists
from flash_attn_cute.backends.portable.tile import Tile, view_lse, view_rows, view_scores, view_selected
from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.lengths import Rows, Run, merge_runs, padding, read_sequences
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Feature, Results, wide
from flash_attn_cute.sparsity.block_mask import BlockMask


class PortableBackend:
    """Exact attention on any device PyTorch knows, in float16, bfloat16, float32 and float64.

    Rows of one sequence are sliced out before anything is computed, so what stands in the padding is never
    read. Results are the same bits every time, whether or not the call asks for that. The offsets of packed
    sequences come to the host in one transfer a pass.
    """

    name = "portable"
    features = frozenset(Feature)
    has_residual = False
    has_column_sums = False

    def limits(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
        """No reason to decline: it serves every valid call."""
        return ()

    def most_listed(self, spec: AttentionSpec, inputs: AttentionInputs, block_mask: BlockMask) -> int:
        """None: it reads rows of blocks alone."""
        return 0

    def is_made_for(self, device: torch.device) -> bool:
        """For none; it serves where others do not."""
        return False

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> Results:
        """See ``Backend.forward``."""
        inputs = without_padding(inputs)
        rows_q, rows_k = read_sequences(inputs)
        dtype = inputs.lse_dtype if spec.wide else None
        out = inputs.q.new_empty(*inputs.q.shape[:-1], spec.head_dim_v, dtype=dtype)
        lse = inputs.q.new_empty(inputs.lse_shape, dtype=inputs.lse_dtype)
        max_logits = lse.new_full((spec.nheads,), -torch.inf) if spec.max_logits else None
        results = Results(out, lse, max_logits)
        with _own_precision(inputs):
            lists = _lists(inputs)
            for run in _runs(spec, rows_q, rows_k):
                _forward(spec, inputs, lists, run, results)
        if spec.zero_padding:
            _fill_padding(spec, rows_q, out, 0.0)
            _fill_padding(spec, rows_q, lse.transpose(-1, -2), -torch.inf)
        return results

    def column_sums(self, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """Never called: ``score_statistics`` makes them of a forward pass."""
        raise NotImplementedError("column_sums: the portable backend has no kernel for them")

    def forward_for(self, spec: AttentionSpec, like: AttentionInputs) -> Callable[[AttentionInputs], Results]:
        """Works out nothing ahead."""
        return lambda inputs: self.forward(spec, inputs)

    def backward_for(self, like: BackwardCall) -> Callable[[BackwardCall], Gradients]:
        """Works out nothing ahead."""
        return lambda call: self.backward(call)

    def backward(self, call: BackwardCall) -> Gradients:
        """See ``Backend.backward``."""
        spec, inputs, lse = call.spec, without_padding(call.inputs), call.lse
        call = call._replace(inputs=inputs, dout=without_padding_of_queries(call.dout, inputs))
        rows_q, rows_k = read_sequences(inputs)
        dtype = inputs.lse_dtype if spec.wide else None
        dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (inputs.q, inputs.k, inputs.v))
        dbias = _sum_like(inputs.bias, lse) if call.need_dbias else None
        dsink = _sum_like(inputs.learnable_sink, lse) if call.need_dsink else None
        with _own_precision(inputs):
            lists = _lists(inputs)
            for run in _runs(spec, rows_q, rows_k):
                _backward(call, lists, run, Gradients(dq, dk, dv, dbias, dsink))
        if spec.zero_padding:
            for grad, rows in ((dq, rows_q), (dk, rows_k), (dv, rows_k)):
                _fill_padding(spec, rows, grad, 0.0)
        if dbias is not None and inputs.bias is not None:
            dbias = dbias.to(inputs.bias.dtype)
        if dsink is not None and inputs.learnable_sink is not None:
            dsink = dsink.to(inputs.learnable_sink.dtype)
        return Gradients(dq, dk, dv, dbias, dsink)


def _own_precision(inputs: AttentionInputs) -> torch.autocast:
    """Keeps autocast, which reaches into operators, from lowering the sums in float32."""
    return torch.autocast(inputs.q.device.type, enabled=False)


def _lists(inputs: AttentionInputs) -> Lists | None:
    return None if inputs.block_mask is None else Lists.of(inputs.block_mask)


def _runs(spec: AttentionSpec, rows_q: list[Rows], rows_k: list[Rows]) -> list[Run]:
    """Equal sequences together, unless each has rows of a block mask of its own.

    If invariant, each goes by itself: PyTorch's products may choose another order of sums where there are more.
    """
    if spec.packing_invariant or (spec.packed and spec.has_block_mask):
        return [Run(b, 1, q, k) for b, (q, k) in enumerate(zip(rows_q, rows_k, strict=True))]
    return merge_runs(rows_q, rows_k, spec.packed)


def _forward(spec: AttentionSpec, inputs: AttentionInputs, lists: Lists | None, run: Run, results: Results) -> None:
    num_fully_masked, band = _window(spec, run)
    out, lse = view_rows(results.out, run, run.q, spec.packed), view_lse(results.lse, run, spec.packed)
    out[:, :, :num_fully_masked], lse[:, :, :num_fully_masked] = 0.0, -torch.inf
    if num_fully_masked < run.q.length:
        tile = _tile(spec, inputs, lists, run, num_fully_masked, band)
        visible = Results(out[:, :, num_fully_masked:], lse[:, :, num_fully_masked:], results.max_logits)
        if fused.serves(tile) and results.max_logits is None:
            fused.forward(tile, visible.out, visible.lse)
        else:
            (blockwise if tile.selected is None else selected).forward(tile, visible)
    if inputs.learnable_sink is not None:
        sink = inputs.learnable_sink.to(lse.dtype)[:, None]
        merged = torch.logaddexp(lse, sink)
        out *= (lse - merged).exp_().masked_fill_(lse.isneginf(), 0)[..., None]
        lse.copy_(merged)


def _backward(call: BackwardCall, lists: Lists | None, run: Run, grads: Gradients) -> None:
    spec, inputs = call.spec, call.inputs
    num_fully_masked, band = _window(spec, run)
    out, dout, dq = (view_rows(x, run, run.q, spec.packed) for x in (call.out, call.dout, grads.dq))
    dk, dv = (view_rows(x, run, run.k, spec.packed) for x in (grads.dk, grads.dv))
    lse = view_lse(call.lse, run, spec.packed)
    dlse = None if call.dlse is None else view_lse(call.dlse, run, spec.packed)
    dq[:, :, :num_fully_masked] = 0
    delta = _delta(out, dout, dlse) if spec.wide else torch.zeros_like(lse) if dlse is None else -dlse
    if num_fully_masked == run.q.length:
        dk.zero_()
        dv.zero_()
    else:
        tile = _tile(spec, inputs, lists, run, num_fully_masked, band)
        seen_out, seen_lse, seen_dout, seen_dq = (x[:, :, num_fully_masked:] for x in (out, lse, dout, dq))
        if dlse is None and fused.serves_backward(tile):
            delta = _delta(out, dout, dlse)
            fused.backward(tile, seen_out, seen_lse, seen_dout, Gradients(seen_dq, dk, dv))
        else:
            dbias = view_scores(grads.dbias, run, num_fully_masked, spec.packed)
            run_backward = (blockwise if tile.selected is None else selected).backward
            seen_delta = delta[:, :, num_fully_masked:]
            run_backward(tile, seen_lse, seen_dout, seen_delta, Gradients(seen_dq, dk, dv, dbias))
    if grads.dsink is not None and inputs.learnable_sink is not None:
        weight = (inputs.learnable_sink.to(lse.dtype)[:, None] - lse).exp_().masked_fill_(lse.isneginf(), 0)
        grads.dsink.sub_((weight * delta).sum((0, 2)))


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The row sums of dout * out, less the gradient of lse: what every score of a row loses in backward.

    Where out is 0, as it is in a row that saw nothing, dout may hold anything.
    """
    delta = (out.to(wide(out.dtype)) * dout).masked_fill_(out == 0, 0).sum(-1)
    return delta if dlse is None else delta - dlse


def _window(spec: AttentionSpec, run: Run) -> tuple[int, Band]:
    """How many of a run's first queries see no key at all, and the window of the others."""
    lengths = run.q.length, run.k.length
    band = Band.of((spec.window_left, spec.window_right), *lengths).without_idle_sides(*lengths)
    if not run.k.length:
        return run.q.length, band
    num_fully_masked = 0 if band.upper is None else min(run.q.length, max(0, -band.upper))
    return num_fully_masked, Band(*(None if edge is None else edge + num_fully_masked for edge in band))


def _tile(
    spec: AttentionSpec, inputs: AttentionInputs, lists: Lists | None, run: Run, num_fully_masked: int, band: Band
) -> Tile:
    if lists is not None:
        lists = lists.at(0 if spec.packed else run.first, run.q.start + num_fully_masked, run.k.start)
    return Tile(
        q=view_rows(inputs.q, run, run.q, spec.packed)[:, :, num_fully_masked:],
        k=view_rows(inputs.k, run, run.k, spec.packed),
        v=view_rows(inputs.v, run, run.k, spec.packed),
        mask=view_scores(inputs.mask, run, num_fully_masked, spec.packed),
        bias=view_scores(inputs.bias, run, num_fully_masked, spec.packed),
        lists=lists,
        selected=view_selected(inputs.selected, run, num_fully_masked, spec.packed),
        band=band,
        spec=spec,
    )


def _fill_padding(spec: AttentionSpec, rows: list[Rows], x: Tensor, value: float) -> None:
    for index in padding(rows, x, spec.packed):
        x[index] = value


def _sum_like(x: Tensor | None, lse: Tensor) -> Tensor | None:
    """Zeros of x's shape to sum its gradient in."""
    return None if x is None else torch.zeros(x.shape, dtype=lse.dtype, device=lse.device)
