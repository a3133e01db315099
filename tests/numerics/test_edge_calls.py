"""Numbers at an edge, on each backend but Blackwell's (``tests/blackwell/test_sm100_edges.py``), against the oracle."""

import pytest
import torch

from tests.lib.checks import DEVICES, assert_matches_oracle, on_each_backend
from tests.lib.edge_calls import EDGES


@pytest.mark.parametrize("name", EDGES)
@on_each_backend
def test_edges(backend: str, name: str) -> None:
    call = EDGES[name](dtype=torch.float16, device=DEVICES[backend])
    assert_matches_oracle(call, backend=backend)
