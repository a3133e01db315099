"""Documents of packed calls by Blackwell's kernels, executed on the CPU from their PTX: the same bits alone and not."""

import dataclasses
import random

import pytest
import torch

from tests.lib.checks import bitwise_equal
from tests.lib.interpreted import forward
from tests.lib.interpreted.common import B200, dense
from tests.lib.interpreted.documents import differing
from tests.lib.packings import Case, Document, Options, batch, document, packing
from tests.lib.tiers import tiered

CAUSAL: Options = {"causal": True}
CASES: dict[str, tuple[Case, list[int]]] = {
    "d64-causal": (Case((1, 1), (64, 64), CAUSAL), [150, 7, 300]),
    "d64-grouped-softcap": (Case((2, 1), (64, 64), {"softcap": 3.0}), [140, 270]),
    "d128-window": (Case((1, 1), (128, 128), {"window_size": (100, 5)}), [129, 280]),
    "d256": (Case((1, 1), (256, 256), {}), [60, 70]),
}
# What "invariant" alone promises.
INVARIANT: dict[str, tuple[Case, list[int]]] = {
    "mask": (Case((1, 1), (64, 64), {}, mask=True), [1, 140]),
    "bias of all heads": (Case((2, 2), (64, 64), {}, bias=1), [140, 60]),
    "mask and bias": (Case((2, 2), (64, 64), {}, bias=1, mask=True), [140, 20]),
    "sink": (Case((2, 1), (64, 64), CAUSAL, sink=True, dlse=True), [60, 140]),
    "padding": (Case((1, 1), (64, 64), CAUSAL), [60, 140]),
    "everything": (Case((2, 1), (128, 128), {"softcap": 3.0}, sink=True, bias=1, mask=True, dlse=True), [40, 140]),
}


def drawn(case: Case, lengths: list[int]) -> list[Document]:
    """Documents of as many queries as keys."""
    return [document(random.Random(0), case, "cpu", torch.bfloat16, (n, n)) for n in lengths]


@pytest.mark.parametrize("name", tiered(CASES, rare=["d64-grouped-softcap", "d128-window"]))
def test_packed_anywhere(name: str) -> None:
    """Both passes, of documents behind others that have lengths of their own."""
    case, lengths = CASES[name]
    documents = drawn(case, lengths)
    assert differing(documents, [packing(documents)], B200, deterministic=True, **case.options) == set()


@pytest.mark.parametrize("name", tiered(INVARIANT, rare=["mask", "bias of all heads", "mask and bias", "sink"]))
def test_invariant_alone(name: str) -> None:
    """Padded batches, masks, gradients of biases and sinks."""
    case, lengths = INVARIANT[name]
    documents = drawn(case, lengths)
    sink = torch.randn(case.heads[0]) if case.sink else None
    layout, heard = batch(documents, random.Random(0)), len(documents) - 1 if case.sink else None
    plainly = not case.mask and case.bias is None
    assert differing(documents, [layout], B200, sink, heard, plainly=plainly, **case.options) == set()


@pytest.mark.slow
def test_entries_of_a_dense_causal_batch() -> None:
    """Entries have the bits of packed documents if invariant; else the last heads sum the other way round."""
    documents = drawn(Case((1, 1), (64, 64), {}), [300]) * 2
    assert differing(documents, [batch(documents)], B200, **CAUSAL) == set()
    found = differing(documents, [batch(documents)], B200, deterministic=True, **CAUSAL)
    assert found
    assert found <= {"dq", "dk", "dv"}


@pytest.mark.slow
@pytest.mark.rare
def test_a_short_document_beside_a_long_one() -> None:
    """If invariant kernels of pairs of CTAs, which have other blocks, do not come with a long neighbour."""
    documents = drawn(Case((1, 1), (256, 256), {}), [70, 500])
    assert differing(documents, [packing(documents)], B200) == set()
    assert {"out", "lse"} & differing(documents, [packing(documents)], B200, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_one_query_over_a_cache(d: int) -> None:
    """Out and lse of a row of a causal call, and of its query alone over the keys that it sees."""
    call = dense([300], head_dim=d, causal=True, nheads=1)()
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in "qkv"})
    out, lse = forward.execute(call, random.Random(0))
    for row in (0, 127, 128, 200, 299):
        own = dataclasses.replace(call, q=call.q[:, row : row + 1], k=call.k[:, : row + 1], v=call.v[:, : row + 1])
        cached, cached_lse = forward.execute(own, random.Random(row))
        assert bitwise_equal(cached[0, 0], out[0, row]), f"out of row {row}"
        assert bitwise_equal(cached_lse[0, :, 0], lse[0, :, row].contiguous()), f"lse of row {row}"
