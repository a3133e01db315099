"""Numbers at an edge, on each backend but Blackwell's (``tests/blackwell/test_sm100_edges.py``), against the oracle."""

import dataclasses

import pytest
import torch

from tests.lib.checks import DEVICES, assert_matches_oracle, bitwise_equal, call_on, needs_kernels, run
from tests.lib.edge_calls import EDGES

BACKENDS = ["portable", pytest.param("sm90", marks=needs_kernels)]


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_edges(backend: str, name: str) -> None:
    call = EDGES[name](dtype=torch.float16, device=DEVICES[backend])
    assert_matches_oracle(call, backend=backend)


def test_seqused_beyond_its_slot_is_refused() -> None:
    """On a CPU, where reading it waits for nothing."""
    call = dataclasses.replace(call_on("portable", [70, 0]), seqused_q=torch.tensor([200, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="seqused_q: expected 0 to 70 rows for sequence 0, got 200"):
        run(call, backend="portable")


@needs_kernels
def test_seqused_beyond_its_slot_ends_with_it() -> None:
    call = call_on("sm90", [70, 0, 33], [40, 50, 129], causal=True)
    beyond = torch.tensor([200, 5, 1000], dtype=torch.int32, device=call.q.device)
    more = dataclasses.replace(call, seqused_q=beyond, seqused_k=beyond)
    found, expected = (run(each, backend="sm90", return_lse=True) for each in (more, call))
    assert all(map(bitwise_equal, found, expected))
