"""Shapes of a call's tensors, and the layout of mask and bias, for plans."""

import math
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.cute.layouts import fits
from flash_attn_cute.backends.cute.plan import FEW_QUERIES, BiasGradientOf, ScoreLayout, Shapes, rounded_up
from flash_attn_cute.backends.packing import dense_has_fully_masked
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec

NO_SCORES = ScoreLayout()


def num_sequences(inputs: AttentionInputs) -> int:
    """Packed sequences; 0 of dense calls."""
    return 0 if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1


def runs_packed(spec: AttentionSpec, inputs: AttentionInputs) -> bool:
    """Whether some pass sees packed sequences: the user's, or a dense batch rewritten as such."""
    # Kernels of selections take queries that see no key as they are; for others these are split off.
    has_split = not spec.selection_block and dense_has_fully_masked(inputs, spec.window_right)
    return spec.packed or spec.has_seqused or has_split


def forward_shapes(inputs: AttentionInputs, scores: ScoreLayout) -> Shapes:
    """Shapes of a forward pass, equal for calls whose longest sequences are both short, or both long."""
    longest = FEW_QUERIES if inputs.max_seqlen_q <= FEW_QUERIES else inputs.q.shape[-3]
    return Shapes(inputs.q.shape, inputs.k.shape, num_sequences(inputs), longest, scores=scores)


def score_layout(
    inputs: AttentionInputs, wanted: Tensor | None = None, *, is_repacked: bool = False, blocks: Any = None
) -> ScoreLayout:
    """Layout of mask and bias, which are ``over_scores``.

    ``wanted`` is the bias as the user gave it, if it has a gradient. ``blocks`` are the sizes of a block
    mask's lists and orders, if that is not among the inputs.
    """
    mask, bias, tables = inputs.mask, inputs.bias, inputs.block_mask
    if tables is not None:
        blocks = tables.rows.spans.shape[:2], (1, 1) if tables.columns is None else tables.columns.order.shape[:2]
    if mask is None and bias is None and blocks is None:
        return NO_SCORES
    some = bias if mask is None else mask
    rows_a_slot = 1 if some is None else some.shape[2]
    strided = bias is not None and bias.stride(-1) != 1
    paired = bias is not None and not strided and _is_paired(bias)
    uniform = bias is not None and bias.stride(-2) == 0
    gradient = None if bias is None or wanted is None else _gradient_of(bias, wanted)
    if is_repacked and gradient != "scores":  # entries of the batch have no tiles of queries in common then
        gradient = None
    is_float32 = bias is not None and bias.dtype == torch.float32
    keys, varies = 1, (False, False, False)
    if mask is not None:
        keys = max(1, mask.shape[3])
        batch, heads, queries = (
            size > 1 and step != 0 for size, step in zip(mask.shape[:3], mask.stride(), strict=False)
        )
        varies = batch, heads, queries
    sets: Any = () if blocks is None else tuple(map(tuple, blocks))
    tiled = bias is not None and not (is_float32 or uniform) and _is_tiled(bias)
    layout = ScoreLayout(rows_a_slot, is_float32, strided, paired, uniform, tiled, gradient, keys, varies, *sets)
    return layout if tables is None or tables.intervals is None else layout._replace(intervals=True)


def half_entries(inputs: AttentionInputs) -> int:
    """Blocks of 64 x 64 that a block mask's half columns list, rounded up (``plan.rounded_up``); 0 of other calls."""
    tables = inputs.block_mask
    if tables is None or tables.columns is None or not tables.has_half_columns:
        return 0
    return rounded_up(max(1, len(tables.columns.entries)))


def as_four(x: Tensor) -> tuple[int, ...]:
    """Shape of a mask or bias, with all four dimensions."""
    return (*[1] * (4 - x.ndim), *x.shape)


def _is_paired(x: Tensor) -> bool:
    # Kernels compute addresses of rows behind the last one, too.
    return x.data_ptr() % (2 * x.element_size()) == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])


def _is_tiled(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and fits(x.stride()) and x.shape[-1] % 8 == 0


def _gradient_of(bias: Tensor, wanted: Tensor) -> BiasGradientOf:
    """Finds what shares an element of ``wanted``, the user's bias, which ``bias`` has for every score."""
    queries, keys = as_four(wanted)[2:]
    if math.prod(wanted.shape) == math.prod(bias.shape):
        return "scores"
    if keys < bias.shape[3]:
        return "other"
    return "keys" if queries < bias.shape[2] else "shared"
