"""Gradients under a bias, and that of the bias, on Blackwell: executed on the CPU from PTX, against the oracle."""

import functools
import random
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute.backends.cute import backend as cute_backend
from flash_attn_cute.backends.cute.plan import BackwardPlan, BiasGradientPlan, Shapes, plan_bias_gradient
from flash_attn_cute.kernels.arguments import BLOCK, BackwardArguments, BiasGradientArguments
from flash_attn_cute.spec import AttentionSpec
from tests.blackwell.test_sm100 import (
    Executed,
    Memory,
    at,
    spread,
    table_argument,
    tensor_argument,
    tensors_of,
    text_of,
)
from tests.blackwell.test_sm100_backward import EVERYTHING, LOG2_E, Interpreted, Pass, check, execute
from tests.blackwell.test_sm100_masks import drawn, with_block_mask
from tests.lib import oracle, ptx
from tests.lib.checks import assert_close, bitwise_equal, gradients, poisoned_dout, random_call, rounding_over_keys
from tests.lib.oracle import Call


@functools.cache
def program(config: Any, kernel: str) -> ptx.Program:
    return ptx.Program(text_of(config), kernel)


MAIN, ADD_UP, CUT = "BiasGradientSm100_object_at__TiledMMA", "cutlass_add_up", "PieceTiles"  # parts of kernels' names


@dataclass(frozen=True)
class Gradient(Executed):
    """The pass that computes a bias's gradient, with all its kernels."""

    plan: BiasGradientPlan

    def __call__(self, a: BiasGradientArguments) -> None:
        """Runs its kernels on the arguments."""
        config, n = self.plan.config, self.plan.numbers
        code, packed, memory = self.changed or program(config, MAIN), config.features.packed, Memory()
        given, tables = tensors_of(a), self.tables(a)
        places = {name: memory.put(spread(x)) for name, x in (given | tables).items() if name != "mBias"}
        places["mBias"] = memory.put_last(spread(a.mBias))
        params: list[bytes] = [bytes(32)]
        tensors: dict[int, ptx.Rows] = {}
        for name, rows in (("mQ", config.tile_m), ("mK", config.tile_n), ("mdO", config.tile_m), ("mV", config.tile_n)):
            x = given[name]
            batch, strides = (0, x.stride()) if packed else (x.stride(0), x.stride()[1:])
            tensors[len(params)] = ptx.Rows(
                places[name] // 2, x.shape[-3], x.shape[-1], x.shape[-2], strides[0], strides[1], batch, rows
            )
            params += [bytes(128), bytes(code.param_sizes[len(params) + 1])]
        arguments = self.arguments(given, places)
        heads = a.mQ.shape[-2]
        stats = tensor_argument(
            places["mWorkspace"],
            (heads, n.num_m_blocks),
            (heads * n.num_m_blocks * config.stats_m, n.num_m_blocks * config.stats_m),
        )
        rest = n.softcap or n.softmax_scale
        tanh = n.softmax_scale / n.softcap if n.softcap else 1.0
        owners = self.owners(a)
        sums = [tensor_argument(places["mSums"], (owners * n.splits,), ())] if config.split else []
        scales = [struct.pack("<f", x) for x in (tanh, rest, LOG2_E)]
        told = [table_argument(name, places[name], x) for name, x in tables.items()]
        everything = memory.bytes()
        if config.features.mask:
            cut = [*arguments, *reversed(told)]  # codes, then bits
            self.run(program(config, CUT), cut, everything, {}, tables["codes"].numel())
        self.run(code, [*params, *arguments, *told, stats, *sums, *scales], everything, tensors, owners * n.splits)
        if config.split:
            self.run(program(config, ADD_UP), [*arguments, *sums], everything, {}, owners)
        assert a.mdBias.is_contiguous()
        a.mdBias.copy_(at(everything, places["mdBias"], a.mdBias))

    def tables(self, a: BiasGradientArguments) -> dict[str, Tensor]:
        """Of a block mask what tells of it, or room for what a kernel ahead makes of a mask."""
        config, n, blocks = self.plan.config, self.plan.numbers, a.blocks
        if blocks.mTiles is not None:
            tables = {"bits": blocks.mTiles.view(-1, 1, BLOCK, BLOCK // 32)}
            return tables | {"lists": blocks.mSpans.view(-1, 2), "entries": blocks.mEntries.view(-1, 2)}
        if a.mMask is None:
            return {}
        codes = torch.full((n.lists_batch * n.lists_heads * n.lists_tiles, -(-a.mMask.shape[3] // config.tile_n)), -3)
        bits = torch.full((codes.numel(), 1, config.tile_m, config.mask_tile.words), -3)
        return {"bits": bits.int(), "codes": codes.int()}

    def owners(self, a: BiasGradientArguments) -> int:
        """Tiles of the gradient."""
        config, n = self.plan.config, self.plan.numbers
        entries, blocks = a.mQ.shape[0], -(-a.mQ.shape[-3] // config.tile_m)
        if config.features.packed:
            assert a.mCuSeqlensQ is not None
            entries, blocks = 1, a.mQ.shape[0] // config.tile_m + len(a.mCuSeqlensQ) + 1
            if n.entries:
                entries, blocks = n.entries, -(-n.rows_a_slot // config.tile_m)
        entries, blocks = 1 if n.sums_batch else entries, 1 if n.sums_queries else blocks
        return int(entries * blocks * a.mdBias.shape[1] * -(-a.mdBias.shape[3] // config.tile_n))


class Ahead(Pass):
    """Of a backward pass only what it leaves to others."""

    def __call__(self, a: BackwardArguments) -> None:
        """Runs no kernel."""
        self.prepare(a, *self.parts(a))


class WithGradient(Interpreted):
    """The backend, whose backward pass, and that of a bias's gradient, are executed by the interpreter."""

    def __init__(
        self,
        draw: random.Random,
        num_sms: int = 2,
        changed: ptx.Program | None = None,
        lagging: ptx.Lagging | None = None,
        *,
        is_alone: bool = False,
    ):
        """Its options.

        Args:
            draw: decides whose turn it is.
            num_sms: of a GPU; tiles are split between CTAs where it has more SMs than there are tiles.
            changed: instead of the kernel of the bias's gradient.
            lagging: in that kernel.
            is_alone: only that kernel is executed.
        """
        super().__init__(draw)
        self.num_sms_split, self.changed_gradient, self.lagging_gradient = num_sms, changed, lagging
        self.is_alone, self.launches = is_alone, True
        self.plans: list[BiasGradientPlan] = []  # of gradients that have been asked for
        self._prepare_bias_gradient = self.prepare_gradient  # type: ignore[assignment]

    def prepare(self, *given: Any) -> Any:
        """As of ``Interpreted``."""
        launch = super().prepare(*given)
        if not self.is_alone:
            return launch
        return launch._replace(kernel=Ahead(launch.plan, self.draw, None, None, self.num_ctas))

    def prepare_gradient(
        self, spec: AttentionSpec, q: Any, k: Any, num: int, layout: Any, backward: BackwardPlan, *given: Any
    ) -> Any:
        """What ``_plan_bias_gradient`` does, without a GPU."""
        slots, shape, _ = given
        shapes = Shapes(q, k, num, 0, scores=layout)
        plan = plan_bias_gradient(self.architecture, spec, shapes, backward, slots, shape, self.num_sms_split)
        self.plans.append(plan)
        launched = Gradient(plan, self.draw, self.changed_gradient, self.lagging_gradient)
        return cute_backend._Launch(launched if self.launches else lambda a: None, plan, takes_tiles=False)


def check_dbias(call: Call, backend: WithGradient) -> None:
    """The gradient of a bias against the oracle's, and zeros in its padding."""
    assert call.bias is not None
    truth, low = call.to(torch.float64), call.to(call.q.dtype)
    (out, lse), (low_out, low_lse) = oracle.attention(truth), oracle.attention(low)
    dout, dlse = poisoned_dout(call, out.to(call.q.dtype)), torch.randn(lse.shape)
    got = execute(call, backend, lse.detach().float(), dout, dlse)["dbias"]
    expected = gradients(truth, out, lse, dout, dlse)["dbias"]
    yardstick = gradients(low, low_out, low_lse, dout, dlse)["dbias"]
    room = 0.0
    if got.ndim == 0 or got.shape[-1] == 1:
        room = rounding_over_keys(got.shape, low_out - out, dout)
    size = max(1.0, expected.abs().max().item())
    assert_close("dbias", got, expected, yardstick, 3.0 if call.softcap else 2.0, size, room)
    assert (got[call.score_padding(call.bias)] == 0).all(), "dbias: padding is not zero"


def with_extremes(call: Call, *, lowest: bool = True) -> Call:
    """The call with hidden keys and queries, and biases as large as additive masks have them.

    ``lowest``: the least there is among them, too, of all but the first keys. A query that sees no others is blind.
    """
    assert call.bias is not None
    with torch.no_grad():
        if call.bias.ndim and call.bias.shape[-1] > 1:
            call.bias[..., ::7] = -torch.inf
        if call.bias.ndim > 1 and call.bias.shape[-2] > 40:
            call.bias[..., 5, :] = -torch.inf
            if call.bias.shape[-1] > 10:
                call.bias[..., 30:40, 10] = 1e4
                if lowest and call.window_size == (None, None):  # else queries may not see the first keys
                    call.bias[..., 10:20, 3:] = torch.finfo(call.bias.dtype).min
    return call


def drawn_call(lengths_q: list[int], lengths_k: list[int], *, lowest: bool = True, **options: Any) -> Call:
    given: dict[str, Any] = {"dtype": torch.bfloat16, "packed": False, "head_dim": 64, "nheads": 1}
    return with_extremes(random_call(lengths_q, lengths_k, **given | options), lowest=lowest)


def check_all(call: Call, backend: WithGradient, *, through_lse: bool) -> None:
    """All gradients, and zeros in the padding of the bias's."""
    assert call.bias is not None
    got = check(call, backend, through_lse=through_lse)
    assert (got["dbias"][call.score_padding(call.bias)] == 0).all(), "dbias: padding is not zero"


# Every score has an element of its own, of q's dtype: the kernel that computes the gradients of scores stores them.
OWN: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([150], [260], {"head_dim": 128, "bias": (1, 1)}),
    "d64-causal-sliced": ([140], [201], {"bias": (1, 1, 1), "bias_layout": "sliced", "causal": True, "nheads": 2}),
    "d64-grouped": ([100, 100], [130, 130], {"bias": (1, 1, 1, 1), "nheads": 4, "nheads_k": 1}),
    "d192-dv128-window": ([70], [140], {"head_dim": 192, "head_dim_v": 128, "bias": (1, 1), "window_size": (20, 30)}),
    "d256-float16": ([70], [141], {"head_dim": 256, "bias": (1, 1), "dtype": torch.float16, "sink": True}),
    "d64-packed": ([150, 0, 60], [130, 7, 140], {"packed": True, "bias": (1, 1, 1), "bias_layout": "transposed"}),
}


@pytest.mark.parametrize("case", OWN)
def test_own_biases(case: str, fuzz_seconds: float) -> None:
    lengths_q, lengths_k, options = OWN[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        backend = WithGradient(draw)
        check_all(drawn_call(lengths_q, lengths_k, **options), backend, through_lse=len(case) % 2 == count % 2)
        assert not backend.plans


# Of any other shape, layout and dtype, without a gradient.
GIVEN: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d64-keys": ([140], [150], {"bias": (1,), "bias_dtype": torch.float32, "bias_layout": "sliced", "nheads": 2}),
    "d128-everything": ([100, 1, 30], [150, 3, 0], {"bias": (0, 1, 1), "head_dim": 128, **EVERYTHING, "packed": True}),
    "d64-grouped": ([140], [150], {"bias": (1, 1, 0), "nheads": 4, "nheads_k": 1, "bias_dtype": torch.float32}),
    "d192-everything": ([70, 1], [130, 3], {"bias": (1, 0, 1, 1), "head_dim": 192, **EVERYTHING, "nheads_k": 1}),
    "d64-blind-transposed": (
        [200],
        [140],
        {"bias": (0, 1, 1), "bias_layout": "transposed", "causal": True, "nheads": 2},
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_given_biases(case: str, fuzz_seconds: float) -> None:
    lengths_q, lengths_k, options = GIVEN[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = drawn_call(lengths_q, lengths_k, **options)
        assert call.bias is not None
        call.bias.requires_grad_(False)
        check(call, Interpreted(draw), through_lse=len(case) % 2 == count % 2)


# Beside a mask, some of whose blocks are hidden and others whole, or a block mask: whether both kernels are executed.
MASKED: dict[str, tuple[list[int], list[int], dict[str, Any], bool]] = {
    "d64-own": ([200], [300], {"bias": (1, 1, 1), "mask": (1, 1), "window_size": (150, None)}, True),
    "d128-own-block-mask": ([200], [300], {"bias": (1, 1, 1), "head_dim": 128, "nheads": 2, "nheads_k": 1}, True),
    "d256-block-mask": ([200], [300], {"bias": (1, 1), "head_dim": 256, "nheads": 2}, False),
    "d64-everything": ([150, 1], [200, 0], {"bias": (1, 0, 1), "mask": (1, 1), **EVERYTHING, "nheads": 1}, True),
    "d64-packed": (
        [150, 0, 60],
        [200, 7, 140],
        {"packed": True, "bias": (0, 1, 1), "mask": (1, 1), "nheads": 2},
        False,
    ),
}


@pytest.mark.parametrize("case", MASKED)
def test_biases_beside_masks(case: str, fuzz_seconds: float) -> None:
    lengths_q, lengths_k, options, runs_both = MASKED[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = drawn_call(lengths_q, lengths_k, lowest="mask" in options, **options)
        if call.mask is None:
            call = with_block_mask(call, draw)
        else:
            call.mask[..., :128, 128:256], call.mask[..., :128, :128] = False, True
        if runs_both:
            check_all(call, WithGradient(draw), through_lse=count % 2 == 0)
        else:
            check_dbias(call, WithGradient(draw, is_alone=True))


# Others have a kernel of their own, which adds up what the bias was broadcast over; the last number is that of SMs.
SHARED: dict[str, tuple[list[int], list[int], dict[str, Any], int]] = {
    "d64-batch": ([140, 140], [150, 150], {"bias": (1, 1, 1), "nheads": 2}, 2),
    "d128-keys-uniform": ([140], [150], {"bias": (1, 0, 1), "head_dim": 128, "nheads": 2}, 2),
    "d64-queries": ([140], [150], {"bias": (1, 1, 0), "nheads": 2, "nheads_k": 1}, 2),
    "d64-number": ([140], [150], {"bias": (), "window_size": (30, 20)}, 2),
    "d64-softcap-transposed": ([140], [150], {"bias": (1, 1), "softcap": 5.0, "bias_layout": "transposed"}, 2),
    "d128-float32-split": ([70] * 4, [80] * 4, {"bias": (1, 1), "bias_dtype": torch.float32, "head_dim": 128}, 2),
    "d64-packed-keys": ([150, 0, 60], [130, 7, 140], {"packed": True, "bias": (1, 0, 1), "causal": True}, 2),
    "d64-everything": ([140, 1], [200, 3], {"bias": (1, 1, 1), "nheads_k": 1, "nheads": 2, **EVERYTHING}, 2),
    "d64-padded-batch": ([140, 30], [60, 200], {"bias": (1, 1, 1), "seqused": True, "causal": True}, 2),
    "d256-float16": ([70, 70], [141, 141], {"head_dim": 256, "bias": (1, 1), "dtype": torch.float16}, 2),
}


@pytest.mark.parametrize("case", SHARED)
def test_shared_biases(case: str, fuzz_seconds: float) -> None:
    lengths_q, lengths_k, options, num_sms = SHARED[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        backend = WithGradient(draw, num_sms, is_alone=True)
        check_dbias(drawn_call(lengths_q, lengths_k, **options), backend)
        (plan,) = backend.plans
        assert plan.config.split == case.endswith("split")


def test_schedules_give_the_same_bits() -> None:
    """Of shared biases, split between CTAs or not: the same number of them each time."""
    for bias, num_sms in (((1, 1, 1), 1), ((1, 0, 1), 4)):
        call = drawn_call([140] * 2, [150] * 2, bias=bias)
        out, lse = oracle.attention(call.to(torch.float64))
        dout = poisoned_dout(call, out.to(call.q.dtype))
        first, second = (
            execute(call, WithGradient(random.Random(n), num_sms, is_alone=True), lse.detach().float(), dout, None)
            for n in range(2)
        )
        assert bitwise_equal(first["dbias"], second["dbias"])
