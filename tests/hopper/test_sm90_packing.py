"""Documents of Hopper's calls, executed on the CPU from their PTX: the same bits alone, among others and in a batch."""

import random

import pytest
import torch

from tests.lib.interpreted.common import H100
from tests.lib.interpreted.documents import differing
from tests.lib.packings import Case, Options, batch, document, packing
from tests.lib.tiers import tiered

CAUSAL: Options = {"causal": True}
CAPPED: Options = {"window_size": (60, 0), "softcap": 8.0}
# Documents, by queries and keys, packed with padding; at d = 256 by clusters.
CASES: dict[str, tuple[Case, list[tuple[int, int]]]] = {
    "mask of one query": (Case((1, 1), (128, 128), {}, mask=True), [(1, 90), (70, 70)]),
    "mask, grouped": (Case((2, 1), (64, 64), {}, mask=True), [(140, 200), (70, 70)]),
    "bias of all heads": (Case((2, 2), (64, 64), {}, bias=1), [(140, 60), (70, 130)]),
    "mask and bias, grouped": (Case((2, 1), (64, 64), {}, bias=2, mask=True), [(70, 130), (10, 70)]),
    "softcap, grouped": (Case((2, 1), (64, 64), CAPPED, dlse=True), [(70, 100), (10, 10)]),
    "causal, grouped, d256": (Case((2, 1), (256, 256), CAUSAL), [(70, 140), (10, 10)]),
}
PLAINLY = "softcap, grouped"  # alone without padding, by kernels of their own


@pytest.mark.parametrize("name", tiered(CASES, rare=["mask of one query", "mask, grouped", "bias of all heads"]))
def test_packed_anywhere(name: str) -> None:
    """With a mask or a bias also in a padded batch; of other tensors the host makes a packed call ahead of kernels."""
    case, lengths = CASES[name]
    documents = [document(random.Random(0), case, "cpu", torch.bfloat16, pair) for pair in lengths]
    layouts = [packing(documents, random.Random(1))]
    if case.mask or case.bias:
        layouts.append(batch(documents, random.Random(1)))
    assert differing(documents, layouts, H100, plainly=name == PLAINLY, **case.options) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "heard"), [((64, 64), 0), pytest.param((64, 64), 2, marks=pytest.mark.rare), ((192, 128), None)]
)
def test_documents_without_queries_or_keys(dims: tuple[int, int], heard: int | None) -> None:
    """Zeros to which no score adds are those of the document alone; rows of a sink are added in their order."""
    case = Case((3, 3), dims, {"softmax_scale": -0.2}, sink=True, dlse=True)
    torch.manual_seed(0)
    pairs = [(0, 64), (10, 70), (64, 0)]
    documents = [document(random.Random(0), case, "cpu", torch.bfloat16, pair) for pair in pairs]
    layout, sink = packing(documents, random.Random(1)), None if heard is None else torch.randn(3)
    plainly = heard == 0
    assert differing(documents, [layout], H100, sink, heard, plainly=plainly, **case.options) == set()


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.rare)])
def test_entries_of_a_dense_causal_batch(d: int) -> None:
    """Entries have the bits of packed documents if invariant; else the last heads sum the other way round."""
    documents = [document(random.Random(0), Case((1, 1), (d, d), {}), "cpu", torch.bfloat16, (300, 300))] * 2
    assert differing(documents, [batch(documents)], H100, **CAUSAL) == set()
    found = differing(documents, [batch(documents)], H100, deterministic=True, **CAUSAL)
    assert found
    assert found <= {"dq", "dk", "dv"}
