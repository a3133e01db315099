"""Documents of Hopper's calls, executed on the CPU from their PTX: the same bits alone, among others and in a batch."""

import random

import pytest
import torch

from tests.lib.interpreted.common import H100
from tests.lib.interpreted.documents import differing
from tests.lib.packings import Case, Options, batch, document, packing
from tests.lib.tiers import tiered

CAUSAL: Options = {"causal": True}
CAPPED: Options = {"window_size": (60, 0), "softcap": 8.0, "softmax_scale": -0.2}
CAPPED_CASE = Case((2, 1), (128, 128), CAPPED, sink=True, dlse=True)
# Documents, by queries and keys, packed with padding; at d = 256 by clusters.
CASES: dict[str, tuple[Case, list[tuple[int, int]]]] = {
    # All calls of these documents have one configuration a pass.
    "mask and bias, grouped": (Case((2, 1), (64, 64), {}, bias=2, mask=True), [(10, 71), (30, 130)]),
    # Alone, heads of a group share a tile: together there are more than 64 queries.
    "softcap, grouped": (CAPPED_CASE, [(64, 100), (10, 10)]),
    "causal, grouped, d256": (Case((2, 1), (256, 256), CAUSAL), [(70, 140), (10, 10)]),
}
PLAINLY = "softcap, grouped"  # alone without padding, by kernels of their own


@pytest.mark.parametrize("name", tiered(CASES, rare=["causal, grouped, d256"]))
def test_packed_anywhere(name: str) -> None:
    """With a mask or a bias also in a padded batch; of other tensors the host makes a packed call ahead of kernels."""
    case, lengths = CASES[name]
    documents = [document(random.Random(0), case, "cpu", torch.bfloat16, pair) for pair in lengths]
    layouts = [packing(documents, random.Random(1))]
    if case.mask or case.bias:
        layouts.append(batch(documents, random.Random(0)))
    sink = torch.randn(case.heads[0]) if case.sink else None
    assert differing(documents, layouts, H100, sink, plainly=name == PLAINLY, **case.options) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "heard"),
    [
        pytest.param(CAPPED_CASE, 0, id="d128-0"),
        pytest.param(Case((3, 3), (192, 128), {"softmax_scale": -0.2}, dlse=True), None, id="d192"),
    ],
)
def test_documents_without_queries_or_keys(case: Case, heard: int | None) -> None:
    """Zeros to which no score adds are those of the document alone; rows of a sink are added in their order."""
    torch.manual_seed(0)
    pairs = [(0, 64), (10, 140), (64, 0), (5, 3)]
    documents = [document(random.Random(0), case, "cpu", torch.bfloat16, pair) for pair in pairs]
    layout, sink = packing(documents, random.Random(1)), None if heard is None else torch.randn(2)
    plainly = heard == 0
    assert differing(documents, [layout], H100, sink, heard, plainly=plainly, **case.options) == set()


@pytest.mark.slow
def test_entries_of_a_dense_causal_batch() -> None:
    """Entries have the bits of packed documents if invariant; else the last heads sum the other way round."""
    documents = [document(random.Random(0), Case((1, 1), (64, 64), {}), "cpu", torch.bfloat16, (260, 260))] * 2
    assert differing(documents, [batch(documents)], H100, **CAUSAL) == set()
    found = differing(documents, [batch(documents)], H100, deterministic=True, **CAUSAL)
    assert found
    assert found <= {"dq", "dk", "dv"}
