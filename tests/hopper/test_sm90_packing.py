"""Documents of Hopper's calls, executed on the CPU from their PTX: the same bits alone and as entries of a batch."""

import pytest
import torch

from tests.lib.checks import random_call
from tests.lib.interpreted.common import H100
from tests.lib.interpreted.documents import differing


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_entries_of_a_dense_causal_batch(d: int) -> None:
    """Entries have the bits of packed documents if invariant; else the last heads sum the other way round."""
    call = random_call([300, 300], packed=False, nheads=1, head_dim=d, causal=True, dtype=torch.bfloat16)
    dout = torch.randn(call.q.shape).to(call.q.dtype)
    assert differing(call, dout, H100, "invariant") == set()
    found = differing(call, dout, H100, True)
    assert found
    assert found <= {"dq", "dk", "dv"}
