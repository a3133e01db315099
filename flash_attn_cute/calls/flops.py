"""FLOP of attention: two products of each query with each key that it sees, five in the backward pass.

Column sums take one. That is what kernels compute, but for masks and block masks, which count as if they hid nothing.
Key blocks that each query selects count as if all were different and within the window.
``torch.utils.flop_counter`` counts hidden keys of PyTorch's own attention, too: twice as many under a causal mask.
"""

from itertools import zip_longest

from torch import Tensor

from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.lengths import read_sequences
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec


def forward(spec: AttentionSpec, inputs: AttentionInputs) -> int:
    """FLOP of the forward pass. The lengths of packed sequences are read, or else assumed as ``_lengths`` says."""
    return 2 * _pairs(spec, inputs) * (spec.head_dim + spec.head_dim_v)


def backward(spec: AttentionSpec, inputs: AttentionInputs) -> int:
    """FLOP of the backward pass, in which scores are computed again."""
    return 2 * _pairs(spec, inputs) * (3 * spec.head_dim + 2 * spec.head_dim_v)


def column_sums(spec: AttentionSpec, inputs: AttentionInputs) -> int:
    """FLOP of column sums, for which scores alone are computed."""
    return 2 * _pairs(spec, inputs) * spec.head_dim


def _pairs(spec: AttentionSpec, inputs: AttentionInputs) -> int:
    pairs = 0
    for q, k in zip(*_lengths(inputs), strict=True):
        visible = Band.of((spec.window_left, spec.window_right), q, k).area(0, q, k)
        if inputs.selected is not None:
            visible = min(visible, q * inputs.selected.shape[-1] * spec.selection_block)
        pairs += visible
    return spec.nheads * pairs


def _lengths(inputs: AttentionInputs) -> tuple[list[int], list[int]]:
    """Rows of queries and of keys of each sequence.

    Where tensors hold no numbers, as on the meta device, slots of a dense batch count as full, and the rows of packed
    sequences as divided among as few as max_seqlen allows.
    """
    offsets = [x for x in inputs[3:7] if x is not None]
    if all(type(x) is Tensor and x.device.type != "meta" for x in offsets):
        rows_q, rows_k = read_sequences(inputs)
        return [rows.length for rows in rows_q], [rows.length for rows in rows_k]
    if not inputs.packed:
        batch = inputs.q.shape[0]
        return [inputs.q.shape[1]] * batch, [inputs.k.shape[1]] * batch
    sides = ((inputs.q.shape[0], inputs.max_seqlen_q), (inputs.k.shape[0], inputs.max_seqlen_k))
    longest = [[bound] * (total // bound) + [total % bound] if bound else [] for total, bound in sides]
    pairs = list(zip_longest(*longest, fillvalue=0))[: offsets[0].shape[0] - 1]
    return [q for q, _ in pairs], [k for _, k in pairs]
