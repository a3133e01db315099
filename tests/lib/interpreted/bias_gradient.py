"""The pass that computes a bias's gradient, executed by the interpreter of PTX, and compared with the oracle."""

import functools
import random
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.cute import backend as cute_backend
from flash_attn_cute.backends.cute.plan import BackwardPlan, BiasGradientPlan, Shapes, plan_bias_gradient
from flash_attn_cute.kernels.arguments import BLOCK, BackwardArguments, BiasGradientArguments
from flash_attn_cute.spec import AttentionSpec
from tests.lib import oracle, ptx
from tests.lib.checks import assert_close, gradients, poisoned_dout, rounding_over_keys
from tests.lib.compiled import code_for
from tests.lib.interpreted.backward import LOG2_E, Interpreted, Pass, execute
from tests.lib.interpreted.common import Executed, Memory, at, spread, table_argument, tensor_argument, tensors_of
from tests.lib.oracle import Call


@functools.cache
def program(config: Any, kernel: str) -> ptx.Program:
    return ptx.Program(code_for(config).ptx, kernel)


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
        described = [table_argument(name, places[name], x) for name, x in tables.items()]
        everything = memory.bytes()
        if config.features.mask:
            cut = [*arguments, *reversed(described)]  # codes, then bits
            self.run(program(config, CUT), cut, everything, {}, tables["codes"].numel())
        self.run(code, [*params, *arguments, *described, stats, *sums, *scales], everything, tensors, owners * n.splits)
        if config.split:
            self.run(program(config, ADD_UP), [*arguments, *sums], everything, {}, owners)
        assert a.mdBias.is_contiguous()
        a.mdBias.copy_(at(everything, places["mdBias"], a.mdBias))

    def tables(self, a: BiasGradientArguments) -> dict[str, Tensor]:
        """Tables of a block mask, or room for those that a kernel ahead makes of a mask."""
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
    """A backward pass that does only the work that it leaves to others."""

    def __call__(self, a: BackwardArguments) -> None:
        """Takes arguments and runs no kernel."""
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
        """Prepares a call as ``Interpreted`` does."""
        launch = super().prepare(*given)
        if not self.is_alone:
            return launch
        return launch._replace(kernel=Ahead(launch.plan, self.draw, None, None, self.num_ctas))

    def prepare_gradient(
        self, spec: AttentionSpec, q: Any, k: Any, num: int, layout: Any, backward: BackwardPlan, *given: Any
    ) -> Any:
        """Plans as ``_plan_bias_gradient`` does, without a GPU."""
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
