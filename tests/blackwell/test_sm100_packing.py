"""Documents of packed calls by Blackwell's kernels, executed on the CPU from their PTX: the same bits alone and not."""

import dataclasses
import random
from typing import Any

import pytest
import torch

from tests.lib.checks import bitwise_equal, random_call
from tests.lib.interpreted import forward
from tests.lib.interpreted.common import B200
from tests.lib.interpreted.documents import differing

CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "d64-causal": ([150, 7, 300], {"head_dim": 64, "causal": True}),
    "d64-grouped-softcap": ([140, 270], {"head_dim": 64, "nheads": 2, "nheads_k": 1, "softcap": 3.0}),
    "d128-window": ([129, 280], {"head_dim": 128, "window_size": (100, 5)}),
    "d256": ([140, 60], {"head_dim": 256}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_packed_anywhere(case: str) -> None:
    """Both passes, of documents behind others that have lengths of their own."""
    lengths, options = CASES[case]
    call = random_call(lengths, **{"nheads": 1, "dtype": torch.bfloat16, **options})
    dout = torch.randn(*call.q.shape[:-1], call.v.shape[-1]).to(call.q.dtype)
    assert differing(call, dout, B200, True) == set()


@pytest.mark.slow
def test_entries_of_a_dense_causal_batch() -> None:
    """Entries have the bits of packed documents if invariant; else the last heads sum the other way round."""
    call = random_call([300, 300], packed=False, nheads=1, head_dim=64, causal=True, dtype=torch.bfloat16)
    dout = torch.randn(call.q.shape).to(call.q.dtype)
    assert differing(call, dout, B200, "invariant") == set()
    found = differing(call, dout, B200, True)
    assert found
    assert found <= {"dq", "dk", "dv"}


@pytest.mark.slow
def test_a_short_document_beside_a_long_one() -> None:
    """If invariant kernels of pairs of CTAs, which have other blocks, do not come with a long neighbour."""
    call = random_call([70, 500], nheads=1, head_dim=256, dtype=torch.bfloat16)
    dout = torch.randn(call.q.shape).to(call.q.dtype)
    assert differing(call, dout, B200, "invariant") == set()
    assert {"out", "lse"} & differing(call, dout, B200, True)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_one_query_over_a_cache(d: int) -> None:
    """Out and lse of a row of a causal call, and of its query alone over the keys that it sees."""
    call = random_call([300], packed=False, head_dim=d, causal=True, dtype=torch.bfloat16, nheads=1)
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in "qkv"})
    out, lse = forward.execute(call, random.Random(0))
    for row in (0, 127, 128, 200, 299):
        own = dataclasses.replace(call, q=call.q[:, row : row + 1], k=call.k[:, : row + 1], v=call.v[:, : row + 1])
        cached, cached_lse = forward.execute(own, random.Random(row))
        assert bitwise_equal(cached[0, 0], out[0, row]), f"out of row {row}"
        assert bitwise_equal(cached_lse[0, :, 0], lse[0, :, row].contiguous()), f"lse of row {row}"
