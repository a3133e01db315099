"""Properties of the portable backend that only a GPU can show; the other tests take a GPU as one more device."""

from typing import Any

import pytest
import torch

from flash_attn_cute import flash_attn_varlen_func
from tests.lib.checks import Case, assert_matches_oracle, random_call, run
from tests.lib.waits import synchronisations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("sequences", [1, 3, 40])
@pytest.mark.parametrize("options", [{}, {"seqused": True, "softcap": 2.0, "causal": True, "sink": True}], ids=str)
def test_one_transfer_a_pass(options: Case, sequences: int) -> None:
    """However many sequences there are."""
    call = random_call([*range(3, 3 + sequences)], dtype=torch.bfloat16, device="cuda", **options)
    dout = torch.randn_like(run(call))
    given: Case = {name: value for name, value in vars(call).items() if value is not None}

    def forward() -> Any:
        return flash_attn_varlen_func(**given, max_seqlen_q=64, max_seqlen_k=64, backend="portable")

    torch.autograd.grad(forward(), call.qkv, dout)
    assert synchronisations(forward) == 1
    result = forward()
    assert synchronisations(lambda: torch.autograd.grad(result, call.qkv, dout)) == 1


def test_no_transfer_without_offsets() -> None:
    call = random_call([40] * 3, packed=False, causal=True, dtype=torch.bfloat16, device="cuda")
    run(call, backend="portable").sum().backward()
    assert synchronisations(lambda: run(call, backend="portable").sum().backward()) == 0


@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 192, 256, 320])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    """Through PyTorch's fused kernels and beyond them."""
    call = random_call([130, 70], nheads=4, nheads_k=2, head_dim=head_dim, causal=True, dtype=dtype, device="cuda")
    assert_matches_oracle(call, backend="portable")
