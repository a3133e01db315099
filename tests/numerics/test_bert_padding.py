"""Padded batches unpadded and padded again, as ``flash_attn.bert_padding`` does."""

import sys

import pytest
import torch

from flash_attn_cute import flash_attn_func
from flash_attn_cute.integrations import bert_padding
from flash_attn_cute.integrations.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn_cute.integrations.flash_attn import flash_attn_varlen_func
from tests.lib.refusals import assert_refused, refusals

MASK = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
UNUSED = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
@pytest.mark.parametrize("unused", [None, UNUSED])
def test_rows_go_there_and_back(dtype: torch.dtype, unused: torch.Tensor | None) -> None:
    """Padding that holds NaN reaches nothing, gradients included."""
    kept = MASK.bool() if unused is None else (MASK + unused).bool()
    x = torch.randn(3, 4, 2, 5).masked_fill(~kept[..., None, None], torch.nan).requires_grad_()
    masks = [MASK.to(dtype)] if unused is None else [MASK.to(dtype), unused.to(dtype)]
    rows, indices, offsets, longest, used = unpad_input(x, *masks)
    lengths = kept.sum(1)
    assert torch.equal(rows, x[kept])
    assert torch.equal(indices, kept.flatten().nonzero().flatten())
    assert offsets.dtype == used.dtype == torch.int32
    assert offsets.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert longest == int(lengths.max())
    assert used.tolist() == [2, 2, 0]

    back = pad_input(rows, indices, 3, 4)
    assert torch.equal(back, x.detach().masked_fill(~kept[..., None, None], 0))
    weights = torch.randn_like(back)
    (back * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights.masked_fill(~kept[..., None, None], 0))


def test_attention_between_the_two() -> None:
    q, k, v = (torch.randn(3, 4, 2, 8, requires_grad=True) for _ in range(3))
    (pq, indices, offsets, longest, _), (pk, *_), (pv, *_) = (unpad_input(x, MASK) for x in (q, k, v))
    packed = flash_attn_varlen_func(pq, pk, pv, offsets, offsets, longest, longest)
    assert isinstance(packed, torch.Tensor)
    out = pad_input(packed, indices, 3, 4)
    expected = flash_attn_func(q, k, v, mask=MASK.bool()[:, None, None])
    real = MASK.bool()
    torch.testing.assert_close(out[real], expected[real])
    assert (out[~real] == 0).all()


def test_empty_batches() -> None:
    rows, indices, offsets, longest, used = unpad_input(torch.randn(0, 4, 2), torch.ones(0, 4))
    assert (rows.shape, indices.shape, offsets.tolist(), longest, used.shape) == ((0, 2), (0,), [0], 0, (0,))
    assert pad_input(rows, indices, 0, 4).shape == (0, 4, 2)


X, ROWS, WRONG = torch.zeros(3, 4, 2), torch.zeros(2, 2), [1]
LENGTHS = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]])
put, concatenated = bert_padding.index_put_first_axis, bert_padding.unpad_input_for_concatenated_sequences


@refusals("""
unpad_input(X, torch.ones(3, 5))
    ValueError: attention_mask: expected the shape (batch, seqlen) of hidden_states, (3, 4), got shape (3, 5)
unpad_input(X, MASK, torch.ones(4))
    ValueError: unused_mask: expected the shape (batch, seqlen) of hidden_states, (3, 4), got shape (4,)
unpad_input(X[0, :, 0], MASK)
    ValueError: hidden_states: expected shape (batch, seqlen, ...), got shape (4,)
unpad_input(X, MASK.to("meta"))
    ValueError: attention_mask: expected a tensor on the device of hidden_states, cpu, got one on meta
unpad_input(X, MASK.double() - 1)
    ValueError: attention_mask: expected 1 = real and 0 = padding, got numbers below 0
unpad_input(WRONG, MASK)
    TypeError: hidden_states: expected a torch.Tensor, got list
unpad_input(X, WRONG)
    TypeError: attention_mask: expected a torch.Tensor, got list
pad_input(ROWS, WRONG, 3, 4)
    TypeError: indices: expected a torch.Tensor, got list
index_first_axis(WRONG, MASK)
    TypeError: input: expected a torch.Tensor, got list
index_first_axis(torch.zeros(()), MASK)
    ValueError: input: expected shape (rows, ...), got shape ()
index_first_axis(ROWS[:0], torch.arange(1))
    ValueError: indices: expected none, as there are no rows, got 1
index_first_axis(ROWS, torch.arange(1, device="meta"))
    ValueError: indices: expected a tensor on the device of input, cpu, got one on meta
pad_input(torch.zeros(5, 2), torch.arange(4), 3, 4)
    ValueError: indices: expected shape (5,), got shape (4,)
pad_input(ROWS, torch.arange(2), 3.0, 4)
    TypeError: batch: expected an int, got 3.0
pad_input(ROWS, torch.arange(2), 3, None)
    TypeError: seqlen: expected an int, got None
put(ROWS, torch.arange(2), -1)
    ValueError: first_axis_dim: expected at least 0, got -1
put(ROWS, torch.zeros(3), 6)
    ValueError: indices: expected shape (2,), got shape (3,)
concatenated(X, torch.zeros(3, 5))
    ValueError: attention_mask_in_length: expected the shape (batch, seqlen) of hidden_states, (3, 4), got shape (3, 5)
concatenated(X, LENGTHS * 2)
    ValueError: attention_mask_in_length: expected lengths of 0 or more that sum up to 4 at the most in each entry, got
    sums of up to 8, and 0
concatenated(X, LENGTHS - 1)
    ValueError: attention_mask_in_length: ... got sums of up to 0, and -1
""")
def test_refused(call: str, error: str) -> None:
    assert_refused(call, error, globals())


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (torch.tensor([0, 5]), ValueError, "indices: expected 0 to 4, got 0 to 5"),
        (torch.tensor([-1, 4]), ValueError, "indices: expected 0 to 4, got -1 to 4"),
        (torch.ones(2), TypeError, "indices: expected int64 or int32, got torch.float32"),
        (torch.ones(2, 1, dtype=torch.int64), ValueError, r"indices: expected shape \(.*\), got shape \(2, 1\)"),
    ],
)
def test_wrong_indices(indices: torch.Tensor, error: type[Exception], message: str) -> None:
    for call in (
        lambda: index_first_axis(torch.zeros(5, 2), indices),
        lambda: bert_padding.index_first_axis_residual(torch.zeros(5, 2), indices),
        lambda: bert_padding.index_put_first_axis(torch.zeros(2, 2), indices, 5),
        lambda: pad_input(torch.zeros(2, 2), indices, 1, 5),
    ):
        with pytest.raises(error, match=message):
            call()


def test_indices_of_32_bits() -> None:
    indices = torch.tensor([3, 1], dtype=torch.int32)
    rows = torch.randn(2, 3)
    assert torch.equal(index_first_axis(pad_input(rows, indices, 1, 5)[0], indices), rows)


@pytest.mark.parametrize(
    "lengths", [[[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], [[0] * 6] * 3], ids=str
)
def test_concatenated_sequences(lengths: list[list[int]]) -> None:
    """Sequences one behind another in each entry, padding at its end; back by ``index_put_first_axis``."""
    x = torch.randn(3, 6, 2, dtype=torch.float64, requires_grad=True)
    table = torch.tensor(lengths)
    rows, indices, offsets, longest = bert_padding.unpad_input_for_concatenated_sequences(x, table)
    flat = [n for entry in lengths for n in entry if n]
    assert offsets.dtype == torch.int32
    assert offsets.diff().tolist() == flat
    assert longest == max(flat, default=0)
    real = torch.cat([x[i, : sum(entry)] for i, entry in enumerate(lengths)])
    assert torch.equal(rows, real)
    back = bert_padding.index_put_first_axis(rows, indices, 18).view(3, 6, 2)
    seen = torch.arange(6) < table.sum(1, keepdim=True)
    assert torch.equal(back, x.where(seen[..., None], torch.zeros(())))
    back.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * back.detach())


def test_residual_rows() -> None:
    x, indices = torch.randn(5, 3), torch.tensor([4, 0])
    rows, same = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices])
    assert same is x


def test_rearrange_is_einops_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without einops the module is there, and says what is missing."""
    pytest.importorskip("einops", reason="rearrange hands on to einops")
    assert bert_padding.rearrange(torch.zeros(2, 3, 4), "b s d -> (b s) d").shape == (6, 4)
    monkeypatch.setitem(sys.modules, "einops", None)
    with pytest.raises(ImportError, match="rearrange: expected einops to be installed"):
        bert_padding.rearrange(torch.zeros(2, 3), "a b -> b a")
