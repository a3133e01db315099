"""DQ in fixed point, of deterministic calls with block masks: as exact as float32, and untouched by hidden keys."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gradient_errors
from benchmarks.gradient_errors import HEAD_DIM, Data
from flash_attn_cute import BlockMask, explain, flash_attn_func
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardCtaConfig
from tests.lib.checks import bitwise_equal, differing, needs_kernels


def _few(x: Data) -> Tensor:
    return torch.randperm(len(x.k))[: max(1, len(x.k) // 2048)]


def _shift_means(x: Data) -> None:
    x.k.add_(2)
    x.v.add_(3)


def _scale_key_channel(x: Data) -> None:
    x.k[:, 5] *= 50
    x.q[:, 5] /= 50


def _scale_value_channel(x: Data) -> None:
    x.v[:, 7] *= 50


def _scale_key_rows(x: Data) -> None:
    x.k[_few(x)] *= 5


def _scale_value_rows(x: Data) -> None:
    x.v[_few(x)] *= 50


def _scale_both_rows(x: Data) -> None:
    few = _few(x)
    x.k[few] *= 8
    x.v[few] *= 50


# Data that is hard for sums: by its kind, what is done to normal numbers.
KINDS: dict[str, Callable[[Data], object]] = {
    **{kind: gradient_errors.KINDS[kind] for kind in ("normal", "peaked", "a sink", "repeated tokens")},
    "tiny gradients": lambda x: x.dout.mul_(1e-7),
    "means that are not zero": _shift_means,
    "an outlier channel of k": _scale_key_channel,
    "an outlier channel of v": _scale_value_channel,
    "outlier rows of k": _scale_key_rows,
    "outlier rows of v": _scale_value_rows,
    "outlier rows of both": _scale_both_rows,
    "rows of v of all sizes": lambda x: x.v.mul_(torch.exp(2 * torch.randn(len(x.v), 1))),
}


def of_all_kinds(queries: int, keys: int) -> tuple[Data, Tensor, BlockMask]:
    """A head of each kind of data that is hard for sums, (1, rows, kinds, HEAD_DIM) each; blocks that it sees."""
    heads = []
    for kind in KINDS.values():
        data = Data(*torch.randn(2, queries, HEAD_DIM), *torch.randn(2, keys, HEAD_DIM))
        kind(data)
        heads.append(data)
    both = (torch.stack(of_heads, 1)[None] for of_heads in zip(*heads, strict=True))
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(1, len(heads), queries // 128, keys // 128, generator=generator) < 0.75
    visible[..., 0] = True
    mask = BlockMask.from_blocks(visible.cuda())
    return Data(*(x.to("cuda", torch.bfloat16) for x in both)), visible, mask


def two_heads(queries: int, keys: int) -> Data:
    q, dout = torch.randn(2, 1, queries, 2, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return Data(q, dout, *torch.randn(2, 1, keys, 2, HEAD_DIM, device="cuda", dtype=torch.bfloat16))


def dq_of(data: Data, mask: BlockMask, **options: Any) -> Tensor:
    q = data.q.detach().requires_grad_()
    out = flash_attn_func(q, data.k, data.v, block_mask=mask, backend="sm90", **options)
    return torch.autograd.grad(out, q, data.dout)[0]


def in_float64(data: Data, head: int, shown: Tensor) -> Tensor:
    """DQ of a head (rows, HEAD_DIM), of which ``shown`` (queries, keys) are visible."""
    q, dout, k, v = (x[0, :, head].double() for x in data)
    q.requires_grad_()
    scores = (q @ k.T / HEAD_DIM**0.5).masked_fill(~shown, -torch.inf)
    return torch.autograd.grad(torch.softmax(scores, -1) @ v, q, dout)[0]


@needs_kernels
@pytest.mark.parametrize("keys", [4096, 65536])
def test_as_exact_as_sums_in_float32(keys: int) -> None:
    """For every kind of data, of which some leave integers too few bits, so that their head is summed in float32."""
    data, visible, mask = of_all_kinds(256, keys)
    in_integers, in_any_order = dq_of(data, mask, deterministic=True), dq_of(data, mask)
    shown = visible[0].repeat_interleave(128, -2).repeat_interleave(128, -1).cuda()
    for head, kind in enumerate(KINDS):
        truth = in_float64(data, head, shown[head])
        ours, theirs = ((x[0, :, head].double() - truth).norm() for x in (in_integers, in_any_order))
        assert ours <= 1.05 * theirs, f"{kind}: {(ours / theirs).item():.3f} of the error of float32"


@needs_kernels
def test_a_head_in_turns_beside_others_in_integers(repetitions: int) -> None:
    """Every run gives the same bits, and each head those that it gives alone."""
    data, visible, mask = of_all_kinds(2048, 8192)

    def dq() -> dict[str, Tensor]:
        return {"dq": dq_of(data, mask, deterministic=True)}

    expected = dq()
    assert not differing(expected, dq, repetitions)
    for head in range(len(KINDS)):
        alone = Data(*(x[:, :, head : head + 1].contiguous() for x in data))
        mask_alone = BlockMask.from_blocks(visible[:, head : head + 1].cuda())
        got = dq_of(alone, mask_alone, deterministic=True)
        assert bitwise_equal(got, expected["dq"][:, :, head : head + 1])


@needs_kernels
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**60])
def test_gradients_of_any_size(scale: float) -> None:
    """Dout times a power of two gives dq times that power, to the bit."""
    data, _, mask = of_all_kinds(512, 1024)
    dq = dq_of(data, mask, deterministic=True)
    scaled = dq_of(data._replace(dout=data.dout * scale), mask, deterministic=True)
    is_normal = (dq == 0) | (dq.abs() > 1e-12)  # others are rounded to fewer bits
    assert is_normal.float().mean() > 0.9
    assert bitwise_equal(scaled[is_normal], (dq * scale)[is_normal])


@needs_kernels
def test_keys_that_no_query_sees() -> None:
    """Their numbers change no bit of dq. NaN in them makes a row of dq NaN, or leaves it, but never gives another."""
    hidden = torch.zeros(300, dtype=torch.bool, device="cuda")
    hidden[7], hidden[130:141], hidden[299] = True, True, True
    shown = torch.rand(400, 300, device="cuda") < 0.4
    mask = BlockMask.from_dense(shown & ~hidden)
    data = two_heads(400, 300)

    def filled(value: float) -> Tensor:
        keys, values = data.k.clone(), data.v.clone()
        keys[:, hidden], values[:, hidden] = value, value
        return dq_of(data._replace(k=keys, v=values), mask, deterministic=True)

    expected = filled(0.0)
    for value in (1.0, -3e4, 1e30):
        assert bitwise_equal(filled(value), expected), f"{value} in keys that no query sees"
    poisoned = filled(torch.nan)
    assert (poisoned.isnan() | ((poisoned - expected).abs() <= 0.02 * expected.abs() + 1e-3)).all()


@needs_kernels
def test_nan_reaches_what_sees_it() -> None:
    """A NaN of dout its own row of dq alone, one of k or v all that see it."""
    data = two_heads(256, 384)
    visible = torch.tensor([[True, True, False], [True, False, True]])
    mask = BlockMask.from_blocks(visible.cuda())
    expected = dq_of(data, mask, deterministic=True)
    dout = data.dout.clone()
    dout[0, 5, 0, 3] = torch.nan
    got = dq_of(data._replace(dout=dout), mask, deterministic=True)
    assert got[0, 5, 0].isnan().all()
    got[0, 5, 0] = expected[0, 5, 0]
    assert bitwise_equal(got, expected)
    for name in ("k", "v"):
        poisoned = getattr(data, name).clone()
        poisoned[0, 130, 1, 0] = torch.nan
        got = dq_of(data._replace(**{name: poisoned}), mask, deterministic=True)
        assert got[0, :128, 1].isnan().all()
        assert bitwise_equal(got[0, :, 0], expected[0, :, 0])
        assert got[0, 128:, 1].isfinite().all()


def test_which_calls_sum_in_fixed_point() -> None:
    """Deterministic ones with block masks up to d = 128, but for masks under which tiles hardly wait."""
    blocks = BlockMask.from_blocks(torch.ones(4, 4, dtype=torch.bool))
    for mask, d, deterministic, expected in (
        (blocks, 128, True, True),
        (blocks, 64, True, True),
        (blocks, 128, False, False),
        (blocks, 192, True, False),
        (BlockMask.prefix_lm(512, 512, 100), 128, True, False),
        (None, 128, True, False),
    ):
        q = torch.empty(1, 512, 2, d, dtype=torch.bfloat16, requires_grad=True)
        explained = explain(q, q, q, block_mask=mask, deterministic=deterministic, gpu="sm90")
        assert explained.backward is not None
        config = explained.backward.config
        assert config.fixed_point == expected
        assert isinstance(config, BackwardCtaConfig) == (d <= 128)
