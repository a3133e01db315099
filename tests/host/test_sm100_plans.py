"""Blackwell's kernels: sizes within the machine's, and what calls are planned and warmed; nothing is compiled."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from flash_attn_cute import explain, flash_attn_func
from flash_attn_cute.backends.cute.plan import Shapes, plan_backward, plan_forward
from flash_attn_cute.calls.dispatch import BACKENDS, supposing
from flash_attn_cute.jit import __main__ as command
from flash_attn_cute.kernels.registry import ARCHITECTURES, pass_of
from flash_attn_cute.kernels.schedule import Schedule
from flash_attn_cute.kernels.sm100.backward.backward_schedule import backward_schedule
from flash_attn_cute.kernels.sm100.backward.bias_gradient_schedule import bias_gradient_schedule
from flash_attn_cute.kernels.sm100.config import HEAD_DIMS, O_COLUMNS, PART_ROWS, SHARED_MEMORY, TARGETS, TENSOR_COLUMNS
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward_schedule import forward_schedule
from tests.lib.configurations import B200, LONG, backward, bias_gradient, chosen
from tests.lib.specs import DENSE, spec_of

SM100 = ARCHITECTURES["sm100"]


@pytest.mark.parametrize("queries", [0, LONG])
@pytest.mark.parametrize("d", range(8, 264, 8))
def test_sizes(d: int, queries: int) -> None:
    """Within shared memory, tensor memory and registers; wide enough; rings of a power of 2."""
    for d_v in range(8, 264, 8):
        check_sizes(chosen((d, d_v), queries=queries), d, d_v)


def check_schedule(schedule: Schedule) -> None:
    """Shared memory suffices, and registers do for the warpgroups, each of which has one number of them."""
    assert schedule.num_bytes <= SHARED_MEMORY
    registers = {warp // 4: role.registers for role in schedule.roles for warp in role.warps}
    assert len(registers) == 4
    assert sum(registers.values()) <= 512
    assert all(24 <= x <= 256 and x % 8 == 0 for x in registers.values())


def check_sizes(c: ForwardConfig, d: int, d_v: int) -> None:
    if c.ctas_a_tile == 2:
        assert (c.tile_d, c.tile_dv) in ((192, 128), (256, 128), (256, 256))
        assert c.tile_dv // c.ctas_a_tile % O_COLUMNS == 0
    assert c.tile_d >= d
    assert c.tile_dv >= d_v
    check_schedule(forward_schedule(c))
    assert c.first_O(c.q_parts - 1) + c.tile_dv <= TENSOR_COLUMNS
    assert all(stages & stages - 1 == 0 for stages in (c.k_stages, c.v_stages, c.q_parts))
    assert c.blocks_ahead * c.q_parts == 2


@pytest.mark.parametrize("keys", [0, LONG])
@pytest.mark.parametrize("d", range(8, max(HEAD_DIMS) + 8, 8))
def test_backward_sizes(d: int, keys: int) -> None:
    """Within shared memory, tensor memory, whose parts do not overlap, and registers; rings of a power of 2."""
    for d_v in range(8, max(HEAD_DIMS) + 8, 8):
        c = backward((d, d_v), keys=keys)
        pair = keys > 0 and c.tile_d > 64
        assert c.ctas_a_tile == (2 if pair else 1)
        assert backward((d, d_v), "block_mask", keys=keys).ctas_a_tile == 1
        assert max(d, d_v) <= c.tile_d
        assert d_v <= c.tile_dv
        check_schedule(backward_schedule(c))
        sums = [(c.first_dV, c.tile_dv), (c.first_dK, c.tile_d)]  # in one place, if there are two passes
        parts = [(c.first_S, c.tile_m), (c.first_dP, c.tile_m), *(sums if c.num_passes == 1 else sums[1:])]
        parts += [(c.first_K, c.tile_d // 2)] if c.holds_keys else []
        parts += [(c.first_dQ(part), c.columns_dQ) for part in range(int(c.dQ_over_dP), c.parts_dQ)]
        if c.dQ_over_S:  # of one pass between two quarters, which hold P; else scores are read by then
            first, columns = parts.pop()
            P = c.queries // 2 if c.num_passes == 1 else 0
            assert first == c.first_S + P
            assert columns == c.tile_m - 2 * P
            assert c.num_passes == 2 or c.P_stride == P + columns
        parts.sort()
        assert all(first + columns <= behind for (first, columns), (behind, _) in itertools.pairwise(parts))
        assert sum(parts[-1]) <= TENSOR_COLUMNS
        if c.num_passes == 2:
            assert sums[0] == sums[1]
            assert pair or not c.dQ_over_dP
        if c.dQ_over_dP:  # which its first part does not reach beyond
            assert c.first_dQ(0) == c.first_dP
            assert c.columns_dQ <= c.tile_m
        # Rows of all products are lanes, or a part of dQ's are, which together are all of its columns.
        if c.transposes_dQ:
            starts = [c.first_row_dQ(part) for part in range(c.parts_dQ * c.ctas_a_tile)]
            assert starts[0] == 0
            assert starts[-1] + PART_ROWS == c.tile_d
            assert all(b - a <= PART_ROWS for a, b in itertools.pairwise(starts))
        else:
            assert c.tile_m == PART_ROWS
        assert all(stages & stages - 1 == 0 for stages in (c.kv_stages, c.q_stages, c.do_stages, c.parts_dQ))


@pytest.mark.parametrize("d_v", [192, 128])
def test_pairs_share_values_by_swizzled_rows(d_v: int) -> None:
    """No CTA can have half of 192 columns of v, and fewer than 128 are no pair's."""
    for d in (192, 256):
        assert chosen((d, d_v), queries=LONG).ctas_a_tile == (2 if d_v == 128 else 1)


@pytest.mark.parametrize("feature", ["mask", "block_mask", "bias"])
def test_pairs_know_no_masks(feature: str) -> None:
    assert chosen(256, queries=LONG).ctas_a_tile == 2
    assert chosen(256, feature, queries=LONG) == chosen(256, feature)


def test_pairs_are_planned_for_long_sequences() -> None:
    """By how many queries a sequence has, on average."""
    spec = spec_of(head_dim=256)
    for length, sequences, ctas in ((4096, 0, 2), (128, 0, 1), (4096, 4, 2), (4096, 32, 1)):
        rows = (2, length) if sequences == 0 else (length,)
        shapes = Shapes((*rows, 4, 256), (*rows, 4, 256), sequences, length)
        planned = plan_forward(SM100, spec, shapes, 148)
        assert planned.config.ctas_a_tile == ctas
        assert planned.config.tile_m == 128 * ctas
    q = torch.zeros(1, 4096, 2, 256, dtype=torch.bfloat16, device="meta")
    explained = explain(q, q, q, gpu="sm100", backend="sm100").forward
    assert explained is not None
    assert explained.cluster == 2


def test_pairs_are_planned_for_wide_windows() -> None:
    """By how many keys a query attends to between the bounds; a window of one bound is wide."""
    shapes = Shapes((2, 4096, 4, 128), (2, 4096, 4, 128), 0, 4096)
    for left, right, ctas in ((300, 0, 1), (383, 383, 1), (384, 383, 2), (767, 0, 2), (None, 0, 2), (0, None, 2)):
        spec = spec_of(window_left=left, window_right=right)
        planned = plan_backward(SM100, spec, shapes, 148)
        assert planned.config.ctas_a_tile == ctas, (left, right)
        forward = plan_forward(SM100, spec._replace(head_dim=192), shapes, 148)
        assert forward.config.ctas_a_tile == ctas, (left, right)


@pytest.mark.parametrize("d", range(8, max(HEAD_DIMS) + 8, 8))
def test_bias_gradient_sizes(d: int) -> None:
    """Within shared memory, tensor memory and registers; rings of a power of 2; blocks of the backward pass."""
    for d_v in range(8, max(HEAD_DIMS) + 8, 8):
        c, main = bias_gradient((d, d_v)), backward((d, d_v), "bias", keys=LONG)
        assert c.stats_m == main.tile_m
        assert main.ctas_a_tile == 1
        assert d <= c.tile_d
        assert d_v <= c.tile_dv
        check_schedule(bias_gradient_schedule(c))
        firsts = [*map(c.first_S, range(c.score_stages)), c.first_dP, c.first_bias, TENSOR_COLUMNS]
        assert all(b - a >= c.tile_n for a, b in itertools.pairwise(firsts))
        assert all(stages & stages - 1 == 0 for stages in (c.stages, c.score_stages))


def test_targets_have_kernels_of_their_own() -> None:
    for capability, target in TARGETS.items():
        config = plan_forward(SM100.on(capability), spec_of(), DENSE, 148).config
        assert config.target == target
        assert pass_of(config) is SM100.passes["forward"]
        assert config == dataclasses.replace(plan_forward(SM100, spec_of(), DENSE, 148).config, target=target)


def warmed(arguments: str) -> list[Any]:
    """Configurations that the command compiles ahead."""
    given = command.parser().parse_args(["warm", "--architecture", "sm100", *arguments.split()])
    return command.configurations(given)


def test_warming_is_for_all_gpus() -> None:
    for more in ("", "--passes bias_gradient --features bias"):
        assert {c.target for c in warmed(f"--masks full --layouts dense {more}")} == set(TARGETS.values())


def test_warming_refuses_passes_that_there_are_none_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = SM100._replace(passes={"forward": SM100.passes["forward"]})
    monkeypatch.setitem(command._ARCHITECTURES, "sm100", lacking)
    with pytest.raises(ValueError, match="--passes: expected some of forward for sm100, got bias_gradient"):
        warmed("--passes bias_gradient")


def test_warming_is_for_all_lengths() -> None:
    """Where long sequences get other kernels."""
    for name, d, mask in (("backward", 128, "causal"), ("forward", 256, "causal"), ("backward", 256, "window")):
        found = warmed(f"--masks {mask} --passes {name} --layouts dense --dtypes float16 --head-dims 64 {d}")
        assert sorted(c.ctas_a_tile for c in found if c.tile_d == d and c.target == B200) == [1, 2]
        assert {c.ctas_a_tile for c in found if c.tile_d < 128} == {1}


def test_warming_of_a_bias_compiles_its_gradient() -> None:
    for feature, more in (("block_mask", set()), ("bias", {"bias_gradient"})):
        found = warmed(f"--masks full --layouts dense --head-dims 256 --features {feature}")
        assert {c.pass_name for c in found} == {"forward", "backward"} | more


def test_heads_of_a_group_never_share_a_tile() -> None:
    spec = spec_of(nheads_k=1)
    few = plan_forward(SM100, spec, DENSE._replace(max_seqlen_q=1), 148)
    assert few.config == plan_forward(SM100, spec, DENSE, 148).config
    assert few.numbers.heads_in_cache > 0


def test_only_those_who_ask_get_it() -> None:
    """It has not run on such a GPU yet."""
    names = list(BACKENDS)
    assert names.index("portable") < names.index("sm100")
    assert list(supposing("sm100")) == ["portable", "sm100"]
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"got 'sm100', which cannot: tensors on cpu$"):
        flash_attn_func(q, q, q, backend="sm100")


def test_gradients_are_planned() -> None:
    q, v = (torch.zeros(1, 8, 2, d, dtype=torch.bfloat16, device="meta") for d in (256, 200))
    mask = torch.ones(8, 8, dtype=torch.bool, device="meta")
    for given in ((None, None), (mask, None), (None, mask.to(q.dtype))):
        explained = explain(q, q, v, mask=given[0], bias=given[1], gpu="sm100", backend="sm100")
        assert explained.backward is not None
