"""A document's results have the same bits wherever it is: alone, among others, under any bound, with padding.

docs/determinism.md has the table of what holds, whose rows name these tests. The choices behind it are those of
``tests/host/test_invariant_plans.py``.
"""

import random
from typing import Any

import pytest
import torch

from flash_attn_cute import BlockMask, flash_attn_func
from tests.lib import checks
from tests.lib.checks import DEVICES, DTYPES, bitwise_equal, hopper_alone, needs_kernels, on_each_backend
from tests.lib.packings import Case, Document, Options, assert_same, batch, document, packing, results

CAUSAL: Options = {"causal": True}
CASES: dict[str, Case] = {
    "full, d64": Case((2, 2), (64, 64), {}),
    "causal, d64": Case((2, 2), (64, 64), CAUSAL),
    "causal, grouped, d128": Case((4, 2), (128, 128), CAUSAL),
    "causal, d128, dlse": Case((2, 2), (128, 128), CAUSAL, dlse=True),
    "full, one key head, sink, d128": Case((8, 1), (128, 128), {}, sink=True),
    "window, d128": Case((2, 2), (128, 128), {"window_size": (90, 20)}),
    "causal window, grouped, d96": Case((4, 2), (96, 96), {"window_size": (70, 0)}),
    "softcap, d64": Case((2, 2), (64, 64), {"softcap": 3.0, **CAUSAL}),
    "scale, d192x128": Case((2, 2), (192, 128), {"softmax_scale": -0.2, **CAUSAL}),
    "causal, grouped, sink, dlse, d256": Case((4, 2), (256, 256), CAUSAL, sink=True, dlse=True),
    "bias, d64": Case((2, 2), (64, 64), CAUSAL, bias=2),
}
# What "invariant" alone promises.
INVARIANT_CASES: dict[str, Case] = {
    "bias of all heads, grouped, d64": Case((4, 2), (64, 64), {}, bias=1),
    "bias, sink, d128": Case((2, 2), (128, 128), CAUSAL, bias=2, sink=True),
    "mask, d64": Case((2, 2), (64, 64), {}, mask=True),
    "mask, bias, causal, grouped, d128": Case((4, 2), (128, 128), CAUSAL, bias=4, mask=True),
}
PROMISES = [
    pytest.param(promise, case, id=f"{promise}-{name}")
    for promise, cases in ((True, CASES), ("invariant", CASES | INVARIANT_CASES))
    for name, case in cases.items()
]


def on(backend: str, case: Case) -> tuple[Case, str, torch.dtype]:
    """A case, where it runs and in which dtype; the portable backend's code does not depend on head dimensions."""
    if backend == "portable":
        case = case._replace(dims=(case.dims[0] // 4, case.dims[1] // 4))
    return case, DEVICES[backend], DTYPES[backend]


def drawn(name: str, number: int) -> random.Random:
    print(f"packing {number}")  # shown where it fails
    return random.Random(f"{checks.fuzz_seed} {name} {number}")


@pytest.mark.parametrize(("promise", "case"), PROMISES)
@on_each_backend
def test_packed_anywhere(backend: str, promise: bool | str, case: Case, repetitions: int) -> None:
    """Alone and among others: in any order, with padding around and bounds beyond the longest, under every feature.

    With ``--repetitions 2000`` about 2,000 packings of each promise are drawn.
    """
    for number in range(max(1, repetitions // len(CASES))):
        draw = drawn(f"{backend} {case}", number)
        documents = [document(draw, *on(backend, case)) for _ in range(draw.randint(2, 6))]
        sink = torch.randn(case.heads[0]).to(documents[0].q.device) if case.sink else None
        given: Options = {"backend": backend, "deterministic": promise, **case.options}
        layouts = [packing(documents, draw)]
        if promise == "invariant":
            layouts.append(batch(documents, draw))
        together = [results(layout, documents, sink, **given) for layout in layouts]
        for i, one in enumerate(documents):
            expected = results(packing([one]), [one], sink, **given)[0]
            for got in together:
                assert_same(got[i], expected, f"document {i} of {one.lengths}")
        if sink is not None and promise == "invariant":
            i = draw.randrange(len(documents))
            expected = results(packing([documents[i]]), [documents[i]], sink, heard=0, **given)[0]
            for layout in layouts:
                assert_same(results(layout, documents, sink, heard=i, **given)[i], expected, f"dsink of document {i}")


def alike(draw: random.Random, rows: int, case: Case, backend: str) -> list[Document]:
    """Three documents of so many queries and keys."""
    return [document(draw, *on(backend, case), (rows, rows)) for _ in range(3)]


DENSE = ["full, d64", "causal, grouped, d128", "scale, d192x128", "causal, grouped, sink, dlse, d256"]


@pytest.mark.parametrize(
    ("promise", "case"),
    [
        *((True, CASES[name]) for name in DENSE),
        *(("invariant", case) for case in (CASES | INVARIANT_CASES).values()),
    ],
    ids=[*DENSE, *(f"invariant-{name}" for name in CASES | INVARIANT_CASES)],
)
@on_each_backend
def test_entries_of_a_dense_batch(backend: str, promise: bool | str, case: Case, repetitions: int) -> None:
    """An entry has the bits of a document that is packed alone."""
    drawn_lengths = random.Random(0).choices(range(2, 900), k=max(0, repetitions // 100))
    for rows in (1, 7, 129, 385 if backend == "portable" else 700, *drawn_lengths):
        documents = alike(random.Random(rows), rows, case, backend)
        sink = torch.randn(case.heads[0]).to(documents[0].q.device) if case.sink else None
        given: Options = {"backend": backend, "deterministic": promise, **case.options}
        for i, got in enumerate(results(batch(documents), documents, sink, **given)):
            alone = results(packing([documents[i]]), [documents[i]], sink, **given)[0]
            assert_same(got, alone, (i, rows))


@hopper_alone("whose dense causal heads end with their first tiles")
def test_dense_causal_batches_are_another_order() -> None:
    """Where the promise of True ends: dq of heads not grouped, up to d = 128, is summed the other way round."""
    case = CASES["causal, d64"]
    documents = alike(random.Random(0), 700, case, "sm90")
    given: Options = {"backend": "sm90", "deterministic": True, **CAUSAL}
    got = results(batch(documents), documents, **given)[0]
    alone = results(packing(documents[:1]), documents[:1], **given)[0]
    assert_same({n: got[n] for n in ("out", "lse")}, {n: alone[n] for n in ("out", "lse")}, "forward")
    assert not bitwise_equal(got["dq"], alone["dq"])


@needs_kernels
@pytest.mark.parametrize("promise", [True, "invariant"])
def test_few_rows_beside_many(promise: bool | str) -> None:
    """Heads of a group share a tile where all documents are short, and do not beside a longer one."""
    draw, case = random.Random(1), Case((8, 1), (128, 128), {})
    few, long = alike(draw, 60, case, "sm90"), document(draw, *on("sm90", case), (300, 300))
    for options in ({}, CAUSAL):
        given: Options = {"backend": "sm90", "deterministic": promise, **options}
        alone = results(packing(few), few, **given)
        beside = results(packing([*few, long]), [*few, long], **given)
        for number, expected in enumerate(alone):
            assert_same(beside[number], expected, number)


@on_each_backend
def test_block_masks_are_refused(backend: str) -> None:
    """Blocks are counted from the first row of all. One that is a window is none, and neither are documents."""
    one = document(random.Random(0), *on(backend, Case((2, 2), (64, 64), {})), (300, 300))
    given: dict[str, Any] = {"backend": backend, "deterministic": "invariant"}
    q, k, v = (x[None] for x in (one.q, one.k, one.v))
    blocks = BlockMask.from_dense(torch.rand(300, 300, device=q.device) < 0.9)
    with pytest.raises(ValueError, match='block_mask: expected None, a window or documents with deterministic="inv'):
        flash_attn_func(q, k, v, block_mask=blocks, **given)
    window = flash_attn_func(q, k, v, block_mask=BlockMask.causal(300, 300), **given)
    assert bitwise_equal(window, flash_attn_func(q, k, v, causal=True, **given))


SHORT = [slice(0, 50), slice(50, 57), slice(57, 177), slice(177, 240)]  # rows of documents


@on_each_backend
def test_documents_of_a_block_mask(backend: str) -> None:
    """Lists would be faster where documents are short, or rows of entries apart in memory. They cannot promise it."""
    one = document(random.Random(0), *on(backend, Case((2, 2), (64, 64), {})), (240, 240))
    given: dict[str, Any] = {"backend": backend, "deterministic": "invariant"}
    alone = [flash_attn_func(*(x[None, rows] for x in (one.q, one.k, one.v)), **given)[0] for rows in SHORT]
    ids = torch.cat([torch.full((rows.stop - rows.start,), i) for i, rows in enumerate(SHORT)]).to(one.q.device)
    twice = [x[:, None].expand(-1, 2, -1, -1).contiguous().transpose(0, 1) for x in (one.q, one.k, one.v)]
    mask = BlockMask.documents(ids.expand(2, -1))
    for entry in flash_attn_func(*twice, block_mask=mask, **given):
        assert all(bitwise_equal(entry[rows], expected) for rows, expected in zip(SHORT, alone, strict=True))
    beside: tuple[Options, ...] = (
        {"bias": torch.zeros(240, device=ids.device)},
        {"seqused_k": torch.full_like(ids[:2], 9).int()},
    )
    for options in beside:
        with pytest.raises(ValueError, match="neither beside seqused, nor documents beside mask or bias"):
            flash_attn_func(*twice, block_mask=mask, **given | options)


def test_compiled_and_nested() -> None:
    """The keyword goes with a call through torch.compile and nested tensors."""
    documents = [torch.randn(rows, 2, 16) for rows in (50, 7, 90)]
    given: dict[str, Any] = {"causal": True, "deterministic": "invariant"}
    nested = torch.nested.nested_tensor(documents, layout=torch.jagged)
    together = flash_attn_func(nested, nested, nested, **given).unbind()
    attend: Any = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    for one, got in zip(documents, together, strict=True):
        alone = flash_attn_func(one[None], one[None], one[None], **given)[0]
        assert bitwise_equal(got, alone)
        assert bitwise_equal(attend(one[None], one[None], one[None], **given)[0], alone)


@needs_kernels
@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (16, 1)], ids=["ungrouped", "group of 8", "group of 16"])
@pytest.mark.parametrize("d", [64, 128])
def test_one_query_over_a_cache(d: int, heads: tuple[int, int]) -> None:
    """Out and lse of a row of a causal call, and of its query alone over the keys that it sees."""
    one = document(random.Random(d), *on("sm90", Case(heads, (d, d), {})), (700, 700))
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
