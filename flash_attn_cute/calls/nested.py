"""Jagged nested tensors (``torch.nested``, layout=torch.jagged) as packed sequences: views, and nothing is read.

PyTorch keeps (batch, rows of each, heads, d) as values (total, heads, d) and offsets, which are packed sequences. A few
names with an underscore are the only access to what it knows without asking the device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.problem.spec import Results


class Jagged(NamedTuple):
    """Rows of a nested tensor among its values."""

    offsets: Tensor
    lengths: Tensor | None  # of sequences that end before the next one begins
    bounds: tuple[int | None, int | None]  # on the lengths, from below and above, if they are known

    @classmethod
    def of(cls, x: Any) -> "Jagged":
        """Reads them off a jagged nested tensor."""
        return cls(x.offsets(), x.lengths(), (x._maybe_min_seqlen, x._maybe_max_seqlen))

    def wrap(self, results: Results) -> Results:
        """Results of packed sequences, out (total, ...) and lse (heads, total), as nested tensors of these lengths."""
        return results._replace(out=self._nested(results.out, rows=0), lse=self._nested(results.lse, rows=1))

    def _nested(self, values: Tensor, rows: int) -> Tensor:
        shortest, longest = self.bounds
        return torch.nested.nested_tensor_from_jagged(
            values, self.offsets, self.lengths, jagged_dim=rows + 1, min_seqlen=shortest, max_seqlen=longest
        )


def is_nested(call: AttentionCall) -> bool:
    """Whether some of q, k and v of a dense call are nested, in either layout."""
    return call.bounds is None and any(isinstance(x, Tensor) and x.is_nested for x in call[:3])


def as_packed(call: AttentionCall) -> tuple[AttentionCall, Jagged]:
    """The packed call of the values of nested q, k and v, and q's rows, which the results have, too.

    Bounds are None where PyTorch does not know them.

    Raises:
        TypeError: one of q, k and v that is not nested, or not in the jagged layout.
        ValueError: one of other dimensions, k and v of other offsets, other batch sizes, or seqused.
    """
    q, k, v = call.q, call.k, call.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_jagged(name, x)
    for name in ("seqused_q", "seqused_k"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name}: expected None, as nested tensors know their lengths, got a tensor")
    of_q, of_k = Jagged.of(q), Jagged.of(k)
    if v.offsets() is not of_k.offsets or v.lengths() is not of_k.lengths:
        raise ValueError("v: expected the offsets of k, the same tensor (torch.nested.nested_tensor_from_jagged)")
    if of_q.offsets.shape[0] != of_k.offsets.shape[0]:
        raise ValueError(f"k: expected the batch size of q, {q.shape[0]}, got {k.shape[0]}")
    cu_q, used_q = _in_32_bits(of_q)
    # The same tensor where lengths are the same, as packed calls like it.
    same = of_q.offsets is of_k.offsets and of_q.lengths is of_k.lengths
    cu_k, used_k = (cu_q, used_q) if same else _in_32_bits(of_k)
    packed = call._replace(
        q=q.values(),
        k=k.values(),
        v=v.values(),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        seqused_q=used_q,
        seqused_k=used_k,
        bounds=(of_q.bounds[1], of_k.bounds[1]),
    )
    return packed, of_q


def _check_jagged(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not x.is_nested:
        raise TypeError(f"{name}: expected a jagged nested tensor, as another of q, k and v is one, got a dense one")
    if x.layout is not torch.jagged:
        raise TypeError(f"{name}: expected a nested tensor of layout=torch.jagged, got {x.layout}")
    if x.ndim != 4 or x._ragged_idx != 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name}: expected a nested tensor of shape (batch, rows of each sequence, heads, d), got {tuple(x.shape)}"
        )


def _in_32_bits(jagged: Jagged) -> tuple[Tensor, Tensor | None]:
    lengths = jagged.lengths
    return jagged.offsets.to(torch.int32), None if lengths is None else lengths.to(torch.int32)
