"""``deterministic="invariant"``: what decides a document's bits is the same in every call that it is part of.

Documents are put into calls of all kinds, which the kernels' backend takes as far as a launch. What it launches is
compared with what it launches for the document alone: all of it, but for what is listed here with the reason why it
changes no bit. So a choice that looks at more than the document fails here, unless it is listed.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.cute.sink_gradients import sum_by_documents
from flash_attn_cute.backends.portable.backend import _runs
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.problem.lengths import Rows
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from tests.lib.launches import Launched
from tests.lib.packings import Case, Document, Layout, Place, batch, document, packing
from tests.lib.specs import spec_of

# Fields of a launch, by name, that differ from call to call and change no bit of a document.
IRRELEVANT = {
    "packed": "where rows are",
    "seqused_q": "which rows there are",
    "seqused_k": "likewise",
    "rows_a_slot": "where elements of mask and bias are",
    "uniform_bias": "how elements of a bias are loaded",
    "paired_bias": "likewise",
    "group": "heads that share a tile: its rows do not look at each other (kernels.sm90.softmax)",
    "num_sms": "how many CTAs there are, not what a tile computes",
    "heads_in_cache": "when tiles are taken, not in which order they add to a block: that of keys (semaphores)",
    "sections": "likewise, unless heads go the other way round, see ``reversed_heads``",
    "num_m_blocks": "sizes of the workspace",
    "num_n_blocks": "likewise",
    "lists_batch": "which tiles share a list of the blocks that they see, not what is in it",
    "lists_heads": "likewise",
    "lists_tiles": "likewise",
    "entries": "where a bias's gradient is",
    "sequences_an_entry": "likewise",
    "sums_batch": "of a batch of one there is nothing to sum",
    "sums_queries": "likewise of one query: others are zeros",
    "sums_keys": "likewise of one key",
}


def launch(architecture: str, layout: Layout, documents: list[Document], options: Options) -> None:
    """Both passes of a call."""
    given = {n: layout.tensor(n, [getattr(x, n) for x in documents]) for n in ("q", "k", "v", "mask", "bias")}
    bounds = layout.sizes if layout.bounds is None else layout.bounds
    fields: dict[str, Any] = dict.fromkeys(AttentionInputs._fields) | given | layout.arguments
    inputs = AttentionInputs(**fields | dict(zip(("max_seqlen_q", "max_seqlen_k"), bounds, strict=True)))
    spec = AttentionSpec.of(inputs, options)
    backend = CuteBackend(ARCHITECTURES[architecture])
    out, lse, *_ = backend.forward(spec, inputs)
    need_dbias = inputs.bias is not None
    backend.backward(BackwardCall(spec, inputs, out, lse, torch.zeros_like(out), None, None, need_dbias, False))


def reversed_heads(launched: Launched) -> bool:
    """Whether some heads' tiles are taken the other way round (``kernels.common.tiles``)."""
    config, a = launched.config, launched.arguments
    if not getattr(config, "reverses_last", False):
        return False
    heads: int = a.mK.shape[0] * a.mK.shape[2]
    return heads > a.numbers.sections * a.numbers.heads_in_cache


def sequences(a: Any, layout: Layout, place: Place) -> list[tuple[int, ...]]:
    """The sequences that a document is to a kernel: first row, from its own first, and length, of both sides."""
    if a.mCuSeqlensQ is None:
        return [(0, layout.sizes[0], 0, layout.sizes[1])]
    sides = []
    given = (a.mCuSeqlensQ, a.mCuSeqlensK), (a.mSeqUsedQ, a.mSeqUsedK), (place.queries, place.keys), layout.sizes
    for offsets, used, own, slot in zip(*given, strict=True):
        first = own.start + (place.entry or 0) * slot
        lengths = offsets.diff() if used is None else used
        sides.append([(start - first, n) for start, n in zip(offsets.tolist(), lengths.tolist(), strict=False)])
    queries = place.queries.stop - place.queries.start
    return [(*q, *k) for q, k in zip(*sides, strict=True) if 0 <= q[0] < queries and q[1] > 0]


def decisions(launched: Launched, layout: Layout, place: Place) -> dict[str, Any]:
    """All that may decide a document's bits."""
    config, a = launched
    found = {"kernel": type(config).__name__, **asdict(config), **asdict(config.features), **a.numbers._asdict()}
    del found["features"]
    queries, keys = (rows.stop - rows.start for rows in (place.queries, place.keys))
    for name, feature, most in (("window_left", "left", keys), ("window_right", "right", queries)):
        found[name] = min(found[name], most) if getattr(config.features, feature) else None
    found |= {"reversed_heads": reversed_heads(launched), "sequences": sequences(a, layout, place)}
    return {name: value for name, value in found.items() if name not in IRRELEVANT}


def asdict(x: Any) -> dict[str, Any]:
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}


def assert_alike(
    architecture: str, documents: list[Document], layouts: list[Layout], options: Options, launches: list[Launched]
) -> None:
    """Launches of the documents in all layouts decide of each as those of it alone do."""
    expected = {}
    for one in documents:
        if all(one.lengths) and one.lengths not in expected:  # else no kernel is launched for it alone
            alone = packing([one])
            launches.clear()
            launch(architecture, alone, [one], options)
            expected[one.lengths] = [decisions(x, alone, alone.places[0]) for x in launches]
    for layout in layouts:
        launches.clear()
        launch(architecture, layout, documents, options)
        for one, place in zip(documents, layout.places, strict=True):
            if all(one.lengths):
                got = [decisions(x, layout, place) for x in launches]
                assert got == expected[one.lengths], (one.lengths, layout.arguments)


HEADS = [(2, 2), (4, 2), (8, 1)]
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
WINDOWS = [(None, None), (None, 0), (None, 0), (90, 20), (70, 0), (None, 30), (50, None)]
ROWS = [0, 1, 7, 60, 65, 300, 600, 1100]


def drawn(number: int, promise: bool | str) -> tuple[random.Random, Case, Options]:
    draw, invariant = random.Random(number), promise == "invariant"
    tensors = ["", "", "bias", *(["bias of all heads", "mask", "mask, bias"] if invariant else ["bias"])]
    heads, given = draw.choice(HEADS), draw.choice(tensors)
    bias = None if "bias" not in given else 1 if "all" in given else heads[0]
    case = Case(heads, draw.choice(HEAD_DIMS), {}, bias=bias, mask="mask" in given)
    left, right = draw.choice(WINDOWS)
    options = Options(None, left, right, draw.choice([0.0, 0.0, 3.0]), deterministic=True, packing_invariant=invariant)
    return draw, case, options


@pytest.mark.parametrize(("architecture", "promise"), [("sm90", "invariant"), ("sm100", "invariant"), ("sm90", True)])
def test_a_document_alone_decides(architecture: str, promise: bool | str, launches: list[Launched]) -> None:
    """Packed in any way and, if it is promised, in dense batches, with padding and without, under every feature."""
    for number in range(12):
        print(f"draw {number}")  # shown where it fails
        draw, case, options = drawn(number, promise)
        rows = [1, 7, 60, 64, 65, 130] if case.bias or case.mask else ROWS
        documents = []
        for _ in range(draw.randint(2, 4)):
            queries = draw.choice(rows)
            lengths = queries, queries if draw.random() < 0.7 else draw.choice(rows)
            documents.append(document(draw, case, "cpu", torch.bfloat16, lengths))
        equal = [documents[0]] * draw.choice([2, 3, 40 if max(documents[0].lengths) < 100 else 4])
        layouts, of_equal = [packing(documents), packing(documents, draw)], [packing(equal)]
        if promise == "invariant":
            layouts.append(batch(documents, draw))
            of_equal.append(batch(equal))
        assert_alike(architecture, documents, layouts, options, launches)
        assert_alike(architecture, equal, of_equal, options, launches)


FULL = Options(deterministic=True)
CAUSAL = FULL._replace(window_right=0)
# What looks at more than a document without "invariant": of these documents in one call the kernels decide otherwise.
OTHERWISE: dict[str, tuple[str, Case, Options, list[tuple[int, int]], Callable[[list[Document]], Layout]]] = {
    "heads go the other way round": ("sm90", Case((2, 2), (64, 64), {}), CAUSAL, [(300, 300)] * 2, batch),
    "pairs of CTAs": ("sm100", Case((2, 2), (256, 256), {}), CAUSAL, [(90, 90), (1500, 1500)], packing),
    "a mask of one query": ("sm90", Case((2, 2), (128, 128), {}, mask=True), FULL, [(1, 90), (70, 70)], packing),
    "parts of a bias's gradient": ("sm90", Case((8, 8), (64, 64), {}, bias=1), FULL, [(90, 90)] * 70, packing),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_true_leaves_open(name: str, launches: list[Launched]) -> None:
    """Each of the choices that "invariant" takes away is seen, and gone with it."""
    architecture, case, options, lengths, layout_of = OTHERWISE[name]
    documents = [document(random.Random(0), case, "cpu", torch.bfloat16, pair) for pair in lengths]
    invariant = options._replace(packing_invariant=True)
    assert_alike(architecture, documents, [layout_of(documents)], invariant, launches)
    with pytest.raises(AssertionError):
        assert_alike(architecture, documents, [layout_of(documents)], options, launches)


def test_what_is_irrelevant_is_there(launches: list[Launched]) -> None:
    """Each name of the list is one of a field, so that it goes with it."""
    one = document(random.Random(0), Case((2, 2), (64, 64), {}, bias=1), "cpu", torch.bfloat16, (90, 90))
    launch("sm90", packing([one]), [one], CAUSAL)
    names = {name for x in launches for part in (asdict(x.config), asdict(x.config.features)) for name in part}
    names |= {name for x in launches for name in x.arguments.numbers._fields}
    assert IRRELEVANT.keys() <= names


def test_the_portable_backend_takes_documents_one_by_one() -> None:
    rows = [Rows(start, 20) for start in (0, 20, 40)]
    for is_invariant, num in ((False, 1), (True, 3)):
        assert len(_runs(spec_of(packed=True, packing_invariant=is_invariant), rows, rows)) == num


def test_sums_by_documents() -> None:
    """Beside zeros a document has its own sum, wherever it is; beside others all have what a sum has."""
    for number in range(30):
        draw = random.Random(number)
        lengths = [draw.choice([0, 1, 5, 64, 100, 257]) for _ in range(draw.randint(1, 6))]
        first = draw.choice([0, 3]) + torch.tensor([0, *lengths]).cumsum(0)[:-1].int()
        x = torch.zeros(2, int(first[-1]) + lengths[-1] + draw.choice([0, 9]))
        i = draw.randrange(len(lengths))
        own = torch.randn(2, lengths[i])
        x[:, first[i] : first[i] + lengths[i]] = own
        assert torch.equal(sum_by_documents(x, first), sum_by_documents(own, torch.tensor([0], dtype=torch.int32)))
        x = torch.randn_like(x)
        torch.testing.assert_close(sum_by_documents(x, first), x.sum(1))
