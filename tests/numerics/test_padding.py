"""Padding: exact zeros in every result, and whatever stands there reaches nothing."""

from dataclasses import replace

import pytest
import torch

from tests.lib.checks import (
    Case,
    assert_fully_masked_queries_reach_nothing,
    assert_matches_oracle,
    assert_padding_is_zero,
    assert_padding_reaches_nothing,
    bitwise_equal,
    call_on,
    each_of,
    needs_kernels,
    packed_or_dense,
    padded_results,
    poison_padding,
    random_call,
    refilled,
    run,
)

OPTIONS: dict[str, Case] = {
    "plain": {},
    "causal": {"causal": True},
    "blockwise": {"causal": True, "softcap": 3.0, "sink": True, "bias": (1, 1, 1), "mask": (1, 1, 1)},
    "window": {"window_size": (10, 2)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@packed_or_dense
@each_of("options", OPTIONS)
def test_padding_reaches_nothing(options: Case, packed: bool, dtype: torch.dtype, device: str) -> None:
    lengths = [50, 3, 0, 140], [44, 9, 5, 130]
    call = random_call(*lengths, packed=packed, seqused=True, dtype=dtype, device=device, **options)
    assert_padding_reaches_nothing(call)


@packed_or_dense
def test_the_check_sees_padding_that_counts(packed: bool) -> None:
    """Control: were the padding real rows, its values would show."""
    call = random_call([30, 12], packed=packed, seqused=True)
    real = call.real_rows()[0]
    filled = (refilled(call, (fill,)) for fill in (0.0, 1.0))
    a, b = (run(replace(whole, seqused_q=None, seqused_k=None))[real] for whole in filled)
    assert not bitwise_equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@packed_or_dense
@each_of("options", OPTIONS)
def test_unwritten_padding(options: Case, packed: bool, dtype: torch.dtype, device: str) -> None:
    """zero_padding=False: the same real rows; their padding is left as the allocator gave it (here: NaN), not dbias's.

    They come from two kernels, and the compiler may fuse a multiplication and an addition in one of them and not in the
    other: lse may differ in its last bit.
    """
    call = random_call([50, 3, 20], [44, 9, 130], packed=packed, seqused=True, dtype=dtype, device=device, **options)
    zeroed, unwritten = padded_results(call, torch.nan), padded_results(call, torch.nan, zero_padding=False)
    real_q, real_k = (real.to(device) for real in call.real_rows())
    for name, real in (("out", real_q), ("dq", real_q), ("dk", real_k), ("dv", real_k)):
        assert bitwise_equal(zeroed[name][real], unwritten[name][real]), name
        assert unwritten[name][~real].isnan().all(), name
    lse = zeroed["lse"].transpose(-1, -2), unwritten["lse"].transpose(-1, -2)
    torch.testing.assert_close(lse[0][real_q], lse[1][real_q], rtol=2**-22, atol=2**-22)
    assert lse[1][~real_q].isnan().all()
    if call.bias is not None:
        assert_padding_is_zero(call, {"dbias": unwritten["dbias"]})


def test_sequences_without_partners_are_real_rows() -> None:
    """Queries without keys are no padding: they are written whatever zero_padding says, and keys likewise."""
    call = random_call([4, 0, 3], [0, 5, 2], sink=True)
    got = padded_results(call, 0.0, zero_padding=False)
    assert (got["out"][:4] == 0).all()
    torch.testing.assert_close(got["lse"][:, :4], call.learnable_sink[:, None].expand(-1, 4))
    assert (got["dq"][:4] == 0).all()
    assert (got["dk"][:5] == 0).all()
    assert (got["dv"][:5] == 0).all()


FULLY_MASKED: dict[str, Case] = {
    "causal": {"causal": True},
    "right": {"window_size": (None, 13)},
    "window": {"window_size": (50, 7)},
    "softcap": {"causal": True, "softcap": 3.0},
    "sink": {"causal": True, "sink": True},
}


@pytest.mark.parametrize("through_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("seqused", [False, True], ids=["whole", "seqused"])
@packed_or_dense
@each_of("options", FULLY_MASKED)
@pytest.mark.parametrize(
    ("backend", "head_dim"), [("portable", 16), *(pytest.param("sm90", d, marks=needs_kernels) for d in (64, 128, 256))]
)
def test_queries_that_see_no_key(
    backend: str, head_dim: int, options: Case, packed: bool, seqused: bool, through_lse: bool
) -> None:
    """Some blocks of queries see nothing, and some hold queries that do and queries that do not."""
    lengths = ([300, 129, 33, 90, 0, 77], [130, 1, 0, 30, 50, 77]) if packed or seqused else ([330] * 2, [130] * 2)
    shape: Case = {"nheads_k": 2, "head_dim": head_dim, "packed": packed, "seqused": seqused}
    call = call_on(backend, *lengths, **shape | options)
    assert_matches_oracle(call, through_lse=through_lse, backend=backend)
    assert_fully_masked_queries_reach_nothing(call, through_lse=through_lse, backend=backend)


@pytest.mark.parametrize("kept", [slice(1, -1), slice(2, 3)], ids=["between them", "no sequences"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_of_no_sequence(head_dim: int, kept: slice, device: str) -> None:
    """More than a tile of them before the first sequence and behind the last, or nothing but them."""
    shape: Case = {"nheads": 8, "nheads_k": 2, "head_dim": head_dim, "dtype": torch.bfloat16}
    call = random_call([150, 60, 250, 300], causal=True, sink=True, device=device, **shape)
    call = replace(call, cu_seqlens_q=call.cu_seqlens_q[kept], cu_seqlens_k=call.cu_seqlens_k[kept])
    poison_padding(call)
    assert_matches_oracle(call)
