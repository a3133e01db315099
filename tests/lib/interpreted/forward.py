"""The forward pass, executed by the interpreter of PTX, and compared with the oracle."""

import dataclasses
import functools
import math
import random
import struct
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn_cute.backends.cute import backend as cute_backend
from flash_attn_cute.backends.cute.backend import CuteBackend
from flash_attn_cute.backends.cute.plan import FEW_QUERIES, ForwardPlan, Shapes, plan_forward
from flash_attn_cute.kernels.arguments import BLOCK, ForwardArguments, ForwardNumbers
from flash_attn_cute.kernels.registry import ARCHITECTURES, Architecture
from flash_attn_cute.kernels.sm100.config import PART_ROWS
from flash_attn_cute.sparsity.bits import pack
from flash_attn_cute.spec import AttentionSpec
from tests.lib import oracle, ptx
from tests.lib.checks import assert_close
from tests.lib.compiled import code_for
from tests.lib.configurations import forward_paired
from tests.lib.interpreted.common import (
    B200,
    EMPTY,
    Executed,
    Memory,
    as_given,
    at,
    cut_mask,
    spread,
    table_argument,
    tensor_argument,
    tensors_of,
)
from tests.lib.oracle import Call

NUM_SMS = 2


def tables_of_mask(a: ForwardArguments, n: ForwardNumbers, keys: int) -> dict[str, Tensor]:
    """Tables that the kernels ahead of the main one make of a mask (``common.mask_tiles``), in their order.

    ``keys`` are those of a block.
    """
    codes, tiles = cut_mask(a, n, BLOCK, keys)
    blocks = codes.shape[1]
    entries, lists = torch.full((*codes.shape, 2), 2**30, dtype=torch.int32), []
    for number, row_of_codes in enumerate(codes):
        seen = (row_of_codes != EMPTY).nonzero().flatten()
        entries[number, : len(seen)] = torch.stack((seen, row_of_codes[seen]), 1)
        lists.append([number * blocks, len(seen)])
    return {
        "lists": torch.tensor(lists, dtype=torch.int32),
        "entries": entries.view(-1, 2),
        "codes": codes,
        "bits": pack(pad(tiles, (0, BLOCK - keys)))[..., : keys // 32].reshape(-1, 1, BLOCK, keys // 32).contiguous(),
    }


@functools.cache
def program(config: Any, kernel: str = "") -> ptx.Program:
    """A kernel's, by default that of the pass."""
    return ptx.Program(code_for(config).ptx, kernel or ("ForwardPair" if config.ctas_a_tile == 2 else "ForwardSm100"))


def planned(call: Call) -> tuple[Any, Any]:
    """The configuration of a call that kernels take as it is, dense or packed, and the numbers that they are given."""
    _, spec = as_given(call)
    num_sequences = 0 if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    shapes = Shapes(call.q.shape, call.k.shape, num_sequences, FEW_QUERIES + 1)
    config, numbers, _ = plan_forward(ARCHITECTURES["sm100"], spec, shapes, NUM_SMS)
    return config, numbers


@dataclasses.dataclass(frozen=True)
class Pass(Executed):
    """A forward pass, but for kernels ahead of the main one."""

    plan: ForwardPlan

    def __call__(self, a: ForwardArguments) -> None:
        """Runs the main kernel on the arguments."""
        config, numbers = self.plan.config, self.plan.numbers
        code = program(config) if self.changed is None else self.changed
        packed, memory, given = config.features.packed, Memory(), tensors_of(a)
        tables = self.tables_of(a)
        places = {name: memory.put(spread(x)) for name, x in (given | tables).items() if name != "mBias"}
        if a.mBias is not None:
            places["mBias"] = memory.put_last(spread(a.mBias))
        params, tensors = [bytes(32)] * 2, {}
        boxes = {"mQ": PART_ROWS, "mK": config.keys_shared, "mV": config.tile_n, "mO": PART_ROWS}
        if config.features.wide:  # it does not leave by TMA
            del boxes["mO"]
        for name, box in boxes.items():
            x = given[name]
            batch, strides = (0, x.stride()) if packed else (x.stride(0), x.stride()[1:])
            tensors[len(params)] = ptx.Rows(
                places[name] // 2, x.shape[-3], x.shape[-1], x.shape[-2], strides[0], strides[1], batch, box
            )
            params += [bytes(128), bytes(code.param_sizes[len(params) + 1])]
        order = [0, 2, 1] if packed else [1, 3, 2, 0]  # rows, columns, heads, batch
        by_rows, numbers_by_rows = given["mO"].permute(order), given["mLSE"].permute([1, 0] if packed else [2, 1, 0])
        params.append(tensor_argument(places["mO"], by_rows.shape, (by_rows.stride(0), *by_rows.stride()[2:])))
        params.append(tensor_argument(places["mLSE"], numbers_by_rows.shape, numbers_by_rows.stride()[1:]))
        params += self.arguments(given, places)
        params += [table_argument(name, places[name], x) for name, x in tables.items()]
        rest = numbers.softcap or numbers.softmax_scale
        tanh = numbers.softmax_scale / numbers.softcap if numbers.softcap else 1.0
        before_bias, behind = (rest, 1.0) if config.features.bias else (1.0, rest)
        params += [struct.pack("<f", x) for x in (tanh, before_bias, behind * math.log2(math.e))]
        heads, rows = a.mQ.shape[-2], a.mQ.shape[-3]
        tiles = -(-rows // config.tile_m) * heads * (1 if packed else a.mQ.shape[0])
        if a.mCuSeqlensQ is not None:
            tiles = (rows // config.tile_m + len(a.mCuSeqlensQ) + 1) * heads
        everything = memory.bytes()
        ctas = config.ctas_a_tile * min(tiles, NUM_SMS // config.ctas_a_tile)
        self.run(code, params, everything, tensors, ctas, config.ctas_a_tile)
        for name in ("mO", "mLSE", "mNextTile"):
            assert given[name].is_contiguous()
            given[name].copy_(at(everything, places[name], given[name]))
        assert not a.mNextTile[:1].any(), "the counter of tiles is not left as it was"

    def tables_of(self, a: ForwardArguments) -> dict[str, Tensor]:
        """Lists, entries and bits: of a block mask as they are, or made of a mask, with its codes."""
        if a.blocks.mTiles is not None:
            lists, entries, tiles = a.blocks.mSpans, a.blocks.mEntries, a.blocks.mTiles
            return {"lists": lists.view(-1, 2), "entries": entries.view(-1, 2), "bits": tiles.view(-1, 1, BLOCK, 4)}
        return {} if a.mMask is None else tables_of_mask(a, self.plan.numbers, self.plan.config.tile_n)


def by_pairs_of_ctas(architecture: Architecture) -> Architecture:
    """An architecture whose forward pass has the kernels of long sequences for all."""
    forward = architecture.passes["forward"]
    long = forward._replace(configure=lambda *given, **more: forward_paired(forward.configure(*given, **more)))
    return architecture._replace(passes=architecture.passes | {"forward": long})


class Interpreted(CuteBackend):
    """The backend, whose forward pass is executed by the interpreter."""

    def __init__(self, *, by_pairs: bool = False, capability: tuple[int, int] = B200, **options: Any):
        """``by_pairs``: with the kernel of long sequences, of any length."""
        architecture = ARCHITECTURES["sm100"].on(capability)
        super().__init__(by_pairs_of_ctas(architecture) if by_pairs else architecture)
        self.options = options
        self._prepare_forward = self.prepare  # type: ignore[assignment]

    def prepare(self, spec: AttentionSpec, q: Any, k: Any, num: int, few: bool, layout: Any, _: Any) -> Any:
        """Plans as ``_plan_forward`` does, without a GPU."""
        shapes = cute_backend._forward_shapes(q, k, num, few, layout)
        plan = plan_forward(self.architecture, spec, shapes, NUM_SMS)
        return cute_backend._Launch(Pass(plan, **self.options), plan, takes_tiles=True)


def execute(
    call: Call,
    draw: random.Random,
    changed: ptx.Program | None = None,
    lagging: ptx.Lagging | None = None,
    *,
    by_pairs: bool = False,
    wide: bool = False,
    capability: tuple[int, int] = B200,
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call; of a changed program instead of its configuration's, if there is one."""
    inputs, spec = as_given(call)
    spec = spec._replace(wide=wide)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(cute_backend, "next_tile", lambda: torch.zeros(4, dtype=torch.int32))
        backend = Interpreted(by_pairs=by_pairs, capability=capability, draw=draw, changed=changed, lagging=lagging)
        return backend._forward(spec, inputs)


def check(
    call: Call,
    draw: random.Random,
    changed: ptx.Program | None = None,
    lagging: ptx.Lagging | None = None,
    *,
    by_pairs: bool = False,
    capability: tuple[int, int] = B200,
) -> None:
    """A call's results against the oracle's, and what stands in the padding."""
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in ("q", "k", "v")})
    out, lse = execute(call, draw, changed, lagging, by_pairs=by_pairs, capability=capability)
    with torch.no_grad():
        expected, low = oracle.attention(call.to(torch.float64)), oracle.attention(call.to(call.q.dtype))
    for name, got, true, yardstick in zip(("out", "lse"), (out, lse), expected, low, strict=True):
        size = max(1.0, true[true.isfinite()].abs().max().item() if true.isfinite().any() else 0.0)
        assert_close(name, got, true, yardstick, 3.0 if call.softcap else 2.0, size)
    real = call.real_rows()[0]
    assert (out[~real] == 0).all(), "padding rows are not zero"
    assert lse.transpose(-1, -2)[~real].isneginf().all(), "lse: padding rows are not -inf"
