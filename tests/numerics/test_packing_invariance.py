"""A document's results have the same bits wherever it is packed: alone, among others, under any bound, with padding.

docs/determinism.md has the table of what holds, whose rows name these tests.
"""

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from tests.lib.checks import DEVICES, bitwise_equal, draws, hopper_alone, needs_kernels, on_each_backend

Results = dict[str, Tensor]
Options = dict[str, Any]

CAUSAL: Options = {"causal": True}


class Case(NamedTuple):
    """Heads, head dimensions and options that all packed documents of a test share."""

    heads: tuple[int, int]  # of q, and of k and v
    dims: tuple[int, int]  # columns of q and k, and of v
    options: Options
    sink: bool = False
    bias: bool = False


CASES: dict[str, Case] = {
    "full, d64": Case((2, 2), (64, 64), {}),
    "causal, d64": Case((2, 2), (64, 64), CAUSAL),
    "causal, grouped, d128": Case((4, 2), (128, 128), CAUSAL),
    "full, one key head, sink, d128": Case((8, 1), (128, 128), {}, sink=True),
    "window, d128": Case((2, 2), (128, 128), {"window_size": (90, 20)}),
    "causal window, grouped, d96": Case((4, 2), (96, 96), {"window_size": (70, 0)}),
    "softcap, d64": Case((2, 2), (64, 64), {"softcap": 3.0, **CAUSAL}),
    "scale, d192x128": Case((2, 2), (192, 128), {"softmax_scale": -0.2, **CAUSAL}),
    "causal, grouped, sink, d256": Case((4, 2), (256, 256), CAUSAL, sink=True),
    "bias, d64": Case((2, 2), (64, 64), CAUSAL, bias=True),
}
LENGTHS = (0, 1, 7, 64, 65, 127, 128, 129, 200, 385, 700)


@dataclass(frozen=True)
class Document:
    """A document's own tensors, (rows, heads, d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None  # (nheads, queries, keys)


def document(draw: random.Random, case: Case, backend: str) -> Document:
    """A document of random lengths, of queries alone or of both."""
    (nheads, nheads_k), dims = case.heads, case.dims
    queries = draw.choice(LENGTHS)
    keys = queries if draw.random() < 0.7 else draw.choice(LENGTHS)
    device, dtype = DEVICES[backend], torch.float32 if backend == "portable" else torch.bfloat16

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    return Document(
        normal(queries, nheads, dims[0]),
        normal(keys, nheads_k, dims[0]),
        normal(keys, nheads_k, dims[1]),
        normal(queries, nheads, dims[1]),
        normal(nheads, queries, keys) if case.bias else None,
    )


class Place(NamedTuple):
    """A document's number and its rows in a packed call."""

    number: int
    queries: slice
    keys: slice


@dataclass
class Packing:
    """Places of documents, in the order of their rows, and what else a packed call needs of them."""

    places: list[Place]
    offsets: tuple[list[int], list[int]]
    bounds: tuple[int, int]
    behind: int  # rows that follow the last document
    has_padding: bool

    @staticmethod
    def of(documents: list[Document], draw: random.Random | None) -> "Packing":
        """Order, padding and bounds that are drawn, or none."""
        order = list(range(len(documents)))
        before, behind, beyond = 0, 0, 0
        if draw is not None:
            draw.shuffle(order)
            before, behind, beyond = draw.choice([0, 5, 130]), draw.choice([0, 40]), draw.choice([0, 1, 300])
        offsets, places = ([before], [before]), []
        for number in order:
            one = documents[number]
            rows = [slice(of[-1], of[-1] + len(x)) for of, x in zip(offsets, (one.q, one.k), strict=True)]
            places.append(Place(number, *rows))
            for of, own in zip(offsets, rows, strict=True):
                of.append(own.stop + (draw.choice([0, 0, 3, 70]) if draw is not None else 0))
        bounds = (max(len(getattr(one, name)) for one in documents) + beyond for name in "qk")
        longest_q, longest_k = (max(1, bound) for bound in bounds)
        return Packing(places, offsets, (longest_q, longest_k), behind, draw is not None)

    def rows(self, documents: list[Document], name: str) -> Tensor:
        """A tensor of all documents, NaN in the padding; of a bias zeros."""
        is_of_queries = name in ("q", "dout", "bias")
        total = self.offsets[0 if is_of_queries else 1][-1] + self.behind
        if name == "bias":
            of_first = documents[0].bias
            assert of_first is not None
            bias = of_first.new_zeros(len(of_first), total, self.bounds[1])
            for place in self.places:
                own = documents[place.number].bias
                assert own is not None
                bias[:, place.queries, : own.shape[2]] = own
            return bias
        example: Tensor = getattr(documents[0], name)
        x = example.new_full((total, *example.shape[1:]), torch.nan)
        for place in self.places:
            x[place.queries if is_of_queries else place.keys] = getattr(documents[place.number], name)
        return x

    def lengths(self, device: torch.device) -> Options:
        """Offsets (the same tensor for both sides where it may be), bounds, and real lengths where there is padding."""

        def as_tensor(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        cu_q, cu_k = map(as_tensor, self.offsets)
        found: Options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q if self.offsets[0] == self.offsets[1] else cu_k}
        found |= {"max_seqlen_q": self.bounds[0], "max_seqlen_k": self.bounds[1]}
        if self.has_padding:
            found["seqused_q"] = as_tensor([place.queries.stop - place.queries.start for place in self.places])
            found["seqused_k"] = as_tensor([place.keys.stop - place.keys.start for place in self.places])
        return found


def packed(documents: list[Document], draw: random.Random | None, sink: Tensor | None, **options: Any) -> list[Results]:
    """Both passes of documents in one call, in an order, with padding and under bounds that are drawn, or plainly."""
    packing = Packing.of(documents, draw)
    names = ["q", "k", "v"] if documents[0].bias is None else ["q", "k", "v", "bias"]
    leaves = {name: packing.rows(documents, name).requires_grad_() for name in names}
    given = leaves | packing.lengths(documents[0].q.device) | options
    attend: Any = flash_attn_varlen_func
    out, lse = attend(**given, learnable_sink=sink, deterministic=True, return_lse=True)
    dout = packing.rows(documents, "dout")
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True))
    found: dict[int, Results] = {}
    for number, queries, keys in packing.places:
        own = {"out": out[queries], "lse": lse[:, queries], "dq": grads["q"][queries]}
        own |= {"dk": grads["k"][keys], "dv": grads["v"][keys]}
        if "bias" in grads:
            own["dbias"] = grads["bias"][:, queries, : keys.stop - keys.start]
        found[number] = {name: x.detach().contiguous() for name, x in own.items()}
    return [found[number] for number in range(len(documents))]


def assert_same(got: Results, expected: Results, what: object) -> None:
    differ = [name for name, x in expected.items() if not bitwise_equal(got[name], x)]
    assert not differ, f"{', '.join(differ)} of {what} differ"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@on_each_backend
def test_packed_anywhere(backend: str, case: Case, fuzz_seconds: float) -> None:
    """Alone and among others: in any order, with padding around and bounds beyond the longest, under every feature."""
    for _, draw in draws(f"packing {backend} {case}", fuzz_seconds / len(CASES)):
        documents = [document(draw, case, backend) for _ in range(draw.randint(2, 6))]
        sink = torch.randn(case.heads[0]).to(documents[0].q) if case.sink else None
        options = {"backend": backend, **case.options}
        alone = [packed([one], None, sink, **options)[0] for one in documents]
        for _ in range(2):
            together = packed(documents, draw, sink, **options)
            for number, (got, expected) in enumerate(zip(together, alone, strict=True)):
                assert_same(got, expected, f"document {number}")


def dense(documents: list[Document], **options: Any) -> list[Results]:
    """Both passes of documents of one length, as the entries of a dense batch."""
    q, k, v = (torch.stack([getattr(one, name) for one in documents]).requires_grad_() for name in "qkv")
    attend: Any = flash_attn_func
    out, lse = attend(q, k, v, **options, deterministic=True, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.stack([one.dout for one in documents]))
    names = ("out", "lse", "dq", "dk", "dv")
    return [
        {name: x[i].detach().contiguous() for name, x in zip(names, (out, lse, *grads), strict=True)}
        for i in range(len(documents))
    ]


def of_one_length(draw: random.Random, rows: int, heads: tuple[int, int], d: int, backend: str) -> list[Document]:
    one = document(draw, Case(heads, (d, d), {}), backend)

    def normal(x: Tensor) -> Tensor:
        return torch.randn(rows, *x.shape[1:]).to(x)

    return [replace(one, **{name: normal(getattr(one, name)) for name in ("q", "k", "v", "dout")}) for _ in range(3)]


DENSE: dict[str, tuple[tuple[int, int], int, Options]] = {
    "full": ((2, 2), 64, {}),
    "full, d128": ((2, 2), 128, {}),
    "causal, grouped": ((4, 2), 64, CAUSAL),
    "causal, d256": ((2, 2), 256, CAUSAL),
}


@pytest.mark.parametrize("case", DENSE)
@on_each_backend
def test_entries_of_a_dense_batch(backend: str, case: str) -> None:
    """An entry has the bits of a document that is packed alone."""
    heads, d, options = DENSE[case]
    for rows in (7, 129, 700):
        documents = of_one_length(random.Random(rows), rows, heads, d, backend)
        for number, got in enumerate(dense(documents, backend=backend, **options)):
            alone = packed([documents[number]], None, None, backend=backend, **options)[0]
            assert_same(got, alone, (number, rows))


@hopper_alone("whose dense causal heads end with their first tiles")
def test_dense_causal_batches_are_another_order() -> None:
    """Where the promise ends: dq of heads that are not grouped, up to d = 128, is summed the other way round."""
    documents = of_one_length(random.Random(0), 700, (2, 2), 64, "sm90")
    got = dense(documents, backend="sm90", causal=True)[0]
    alone = packed([documents[0]], None, None, backend="sm90", causal=True)[0]
    assert_same({n: got[n] for n in ("out", "lse")}, {n: alone[n] for n in ("out", "lse")}, "forward")
    assert not bitwise_equal(got["dq"], alone["dq"])


@needs_kernels
def test_few_rows_beside_many() -> None:
    """Heads of a group share a tile where all documents are short, and do not beside a longer one."""
    draw = random.Random(1)
    few = of_one_length(draw, 60, (8, 1), 128, "sm90")
    long = of_one_length(draw, 300, (8, 1), 128, "sm90")
    for options in ({}, CAUSAL):
        alone = packed(few, None, None, backend="sm90", **options)
        beside = packed([*few, long[0]], None, None, backend="sm90", **options)
        for number, expected in enumerate(alone):
            assert_same(beside[number], expected, number)


@needs_kernels
@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (16, 1)], ids=["ungrouped", "group of 8", "group of 16"])
@pytest.mark.parametrize("d", [64, 128])
def test_one_query_over_a_cache(d: int, heads: tuple[int, int]) -> None:
    """Out and lse of a row of a causal call, and of its query alone over the keys that it sees."""
    one = of_one_length(random.Random(d), 700, heads, d, "sm90")[0]
    with torch.no_grad():
        out, lse = flash_attn_func(one.q[None], one.k[None], one.v[None], causal=True, backend="sm90", return_lse=True)
        for row in (0, 1, 63, 64, 127, 128, 191, 300, 699):
            keys = slice(row + 1)
            for k, v in ((one.k[None, keys], one.v[None, keys]), (one.k[None, :], one.v[None, :])):
                cached, cached_lse = flash_attn_func(
                    one.q[None, row : row + 1],
                    k,
                    v,
                    seqused_k=torch.tensor([row + 1], dtype=torch.int32, device="cuda"),
                    causal=True,
                    backend="sm90",
                    return_lse=True,
                )
                assert bitwise_equal(cached[0, 0], out[0, row]), f"out of row {row}"
                assert bitwise_equal(cached_lse[0, :, 0], lse[0, :, row].contiguous()), f"lse of row {row}"
