"""Recipes of ``docs/selected-blocks.md`` against dense attention, a query at a time by the papers' definitions."""

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import sparse_attention

PAGE = Path(__file__).parents[2] / "docs" / "selected-blocks.md"
BATCH, SEQLEN, HEADS, HEADS_K, D, BLOCK = 2, 75, 4, 2, 6, 16


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    """Functions of the page, by their names."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def leaves(*shapes: Sequence[int]) -> list[Tensor]:
    """Random tensors; in float64 both sides select the same blocks."""
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def qkv(heads_k: int = HEADS_K) -> list[Tensor]:
    return leaves((BATCH, SEQLEN, HEADS, D), *[(BATCH, SEQLEN, heads_k, D)] * 2)


def assert_same(recipe: Callable[..., Tensor], book: Callable[..., Tensor], x: list[Tensor]) -> None:
    """Out and all gradients."""
    out, expected = recipe(*x), book(*x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    dout = torch.randn_like(out)
    for got, grad in zip(torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout), strict=True):
        torch.testing.assert_close(got, grad, rtol=0, atol=1e-11)


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One query (d) and its keys (n, d): out and lse."""
    scores = k @ q * D**-0.5
    return scores.softmax(0) @ v, scores.logsumexp(0)


def by_query(one: Callable[[int, int, int], Tensor], heads: int = HEADS, seqlen: int = SEQLEN) -> Tensor:
    """(batch, seqlen, heads, ...) of what a function gives for each batch entry, query and head."""
    found = [[[one(b, i, h) for h in range(heads)] for i in range(seqlen)] for b in range(BATCH)]
    return torch.stack([torch.stack([torch.stack(row) for row in rows]) for rows in found])


def chosen(i: int, scores: Sequence[Tensor], top: int) -> list[int]:
    """Keys up to query i of its own block and of the best ones before it."""
    own = i // BLOCK
    best = sorted(range(own), key=lambda n: -scores[n].item())[: top - 1]
    return [j for j in range(i + 1) if j // BLOCK in {own, *best}]


def mean(x: Tensor, b: int, n: int, h: int, block: int = BLOCK) -> Tensor:
    return x[b, n * block : (n + 1) * block, h].mean(0)


def test_the_example_has_the_functions_of_the_page() -> None:
    for function in (sparse_attention.means, sparse_attention.own_and_best, sparse_attention.nsa_branches):
        assert inspect.getsource(function) in PAGE.read_text()


@pytest.mark.parametrize("top", [1, 3, 9])
def test_moba(recipes: dict[str, Any], top: int) -> None:
    def book(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def one(b: int, i: int, h: int) -> Tensor:
            g = h // (HEADS // HEADS_K)
            keys = chosen(i, [mean(k, b, n, g) @ q[b, i, h] for n in range(i // BLOCK)], top)
            return attend(q[b, i, h], k[b, keys, g], v[b, keys, g])[0]

        return by_query(one)

    assert_same(lambda *x: recipes["moba"](*x, block=BLOCK, top=top), book, qkv())


def nsa_book(q: Tensor, k: Tensor, v: Tensor, top: int, window: int) -> tuple[Tensor, Tensor]:
    """The three branches a query at a time, out and lse."""

    def one(b: int, i: int, h: int) -> Tensor:
        group = HEADS // HEADS_K
        g, over = h // group, (i + 1) // BLOCK
        short_k, short_v = ([mean(x, b, n, g) for n in range(over)] for x in (k, v))
        branches = [(q.new_zeros(D), q.new_tensor(-torch.inf))]
        p = q.new_zeros(over)
        if over:
            branches = [attend(q[b, i, h], torch.stack(short_k), torch.stack(short_v))]
            for other in range(g * group, (g + 1) * group):
                p = p + (torch.stack(short_k) @ q[b, i, other] * D**-0.5).softmax(0)
        for keys in (chosen(i, list(p), top), list(range(max(0, i - window + 1), i + 1))):
            branches.append(attend(q[b, i, h], k[b, keys, g], v[b, keys, g]))
        return torch.stack([torch.cat((out, lse[None])) for out, lse in branches])

    both = by_query(one).movedim(3, 0)
    return both[..., :-1], both[..., -1]


@pytest.mark.parametrize("merged_by", ["gates", "lse and gates"])
def test_nsa(recipes: dict[str, Any], merged_by: str) -> None:
    def merge(branches: tuple[Tensor, Tensor], gates: Tensor) -> Tensor:
        outs, lses = branches
        if merged_by == "gates":
            return (gates.sigmoid()[..., None] * outs).sum(0)
        return ((lses + gates.sigmoid().log()).softmax(0)[..., None] * outs).sum(0)

    def recipe(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return merge(recipes["nsa_branches"](q, k, v, block=BLOCK, top=3, window=20), gates)

    def book(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return merge(nsa_book(q, k, v, 3, 20), gates)

    assert_same(recipe, book, [*qkv(), *leaves((3, BATCH, SEQLEN, HEADS))])


def test_msa(recipes: dict[str, Any]) -> None:
    index_q, index_k = torch.randn(BATCH, SEQLEN, HEADS_K, 3), torch.randn(BATCH, SEQLEN, 3)

    def book(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def one(b: int, i: int, h: int) -> Tensor:
            g = h // (HEADS // HEADS_K)
            scores = index_k[b] @ index_q[b, i, g]
            best = [scores[n * BLOCK : (n + 1) * BLOCK].max() for n in range(i // BLOCK)]
            keys = chosen(i, best, 3)
            return attend(q[b, i, h], k[b, keys, g], v[b, keys, g])[0]

        return by_query(one)

    assert_same(lambda *x: recipes["msa"](*x, index_q, index_k, block=BLOCK, top=3), book, qkv())


def test_vsa(recipes: dict[str, Any]) -> None:
    blocks = 4
    rows = (BATCH, 64 * blocks, HEADS, D)

    def book(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        def block(b: int, m: int, h: int) -> Tensor:
            mean_q = mean(q, b, m, h, 64)
            mean_k, mean_v = (torch.stack([mean(x, b, n, h, 64) for n in range(blocks)]) for x in (k, v))
            best = (mean_k @ mean_q).argsort(descending=True)[:2]
            keys = [j for j in range(64 * blocks) if j // 64 in best]
            queries = slice(64 * m, 64 * (m + 1))
            fine = (q[b, queries, h] @ k[b, keys, h].mT * D**-0.5).softmax(-1) @ v[b, keys, h]
            return gates[0, b, queries, h] * attend(mean_q, mean_k, mean_v)[0] + gates[1, b, queries, h] * fine

        return by_query(block, seqlen=blocks).transpose(2, 3).flatten(1, 2)

    assert_same(lambda *x: recipes["vsa"](*x, top=2), book, leaves(rows, rows, rows, (2, *rows)))
