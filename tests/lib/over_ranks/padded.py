"""Padding within context_parallel, given by tensors on the device of q, as plain calls want them."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.distributed import Sharding, context_parallel, gather
from flash_attn_cute.integrations.transformer_engine import thd_attention
from flash_attn_cute.runtime import settings
from tests.lib import checks

LENGTHS, SLOTS, ROWS = [20, 0, 31, 7], [24, 3, 40, 7], 80
MEMORY = list(accumulate(SLOTS, initial=0))
METHODS = ("auto", "ring", "all_gather", "all_to_all")


def int32(numbers: list[int], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def assert_same_inside(
    attend: Callable[[Tensor], Tensor], x: Tensor, sharding: Sharding, method: str, dim: int
) -> None:
    """A function of rows gives the same values and gradients over the ranks as in one process.

    Errors are against float64, within four times those of one process at the dtype of x: kernels round P and dS, and
    where one call has them differs from where several do.
    """
    true, low = (_differentiated(attend, x.to(dtype)) for dtype in (torch.float64, x.dtype))
    rows = x.clone()
    with context_parallel(None, buffers=[rows], buffer_seq_dims=[dim], sharding=sharding, method=method):
        mine = _differentiated(attend, rows)
    for name, got in mine.items():
        size = max(1.0, true[name].abs().max().item())
        checks.assert_close(name, gather(got, sharding, dim=dim), true[name], low[name], 4.0, size)


def _differentiated(attend: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Results of a function of rows, and the gradient of a sum of them."""
    x = x.clone().requires_grad_()
    out = attend(x)
    out.sin().sum().backward()
    assert x.grad is not None
    return {"out": out.detach(), "dx": x.grad}


def rows_of(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device, torch.float64 if device == "cpu" else torch.bfloat16)


def padded_documents(device: str = "cpu") -> None:
    """Packed calls and Transformer Engine's thd, offsets of lengths in one tensor or in two."""
    size = dist.get_world_size()
    memory, used, true = int32(MEMORY, device), int32(LENGTHS, device), int32([0, *accumulate(LENGTHS)], device)
    x = rows_of(ROWS, 3, 12, 16, device=device)
    for start, length, stop in zip(MEMORY[:-1], LENGTHS, [*MEMORY[1:-1], ROWS], strict=True):
        x[start + length : stop] = torch.nan
    sharding = Sharding.balanced(memory, size, causal=True, seqused_q=used, seqused_k=used, total=ROWS)
    assert (sharding.seqused_q, sharding.seqused_k) == (tuple(LENGTHS), tuple(LENGTHS))

    def packed(x: Tensor, of_q: Tensor = used, of_k: Tensor = used, **options: Any) -> Tensor:
        q, k, v = x.unbind(1)
        attend: Callable[..., Tensor] = partial(flash_attn_varlen_func, seqused_q=of_q, seqused_k=of_k)
        return attend(q, k, v, memory, memory, 40, 40, **options)

    def thd(x: Tensor, of_k: Tensor = true, **options: Any) -> Tensor:
        q, k, v = x.unbind(1)
        return thd_attention(q, k, v, true, of_k, memory, memory, 40, 40, **options)

    ways: list[Callable[[Tensor], Tensor]] = [
        partial(packed, of_k=used.clone(), causal=True),
        partial(packed, window_size=(9, 2)),
        partial(thd),
        partial(thd, of_k=true.clone()),
        partial(thd, of_k=true.clone(), window_size=(6, 0)),
        partial(thd, of_k=true.clone(), attn_mask_type="padding_causal_bottom_right", window_size=(6, 0)),
        partial(thd, attn_mask_type="padding", window_size=(3, 5)),
    ]
    for i, way in enumerate(ways):
        assert_same_inside(way, x, sharding, METHODS[i % 4], 0)

    mine = sharding.shard(x, dist.get_rank())
    longer = sharding.with_lengths(seqused_q=LENGTHS, seqused_k=SLOTS)
    wrong, wrong_true = int32([20, 0, 30, 7], device), int32([0, 20, 20, 50, 58], device)
    refused: list[tuple[Sharding, Callable[[Tensor], Tensor], str]] = [
        (longer, partial(thd, of_k=true.clone()), "cu_seqlens_kv: expected (another tensor than|those of the sharding)")
    ]
    if device == "cpu" or settings.check_data():
        refused += [
            (
                sharding,
                partial(packed, of_q=wrong),
                r"seqused_q: expected those of the sharding, \[20, 0, 31, 7\], got",
            ),
            (
                sharding,
                partial(packed, of_k=wrong),
                r"seqused_k: expected those of the sharding, \[20, 0, 31, 7\], got",
            ),
        ]

    def jagged(x: Tensor) -> Tensor:
        q, k, v = (torch.nested.nested_tensor_from_jagged(y.contiguous(), memory) for y in x.unbind(1))
        return flash_attn_func(q, k, v)

    message = "q: expected a dense tensor within context_parallel, got a nested one"
    with context_parallel(None, sharding=sharding), pytest.raises(TypeError, match=message):
        jagged(mine)
    if device == "cpu":
        message = "cu_seqlens_kv: expected the lengths of cu_seqlens_q within context_parallel"
        refused.append((sharding, partial(thd, of_k=wrong_true), message))
    else:
        without = Sharding(sharding.cu_seqlens, sharding.total, sharding.segments)
        refused.append((without, packed, "seqused_q: expected lengths on the host, or a sharding that keeps them"))
    for of, way, message in refused:
        with context_parallel(None, sharding=of), pytest.raises(ValueError, match=message):
            way(mine)


def padded_on_a_gpu() -> None:
    """By kernels, lengths on the device; compared with those of the sharding by request."""
    for check in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "check_data", lambda check=check: check)
            padded_documents("cuda")
