"""Documents, and calls that they are part of: packed in any way, or as the entries of a dense batch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from tests.lib.checks import bitwise_equal

Results = dict[str, Tensor]
Options = dict[str, Any]

LENGTHS = (0, 1, 7, 64, 65, 127, 128, 129, 200, 385, 700)


class Case(NamedTuple):
    """Heads, head dimensions and options that all documents of a test share, and which tensors they have.

    ``bias``: heads of a bias, each document's own; None: there is none.
    """

    heads: tuple[int, int]  # of q, and of k and v
    dims: tuple[int, int]  # columns of q and k, and of v
    options: Options
    sink: bool = False
    bias: int | None = None
    mask: bool = False
    dlse: bool = False


@dataclass(frozen=True)
class Document:
    """A document's own tensors: rows of q, k, v and dout (rows, heads, d), and of scores (heads, queries, keys)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None = None  # (nheads, queries)
    bias: Tensor | None = None
    mask: Tensor | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """How many queries and keys it has."""
        return len(self.q), len(self.k)


def document(
    draw: random.Random,
    case: Case,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, int] | None = None,
) -> Document:
    """A document of given lengths, or of random ones, of queries alone or of both."""
    (nheads, nheads_k), dims = case.heads, case.dims
    if lengths is None:
        queries = draw.choice(LENGTHS)
        lengths = queries, queries if draw.random() < 0.7 else draw.choice(LENGTHS)
    queries, keys = lengths

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    return Document(
        normal(queries, nheads, dims[0]),
        normal(keys, nheads_k, dims[0]),
        normal(keys, nheads_k, dims[1]),
        normal(queries, nheads, dims[1]),
        normal(nheads, queries, dtype=torch.float32) if case.dlse else None,
        normal(case.bias, queries, keys) if case.bias is not None else None,
        normal(nheads, queries, keys) > -0.5 if case.mask else None,
    )


class Place(NamedTuple):
    """A document's rows in a call: of queries and of keys, and of a dense batch its entry."""

    queries: slice
    keys: slice
    entry: int | None = None

    def part_of(self, x: Tensor, name: str) -> Tensor:
        """The document's part of a tensor of the call: q, k, v, dout, out or their gradients, lse, bias or mask."""
        x = x if self.entry is None else x[self.entry]
        if name in ("bias", "mask"):
            keys = self.keys.stop - self.keys.start
            return x[:, self.queries, :keys]
        if name == "lse":
            return x[:, self.queries]
        return x[self.keys if name in ("k", "v") else self.queries]


@dataclass(frozen=True)
class Layout:
    """Places of documents in a call. ``sizes``: rows of queries and keys, packed of all and dense of an entry.

    ``bounds``: max_seqlen_q and max_seqlen_k of a packed call, None of a dense one; its mask and bias have so many
    keys. ``arguments``: lengths, as the call takes them.
    """

    places: list[Place]
    sizes: tuple[int, int]
    bounds: tuple[int, int] | None
    arguments: Options

    def tensor(self, name: str, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Tensors of all documents as one, NaN in the padding; a bias has zeros there, and a mask False."""
        first = parts[0]
        if first is None:
            return None
        rows_q, rows_k = self.sizes
        batch = () if self.bounds else (len(parts),)
        if name in ("bias", "mask"):
            shape = *batch, len(first), rows_q, rows_k if self.bounds is None else self.bounds[1]
        elif name == "lse":
            shape = *batch, len(first), rows_q
        else:
            shape = *batch, rows_k if name in ("k", "v") else rows_q, *first.shape[1:]
        x = first.new_zeros(shape) if name in ("bias", "mask") else first.new_full(shape, torch.nan)
        for place, part in zip(self.places, parts, strict=True):
            assert part is not None
            place.part_of(x, name).copy_(part)
        return x


def int32(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=like.device)


def packing(documents: list[Document], draw: random.Random | None = None) -> Layout:
    """A packed call, its order, padding and bounds drawn, or plainly: one document after the other."""
    order = list(range(len(documents)))
    before, behind, beyond = 0, 0, 0
    if draw is not None:
        draw.shuffle(order)
        before, behind, beyond = draw.choice([0, 5, 130]), draw.choice([0, 40]), draw.choice([0, 1, 300])
    offsets: tuple[list[int], list[int]] = [before], [before]
    places = {}
    for number in order:
        queries, keys = (slice(of[-1], of[-1] + n) for of, n in zip(offsets, documents[number].lengths, strict=True))
        places[number] = Place(queries, keys)
        for of, own in zip(offsets, (queries, keys), strict=True):
            of.append(own.stop + (draw.choice([0, 0, 3, 70]) if draw is not None else 0))
    longest_q, longest_k = (
        max(1, max(lengths) + beyond) for lengths in zip(*(x.lengths for x in documents), strict=True)
    )
    like = documents[0].q
    cu_q, cu_k = (int32(of, like) for of in offsets)
    arguments: Options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q if offsets[0] == offsets[1] else cu_k}
    arguments |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    if draw is not None:
        arguments["seqused_q"], arguments["seqused_k"] = (
            int32([documents[number].lengths[side] for number in order], like) for side in (0, 1)
        )
    sizes = offsets[0][-1] + behind, offsets[1][-1] + behind
    return Layout([places[number] for number in range(len(documents))], sizes, (longest_q, longest_k), arguments)


def batch(documents: list[Document], draw: random.Random | None = None) -> Layout:
    """A dense batch; of documents of one length without padding, unless ``draw`` says how much of it there is."""
    lengths = [x.lengths for x in documents]
    beyond = 0 if draw is None else draw.choice([0, 1, 40])
    sizes = max(q for q, _ in lengths) + beyond, max(k for _, k in lengths) + beyond
    arguments: Options = {}
    if draw is not None or len(set(lengths)) > 1:
        arguments["seqused_q"], arguments["seqused_k"] = (
            int32([pair[side] for pair in lengths], documents[0].q) for side in (0, 1)
        )
    places = [Place(slice(0, q), slice(0, k), number) for number, (q, k) in enumerate(lengths)]
    return Layout(places, sizes, None, arguments)


def results(
    layout: Layout,
    documents: list[Document],
    sink: Tensor | None = None,
    *,
    heard: int | None = None,
    deterministic: bool | str = "invariant",
    **options: Any,
) -> list[Results]:
    """Both passes of documents in one call, and what each of them gets of it.

    Args:
        layout: where they are.
        documents: in the order of the layout's places.
        sink: ``learnable_sink``.
        heard: the number of the only document whose results have a gradient; None: all have.
        deterministic: as the call takes it.
        options: what else the call takes.
    """
    given = {name: layout.tensor(name, [getattr(x, name) for x in documents]) for name in ("q", "k", "v", "bias")}
    leaves = {name: x.requires_grad_() for name, x in (given | {"sink": sink}).items() if x is not None}
    mask = layout.tensor("mask", [x.mask for x in documents])
    others = layout.arguments | options | {"bias": leaves.get("bias"), "mask": mask, "learnable_sink": sink}
    attend: Any = flash_attn_func if layout.bounds is None else flash_attn_varlen_func
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    found = attend(q, k, v, **others, deterministic=deterministic, return_lse=True)
    is_heard = [heard in (None, number) for number in range(len(documents))]
    wanted = [layout.tensor("dout", [x.dout * on for x, on in zip(documents, is_heard, strict=True)])]
    if documents[0].dlse is not None:
        by_lse = [x.dlse * on for x, on in zip(documents, is_heard, strict=True) if x.dlse is not None]
        wanted.append(layout.tensor("lse", by_lse))
    grads = torch.autograd.grad(found[: len(wanted)], list(leaves.values()), wanted)
    tensors = {"out": found[0], "lse": found[1]}
    tensors |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True) if name != "sink"}
    parts = [
        {name: place.part_of(x, name.removeprefix("d")).detach().contiguous() for name, x in tensors.items()}
        for place in layout.places
    ]
    if sink is not None and heard is not None:
        parts[heard]["dsink"] = grads[-1]
    return parts


def assert_same(got: Results, expected: Results, what: object) -> None:
    """Results have the same bits as those expected."""
    differ = [name for name, x in expected.items() if not bitwise_equal(got[name], x)]
    assert not differ, f"{', '.join(differ)} of {what} differ"
