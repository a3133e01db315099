"""Masks and biases of models on every backend, without tensors of the scores' size where there is a way."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from tests.lib.checks import DEVICES, DTYPES, assert_close, on_each_backend, packed_or_dense


def alibi(slopes: Tensor, seqlen_k: int) -> Tensor:
    """(nheads, 1, seqlen_k): ALiBi under causal attention, for a dense batch and for packed sequences.

    ALiBi subtracts slope * (i - j). What is the same for all keys of a query does not change its weights, so that
    slope * j is left; counted from the last key, the nearest ones have the smallest numbers.
    """
    keys = torch.arange(1 - seqlen_k, 1, device=slopes.device)
    return (slopes.float()[:, None] * keys)[:, None]


def t5_bias(table: Tensor, seqlen_q: int, seqlen_k: int, longest: int = 128) -> Tensor:
    """(1, nheads, seqlen_q, seqlen_k): T5's relative positions of an encoder, differentiable in the table.

    The table (buckets, nheads) has a half for keys behind the query and one for those before it. Half of either are for
    distances of their own, the others grow with the logarithm up to the longest distance. What comes out has heads next
    to each other in memory, and may stay so.
    """
    queries = torch.arange(seqlen_q, device=table.device)[:, None]
    distance = torch.arange(seqlen_k, device=table.device) - queries
    half = table.shape[0] // 2
    exact = half // 2
    far = (distance.abs().clamp(min=1) / exact).log() / torch.tensor(longest / exact).log() * (half - exact)
    bucket = torch.where(distance.abs() < exact, distance.abs(), (exact + far.long()).clamp(max=half - 1))
    return table[bucket + half * (distance > 0)].permute(2, 0, 1)[None]


def key_padding_mask(lengths: Tensor, seqlen_k: int) -> Tensor:
    """(batch, 1, 1, seqlen_k): the first keys of each entry are real. ``seqused_k`` says the same."""
    return (torch.arange(seqlen_k, device=lengths.device) < lengths[:, None])[:, None, None]


def prefix_lm_mask(prefixes: Tensor, seqlen: int) -> Tensor:
    """(batch, 1, seqlen, seqlen): all see the prefix of their entry, and behind it what came before."""
    i = torch.arange(seqlen, device=prefixes.device)
    return (i <= i[:, None]) | (i < prefixes[:, None, None, None])


def triangle_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, real: Tensor, **options: Any) -> Tensor:
    """Attention within each row of a pair representation (rows, tokens, heads, d): the rows are the batch.

    The bias (heads, tokens, tokens) is the same for every row, and ``real`` (rows, tokens) says which keys there are.
    """
    out: Tensor = flash_attn_func(q, k, v, bias=bias[None], mask=real[:, None, None], **options)
    return out


def pair_bias(pairs: Tensor, weight: Tensor) -> Tensor:
    """(1, heads, tokens, tokens) from a pair representation (tokens, tokens, channels): one for the whole batch.

    What the projection gives has heads next to each other in memory, and may stay so.
    """
    return (pairs @ weight).permute(2, 0, 1)[None]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, visible: Tensor) -> Tensor:
    """By the book; bias and visible broadcast to (batch, heads, queries, keys)."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    weights = torch.where(visible, scores, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v)


def assert_same_function(recipe: Callable[..., Tensor], book: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
    """A recipe and what it stands for: out and all gradients, by the rule of ``assert_close``."""
    dtype = leaves[0].dtype
    dout = torch.randn_like(leaves[0])
    results = []
    for function, each in ((recipe, None), (book, torch.float64), (book, dtype)):
        own = [x.detach().to(each or x.dtype).requires_grad_() for x in leaves]
        out = function(*own)
        results.append((out, *torch.autograd.grad(out, own, dout.to(out.dtype))))
    largest = max(x.abs().max().item() for x in results[1])
    for index, (got, expected, low) in enumerate(zip(*results, strict=True)):
        name = f"gradient {index}" if index else "out"
        assert_close(name, got, expected, low, 2.0, max(1.0, largest if index else 1.0))


def rows(backend: str, *shape: int) -> list[Tensor]:
    """Q, k and v of a shape, on the device and in the dtype of a backend."""
    return [torch.randn(shape, device=DEVICES[backend], dtype=DTYPES[backend]) for _ in range(3)]


@packed_or_dense
@on_each_backend
def test_alibi(backend: str, packed: bool) -> None:
    """One row of numbers a head gives what ALiBi's whole matrix gives, with fewer queries than keys, too."""
    device = DEVICES[backend]
    slopes = 2.0 ** -torch.arange(2, 10, 2, device=device)
    seqlen_q, seqlen_k = (300, 300) if packed else (140, 300)
    q, k, v = (x[:, :rows_of] for x, rows_of in zip(rows(backend, 2, 300, 4, 64), (seqlen_q, 300, 300), strict=True))
    distance = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q - torch.arange(300, device=device)
    whole = (-slopes[:, None, None] * distance)[None]

    def recipe(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = alibi(slopes, seqlen_k)
        assert bias.shape == (4, 1, seqlen_k)
        if not packed:
            one: Tensor = flash_attn_func(q, k, v, causal=True, bias=bias, backend=backend)
            return one
        cu = torch.tensor([0, 300, 600], dtype=torch.int32, device=device)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out: Tensor = flash_attn_varlen_func(q, k, v, cu, cu, 300, 300, causal=True, bias=bias, backend=backend)
        return out.unflatten(0, (2, 300))

    def book(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q, k, v, whole.to(torch.promote_types(q.dtype, torch.float32)), distance >= 0)

    assert_same_function(recipe, book, (q, k, v))


@on_each_backend
def test_t5_buckets(backend: str) -> None:
    """Against a loop over distances."""
    table = torch.randn(32, 4, device=DEVICES[backend], dtype=DTYPES[backend])
    places = torch.arange(32, device=table.device, dtype=torch.float64)[:, None].expand(32, 4)
    buckets = t5_bias(places, 200, 170)[0, 0]
    assert buckets[9, :10].tolist() == [8, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert buckets[0, [1, 7, 8, 11, 12, 127, 128, 169]].tolist() == [17, 23, 24, 24, 25, 31, 31, 31]
    assert (buckets[1:, 1:] == buckets[:-1, :-1]).all()
    assert (buckets[0].diff() >= 0)[1:].all()

    def recipe(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, softmax_scale=1.0, bias=t5_bias(table, 200, 200), backend=backend)
        return out

    def book(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        everything = torch.ones(200, 200, dtype=torch.bool, device=q.device)
        places = torch.arange(32, device=q.device, dtype=torch.float64)[:, None].expand(32, 4)
        each = t5_bias(places, 200, 200)[0, 0].long()
        bias = torch.stack([table[each, head] for head in range(4)])[None]
        return plain_attention(q * q.shape[-1] ** 0.5, k, v, bias, everything)

    q, k, v = rows(backend, 2, 200, 4, 64)
    assert_same_function(recipe, book, (q / 8, k, v, table))


@on_each_backend
def test_key_padding(backend: str) -> None:
    lengths = torch.tensor([1, 129, 200], dtype=torch.int32, device=DEVICES[backend])
    q, k, v = rows(backend, 3, 200, 4, 64)
    real = torch.arange(200, device=q.device) < lengths[:, None]

    def recipe(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, mask=key_padding_mask(lengths, 200), backend=backend)
        return out

    def shorter(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, seqused_k=lengths, backend=backend)
        return out

    def book(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q, k, v, q.new_zeros(()), real[:, None, None])

    for each in (recipe, shorter):
        assert_same_function(each, book, (q, k, v))


@on_each_backend
def test_prefix_lm(backend: str) -> None:
    prefixes = torch.tensor([0, 5, 128, 150], device=DEVICES[backend])
    visible = torch.tensor(
        [[[j <= i or j < prefix for j in range(150)] for i in range(150)] for prefix in prefixes.tolist()],
        device=prefixes.device,
    )

    def recipe(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, mask=prefix_lm_mask(prefixes, 150), backend=backend)
        return out

    def book(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q, k, v, q.new_zeros(()), visible[:, None])

    assert_same_function(recipe, book, rows(backend, 4, 150, 4, 64))


@pytest.mark.parametrize("head_dim", [32, 64])
@on_each_backend
def test_triangle_attention(backend: str, head_dim: int) -> None:
    """The batch has as many rows as tokens, of which the last are padding."""
    tokens = 130 if backend == "sm90" else 40
    q, k, v = rows(backend, tokens, tokens, 4, head_dim)
    bias = torch.randn(4, tokens, tokens, device=q.device, dtype=q.dtype)
    real = torch.rand(tokens, tokens, device=q.device) < 0.9
    real[:, 0], real[:, -5:] = True, False

    def recipe(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return triangle_attention(q, k, v, bias, real, backend=backend)

    def book(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return plain_attention(q, k, v, bias[None], real[:, None, None])

    assert_same_function(recipe, book, (q, k, v, bias))


@on_each_backend
def test_pair_bias(backend: str) -> None:
    """The gradient goes on to the projection and to the pair representation."""
    q, k, v = rows(backend, 3, 131, 4, 32)
    pairs = torch.randn(131, 131, 8, device=q.device, dtype=q.dtype)
    weight = torch.randn(8, 4, device=q.device, dtype=q.dtype) / 3

    def recipe(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, weight: Tensor) -> Tensor:
        bias = pair_bias(pairs, weight)
        assert bias.stride(-1) == 4
        out: Tensor = flash_attn_func(q, k, v, bias=bias, backend=backend)
        return out

    def book(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, weight: Tensor) -> Tensor:
        bias = torch.einsum("ijc,ch->hij", pairs, weight)[None]
        return plain_attention(q, k, v, bias, torch.ones(131, 131, dtype=torch.bool, device=q.device))

    assert_same_function(recipe, book, (q, k, v, pairs, weight))
