"""Documents of packed calls by Blackwell's kernels, executed on the CPU from their PTX: the same bits alone and not."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import oracle
from tests.lib.checks import bitwise_equal, offsets, random_call
from tests.lib.interpreted import backward, forward
from tests.lib.oracle import Call

CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "d64-causal": ([150, 7, 300], {"head_dim": 64, "causal": True}),
    "d64-grouped-softcap": ([140, 270], {"head_dim": 64, "nheads": 2, "nheads_k": 1, "softcap": 3.0}),
    "d128-window": ([129, 280], {"head_dim": 128, "window_size": (100, 5)}),
    "d256": ([140, 60], {"head_dim": 256}),
}


def alone(call: Call, rows: slice) -> Call:
    """One document of a packed call, as a packed call of its own."""
    cu = offsets([rows.stop - rows.start])
    own = {name: getattr(call, name).detach()[rows].clone().requires_grad_() for name in "qkv"}
    return dataclasses.replace(call, **own, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=None, seqused_k=None)


def results_of(call: Call, dout: Tensor, seed: int) -> dict[str, Tensor]:
    """Out, lse and the gradients, under schedules that are drawn."""
    out, lse = forward.execute(call, random.Random(seed))
    true_lse = oracle.attention(call.to(torch.float64))[1].detach().float()
    return {
        "out": out,
        "lse": lse,
        **backward.execute(call, backward.Interpreted(random.Random(seed)), true_lse, dout, None),
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_packed_anywhere(case: str) -> None:
    """Both passes, of documents behind others that have lengths of their own."""
    lengths, options = CASES[case]
    call = random_call(lengths, **{"nheads": 1, "dtype": torch.bfloat16, **options})
    dout = torch.randn(*call.q.shape[:-1], call.v.shape[-1]).to(call.q.dtype)
    together = results_of(call, dout, seed=0)
    for number, (_, rows, _) in enumerate(call.sequences()):
        for name, x in results_of(alone(call, rows), dout[rows].clone(), seed=number + 1).items():
            got = together[name]
            own = got[:, rows] if name == "lse" else got[rows]
            assert bitwise_equal(own.contiguous(), x.contiguous()), f"{name} of document {number}"


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
