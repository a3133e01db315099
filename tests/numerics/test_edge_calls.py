"""Numbers at an edge, on each backend but Blackwell's (``tests/blackwell/test_sm100_edges.py``), against the oracle."""

import dataclasses

import pytest
import torch

from tests.lib.checks import DEVICES, assert_matches_oracle, call_on, on_each_backend, run
from tests.lib.edge_calls import EDGES


@pytest.mark.parametrize("name", EDGES)
@on_each_backend
def test_edges(backend: str, name: str) -> None:
    call = EDGES[name](dtype=torch.float16, device=DEVICES[backend])
    assert_matches_oracle(call, backend=backend)


def test_seqused_beyond_its_slot_is_refused() -> None:
    """On a CPU, where reading it waits for nothing."""
    call = dataclasses.replace(call_on("portable", [70, 0]), seqused_q=torch.tensor([200, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="seqused_q: expected 0 to 70 rows for sequence 0, got 200"):
        run(call, backend="portable")
