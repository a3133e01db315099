"""Calls that fill a GPU for a millisecond have the same bits each time they are repeated.

A step that does not wait for another shows rarely, and in small calls never. In these each CTA has hundreds of steps,
and all SMs are busy. A forward kernel whose reads TMA could overtake passed all tests of small calls, and differed in
every second one of these.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func, score_statistics
from tests.lib.checks import Case, Results, differing, each_of, hopper_alone, needs_kernels, offsets

TOKENS, HEADS = 65_536, 8
PASSES: dict[str, Case] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"causal": True, "nheads_k": 2},
    "window": {"window_size": (200, 60)},
    "softcap": {"causal": True, "softcap": 5.0},
    "long": {"seqlen": 4096, "causal": True},
    "packed": {"packed": True, "causal": True, "nheads_k": 2},
    "bias": {"bias": (0, 1, 1, 1)},
    "causal-bias": {"bias": (1, 1, 1, 1), "causal": True, "seqlen": 1024},
    "unaligned-bias": {"bias": (0, 1, 1, 1), "seqlen": 509},
    "row-of-a-bias": {"bias": (0, 1, 0, 1), "causal": True},
    "triangle": {"bias": (0, 1, 1, 1), "mask": (1, 0, 0, 1)},
    "mask": {"mask": (0, 0, 1, 1)},
    "blocks-of-128": {"blocks": 128, "seqlen": 4096},
    "blocks-of-64": {"blocks": 64, "seqlen": 4096},
    "most-blocks": {"blocks": 128, "seqlen": 4096, "visible": 0.6},  # in fixed point
    "blocks-and-bias": {"blocks": 128, "seqlen": 2048, "bias": (0, 1, 1, 1)},
    "largest-logits": {"causal": True, "return_max_logits": True},
    "precise": {"causal": True, "precise_gradients": True},
}
MOST = ("plain", "causal", "packed", "bias", "blocks-of-128", "most-blocks", "blocks-of-64")
CASES = {
    f"{d}-{name}": (d, d_v, options)
    for d, d_v, names in ((64, 64, PASSES), (128, 128, PASSES), (256, 256, PASSES), (96, 96, MOST), (192, 128, MOST))
    for name, options in PASSES.items()
    if name in names
}


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)


def call(d: int, d_v: int, options: Case) -> Callable[[], Results]:
    """Both passes of a call, deterministic."""
    draw = torch.Generator("cuda").manual_seed(0)
    options = {"seqlen": 512, "nheads_k": HEADS, "packed": False, "visible": 0.25, **options}
    seqlen, nheads_k, packed, share = (options.pop(name) for name in ("seqlen", "nheads_k", "packed", "visible"))
    block, bias_kept, mask_kept = (options.pop(name, None) for name in ("blocks", "bias", "mask"))
    batch = TOKENS // seqlen
    rows = (batch * seqlen,) if packed else (batch, seqlen)
    q, k, v = normal(draw, *rows, HEADS, d), normal(draw, *rows, nheads_k, d), normal(draw, *rows, nheads_k, d_v)
    dout, leaves = normal(draw, *rows, HEADS, d_v), [q, k, v]
    shape = (batch, HEADS, seqlen, seqlen)
    if bias_kept is not None:
        options["bias"] = normal(draw, *(n if kept else 1 for n, kept in zip(shape, bias_kept, strict=True)))
        leaves.append(options["bias"])
    if mask_kept is not None:
        sizes = [n if kept else 1 for n, kept in zip(shape, mask_kept, strict=True)]
        options["mask"] = torch.rand(sizes, generator=draw, device="cuda") < 0.9
    if block is not None:
        visible = torch.rand(batch, HEADS, seqlen // block, seqlen // block, generator=draw, device="cuda") < share
        options["block_mask"] = BlockMask.from_blocks(visible, block)
    for x in leaves:
        x.requires_grad_()
    options |= {"deterministic": True, "return_lse": True, "backend": "sm90"}
    cu = offsets([seqlen // 2, seqlen, seqlen + seqlen // 2, 0] * (batch // 3), device="cuda") if packed else None

    def passes() -> Results:
        if cu is None:
            found = flash_attn_func(q, k, v, **options)
        else:
            found = flash_attn_varlen_func(q, k, v, cu, cu, 2 * seqlen, 2 * seqlen, **options)
        results = dict(zip(("out", "lse", "max_logits"), found, strict=False))
        gradients = torch.autograd.grad(found[0], leaves, dout)
        return results | {f"gradient {i}": x for i, x in enumerate(gradients)}

    return passes


def selection(d: int, block: int) -> Callable[[], Results]:
    """Both passes of blocks that each query and group of heads selects."""
    draw = torch.Generator("cuda").manual_seed(0)
    seqlen, groups, top = 4096, 2, 8
    q, k, v = (normal(draw, 2, seqlen, heads, d).requires_grad_() for heads in (16 * groups, groups, groups))
    dout = normal(draw, *q.shape)
    indices = torch.randint(0, seqlen // block, (2, groups, seqlen, top), generator=draw, device="cuda").int()

    def passes() -> Results:
        mask = BlockMask.from_selection(indices, block=block, seqlen_k=seqlen)
        out, lse = flash_attn_func(q, k, v, block_mask=mask, causal=True, return_lse=True, backend="sm90")[:2]
        return {"out": out, "lse": lse} | dict(zip("qkv", torch.autograd.grad(out, (q, k, v), dout), strict=True))

    return passes


def check(passes: Callable[[], Results], repetitions: int) -> None:
    """Repeats passes, and expects the bits of the first time."""
    assert not differing(passes(), passes, repetitions)


@needs_kernels
@each_of("case", CASES)
def test_passes(case: tuple[int, int, dict[str, Any]], repetitions: int) -> None:
    """Dense and packed calls, of every kind of kernel."""
    check(call(*case), repetitions)


@hopper_alone("Blackwell has no kernels for selections")
@pytest.mark.parametrize("block", [64, 16])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_selections(d: int, block: int, repetitions: int) -> None:
    """Selected blocks, always deterministic."""
    check(selection(d, block), repetitions)


@needs_kernels
@pytest.mark.parametrize("d", [64, 128, 256])
def test_column_sums(d: int, repetitions: int) -> None:
    """Sums of keys' probabilities."""
    draw = torch.Generator("cuda").manual_seed(0)
    q, k = (normal(draw, TOKENS // 512, 512, HEADS, d) for _ in range(2))
    lse = torch.zeros(TOKENS // 512, HEADS, 512, device="cuda")
    check(lambda: {"sums": score_statistics.column_sums(q, k, lse, causal=True)}, repetitions)
