"""Masks of ``scaled_dot_product_attention`` as PyTorch takes them: equal to PyTorch, or refused in one sentence."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flash_attn_cute import flash_attn_func
from flash_attn_cute.integrations.sdpa import scaled_dot_product_attention as sdpa


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (9, 9), (1, 5)], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_sdpa_causal_biases(make: Any, lengths: tuple[int, int], heads: int) -> None:
    """Tensors by class alone: what they store is not initialised."""
    q, k = (torch.randn(2, heads, n, 16, dtype=torch.float64) for n in lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more queries than keys: some see none
        bias = make(*lengths)
    got = sdpa(q, k, k, bias)
    assert type(got) is Tensor
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, bias._materialize())
    torch.testing.assert_close(got, expected.nan_to_num(0.0))


class Meaning(Tensor):
    """A subclass whose functions could do anything."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor):
    """A subclass by name alone."""


def test_subclasses_are_refused_unless_they_are_what_they_store() -> None:
    """Wrong types are refused as masks, and as q, k, v, offsets and the like, in all functions."""
    q = torch.randn(2, 3, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(sdpa(q, q, q, mask.as_subclass(Named)).as_subclass(Tensor), sdpa(q, q, q))
    odd = mask.as_subclass(Meaning)
    message = r"expected a plain tensor, got (Meaning|CausalBias), a subclass .* \.as_subclass\(torch.Tensor\)"
    with pytest.raises(TypeError, match=f"^attn_mask: {message}"):
        sdpa(q, q, q, odd)
    with pytest.raises(TypeError, match=f"^key: {message}"):
        sdpa(q, q.as_subclass(Meaning), q)
    with pytest.raises(TypeError, match=f"bias: {message}"):
        flash_attn_func(q, q, q, bias=causal_upper_left(3, 3))
    with pytest.raises(
        ValueError, match=r"attn_mask: expected a CausalBias of \(5, 5\) rows of query and key, got one"
    ):
        sdpa(q, q, q, causal_lower_right(5, 6))


def test_sdpa_nested_tensors_are_refused() -> None:
    q = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(4, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match="query: expected a dense tensor, got a nested one"):
        sdpa(q, q, q)
