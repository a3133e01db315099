"""The same inputs give the same bits."""

from typing import Any

import pytest
import torch

from tests.checks import bitwise_equal, gradients, random_call, run

OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"causal": True},
    "blockwise": {"window_size": (30, 5), "softcap": 2.0, "sink": True, "bias": (0, 1, 1), "mask": (1, 1, 1)},
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_repetitions_are_bitwise_equal(
    options: dict[str, Any], dtype: torch.dtype, deterministic: bool, device: str
) -> None:
    """The portable backend has no other way to run, so both settings are held to it, whatever PyTorch is told."""
    torch.use_deterministic_algorithms(False)
    call = random_call([150, 30, 260], nheads=4, nheads_k=2, dtype=dtype, device=device, **options)
    first: dict[str, torch.Tensor] = {}
    dout = None
    for repetition in range(20):
        out, lse = run(call, return_lse=True, deterministic=deterministic, backend="portable")
        dout = torch.randn_like(out) if dout is None else dout
        got = {"out": out, "lse": lse, **gradients(call, out, lse, dout, None)}
        first = first or got
        for name, value in got.items():
            assert bitwise_equal(value, first[name]), f"{name} differs in repetition {repetition}"


def test_the_check_sees_a_different_order_of_summation() -> None:
    """Control: keys in another order give the same function and other bits."""
    call = random_call([300])
    cu = call.cu_seqlens_q
    order = torch.randperm(300)
    shuffled = random_call([300])
    shuffled.k, shuffled.v = call.k[order], call.v[order]
    assert cu is not None
    a, b = run(call), run(shuffled)
    torch.testing.assert_close(a, b)
    assert not bitwise_equal(a, b)
