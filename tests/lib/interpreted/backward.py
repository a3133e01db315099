"""The backward pass, executed by the interpreter of PTX, and compared with the oracle.

The backend's own code prepares its arguments. The kernel ahead of it, which is the Hopper kernels', is a few lines of
PyTorch here: ``Pass.stats``.
"""

import functools
import itertools
import math
import random
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn_cute.backends.cute import backend as cute_backend
from flash_attn_cute.backends.cute.backend import CuteBackend
from flash_attn_cute.backends.cute.plan import BackwardPlan, Shapes, plan_backward
from flash_attn_cute.kernels.arguments import BLOCK, PART_ALIGN, BackwardArguments
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.kernels.sm100.config import COMPUTE_WARPGROUPS, PART_ROWS
from flash_attn_cute.sparsity.bits import pack, unpack
from flash_attn_cute.spec import AttentionSpec
from tests.lib import oracle, ptx
from tests.lib.checks import assert_close, gradients, poisoned_dout
from tests.lib.compiled import code_for
from tests.lib.configurations import paired
from tests.lib.interpreted.common import (
    B200,
    EMPTY,
    Executed,
    Memory,
    as_given,
    cut_mask,
    sequences_of,
    spread,
    table_argument,
    tensor_argument,
    tensors_of,
)
from tests.lib.oracle import Call

NUM_SMS = 2
LOG2_E = math.log2(math.e)
LOWEST_LSE = -(2.0**20)  # as in ``common.score``
TABLES = ("codes", "bits", "order", "adding", "lists", "entries")  # of ``common.workspace.Workspace``, in its order
NO_LIST, NO_ENTRY = 2**29, 2**30  # where there is none, in tables


def bits_of(tiles: Tensor, config: Any) -> Tensor:
    """Tiles of 128 keys (..., queries, 128), cut into blocks of queries, in the order of threads: see ``mask_tile``.

    (tile and its part, warpgroup, key, word).
    """
    columns = config.tile_m // COMPUTE_WARPGROUPS
    by_key = tiles.reshape(-1, COMPUTE_WARPGROUPS, columns, PART_ROWS).transpose(2, 3)
    return pack(pad(by_key, (0, PART_ROWS - columns)))[..., : columns // 32].contiguous()


def tables_of_mask(a: BackwardArguments, plan: BackwardPlan) -> dict[str, Tensor]:
    """Tables of a mask, as the kernels ahead of the main one make them: see ``common.key_lists``."""
    config, n, packed = plan.config, plan.numbers, plan.config.features.packed
    codes, tiles = cut_mask(a, n, config.tile_m, config.tile_n, rows_are_keys=True)
    seen = codes != EMPTY
    behind = seen.flip(1).cumsum(1).flip(1).int() - seen.int()  # tiles are taken from the last keys on
    sets, blocks = n.lists_batch * n.lists_heads, codes.shape[1]
    m_blocks = n.num_m_blocks if packed else -(-a.mQ.shape[1] // config.tile_m)
    key_tiles = n.num_n_blocks if packed else blocks
    lists = torch.full((sets * key_tiles, 2), NO_LIST, dtype=torch.int32)
    entries = torch.full((sets * blocks * m_blocks, 3), NO_ENTRY, dtype=torch.int32)
    for s, (start_q, start_k, num_q, num_k) in enumerate(sequences_of(a) if packed else sequences_of(a)[:1]):
        first_block, first_tile = (start_q // config.tile_m + s, start_k // config.tile_n + s) if packed else (0, 0)
        for which, block in itertools.product(range(sets), range(-(-num_k // config.tile_n))):
            first, num = (which * blocks + block) * m_blocks + first_block, 0
            for m_block in range(-(-num_q // config.tile_m) if block < blocks else 0):
                row = which * n.lists_tiles + (first_block + m_block) % n.lists_tiles
                if seen[row, block]:
                    found = m_block, codes[row, block], behind[row, block]
                    entries[first + num] = torch.tensor(found, dtype=torch.int32)
                    num += 1
            lists[which * key_tiles + first_tile + block] = torch.tensor([first, num], dtype=torch.int32)
    tables = codes, bits_of(tiles, config), behind, seen.sum(1, dtype=torch.int32), lists, entries
    return dict(zip(TABLES, tables, strict=True))


@functools.cache
def program(config: Any, kernel: str = "") -> ptx.Program:
    """Program of one of a configuration's kernels; else of the main one."""
    kernels = {
        (1, 1): "BackwardCta",
        (2, 1): "BackwardTwoPass",
        (1, 2): "BackwardPair",
        (2, 2): "BackwardPairTwoPass",
    }
    return ptx.Program(code_for(config).ptx, kernel or kernels[config.num_passes, config.ctas_a_tile])


@dataclass(frozen=True)
class Pass(Executed):
    """A backward pass, but for kernels ahead of the main one."""

    plan: BackwardPlan
    num_ctas: int

    def __call__(self, a: BackwardArguments) -> None:
        """Runs the main kernel on the arguments."""
        config, n = self.plan.config, self.plan.numbers
        code, packed = self.changed or program(config), config.features.packed
        parts, places = self.parts(a)
        self.prepare(a, parts, places)
        memory, given, tables = Memory(), tensors_of(a), self.tables_of(a)
        at = {name: memory.put(spread(x)) for name, x in (given | tables).items() if name != "mBias"}
        if a.mBias is not None:
            at["mBias"] = memory.put_last(spread(a.mBias))
        params: list[bytes] = [bytes(32)] * (5 if config.holds_keys else 4)  # products
        tensors: dict[int, ptx.Rows] = {}
        queries = config.tile_m // config.ctas_a_tile
        boxes = [("mQ", queries, 64), ("mdO", queries, 64)]
        by_tma = "mK", "mV", *(() if config.features.wide else ("mdK", "mdV"))
        boxes += [(name, PART_ROWS, 64) for name in by_tma]
        if config.ctas_a_tile == 2:  # by columns as well, of 192 half of which are 3 times 32
            columns, columns_v = (32 if d == 192 else 64 for d in (config.tile_d, config.tile_dv))
            boxes += [("mQ", config.tile_m, columns), ("mdO", config.tile_m, columns_v), ("mK", PART_ROWS, 64)]
        for name, rows, columns in boxes:
            x = given[name]
            batch, strides = (0, x.stride()) if packed else (x.stride(0), x.stride()[1:])
            tensors[len(params)] = ptx.Rows(
                at[name] // 2, x.shape[-3], x.shape[-1], x.shape[-2], strides[0], strides[1], batch, rows, columns
            )
            params += [bytes(128), bytes(code.param_sizes[len(params) + 1])]
        for name in ("mdK", "mdV"):
            x = given[name].permute([0, 2, 1] if packed else [1, 3, 2, 0])
            params.append(tensor_argument(at[name], x.shape, (x.stride(0), *x.stride()[2:])))
        params += self.arguments(given, at)
        params += self.workspace(a, tables, at)
        rest = n.softcap or n.softmax_scale
        tanh = n.softmax_scale / n.softcap if n.softcap else 1.0
        before_bias, behind = (rest, 1.0) if config.features.bias else (1.0, rest)
        params += [struct.pack("<f", x) for x in (tanh, before_bias, behind * LOG2_E)]
        everything = memory.bytes()
        self.run(code, params, everything, tensors, self.num_ctas, config.ctas_a_tile)
        for name in given.keys() & {"mdQ", "mdK", "mdV", "mdBias", "mNextTile"}:
            x = given[name]
            assert x.is_contiguous()
            found = torch.from_numpy(everything[at[name] : at[name] + x.numel() * x.element_size()])
            x.copy_(found.view(x.dtype).view(x.shape))
        assert not given["mNextTile"][:2].any(), "the counters of tiles are not left as they were"

    def parts(self, a: BackwardArguments) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Shapes and places of the workspace's parts, but for tables of a mask."""
        n = self.plan.numbers
        parts = self.plan.config.parts(a.mQ.shape[-2], n.num_m_blocks, 1, a.mK.shape[-2], n.num_n_blocks, None)
        places, size = {}, 0
        for name, shape in parts.items():
            places[name] = size
            size += -(-4 * math.prod(shape) // PART_ALIGN) * PART_ALIGN
        return parts, places

    def workspace(self, a: BackwardArguments, tables: dict[str, Tensor], at: dict[str, int]) -> list[bytes]:
        """``Workspace`` as every kernel of the pass gets it."""
        params, (parts, places) = [], self.parts(a)
        for name in ("mStats", "mdQaccum", "mdKVaccum", *TABLES, "mSemaphoresQ", "mSemaphoresK"):
            if name in tables and tables[name] is a.mContributors:
                params.append(tensor_argument(at[name], tables[name].shape, tables[name].stride()))
            elif name in tables:
                params.append(table_argument(name, at[name], tables[name]))
            elif name in parts:
                # Compact. The first size, but for dQ, and the last but for counters, are known to who compiles.
                shape = parts[name]
                sizes = shape[:2] if name == "mdQaccum" else shape[1:3]
                strides = tuple(math.prod(shape[i:]) for i in range(1, len(sizes) + (name != "mdQaccum")))
                params.append(tensor_argument(at["mWorkspace"] + places[name], sizes, strides))
        return params

    def tables_of(self, a: BackwardArguments) -> dict[str, Tensor]:
        """Tables of a mask, some of ``TABLES``, as the kernels ahead make them."""
        if a.blocks.mTiles is not None:
            blocks = a.blocks
            return {
                "bits": bits_of(unpack(blocks.mTiles.view(-1, BLOCK, BLOCK // 32)), self.plan.config),
                "adding": a.mContributors,
                "lists": blocks.mSpans.view(-1, 2),
                "entries": blocks.mEntries.view(-1, 3),
            }
        return {} if a.mMask is None else tables_of_mask(a, self.plan)

    def prepare(self, a: BackwardArguments, parts: dict[str, tuple[int, ...]], places: dict[str, int]) -> None:
        """Fills the workspace as the main kernel finds it: lse, delta, and counters of 0; in gradients NaN."""
        a.mWorkspace.fill_(255)
        for gradient in (a.mdQ, a.mdK, a.mdV):
            gradient.fill_(torch.nan)

        def part(name: str, dtype: torch.dtype) -> Tensor:
            size = 4 * math.prod(parts[name])
            return a.mWorkspace[places[name] : places[name] + size].view(dtype).view(parts[name])

        for name in parts.keys() & {"mSemaphoresQ", "mSemaphoresK"}:
            part(name, torch.int32).zero_()
        stats = part("mStats", torch.float32)
        stats[0], stats[1] = torch.inf, 0.0
        for block, (batch, rows) in self.blocks(a).items():
            o, do = ((x if batch is None else x[batch])[rows].float() for x in (a.mO, a.mdO))
            lse, dlse = (None if x is None else (x if batch is None else x[batch])[:, rows] for x in (a.mLSE, a.mdLSE))
            assert lse is not None
            seen = ~lse.isneginf() if a.mBias is None else lse >= LOWEST_LSE
            delta = torch.where(o != 0, o * do, 0.0).sum(-1).T
            delta = delta if dlse is None else delta - dlse
            stats[0, :, block, : o.shape[0]] = torch.where(seen, lse * (LOG2_E if a.mBias is None else 1.0), torch.inf)
            stats[1, :, block, : o.shape[0]] = torch.where(seen, delta, 0.0)

    def blocks(self, a: BackwardArguments) -> dict[int, tuple[int | None, slice]]:
        """Blocks of the workspace, and which rows of which entry of the batch they are."""
        tile = self.plan.config.tile_m
        found: dict[int, tuple[int | None, slice]] = {}
        if a.mCuSeqlensQ is None:
            batch, length = a.mQ.shape[:2]
            per_entry = -(-length // tile)
            for b, i in itertools.product(range(batch), range(per_entry)):
                found[b * per_entry + i] = b, slice(i * tile, min((i + 1) * tile, length))
            return found
        offsets = a.mCuSeqlensQ.tolist()
        for b, (start, stop) in enumerate(itertools.pairwise(offsets)):
            length = stop - start if a.mSeqUsedQ is None else min(int(a.mSeqUsedQ[b]), stop - start)
            for i in range(-(-length // tile)):
                found[start // tile + b + i] = None, slice(start + i * tile, start + min((i + 1) * tile, length))
        return found


class Interpreted(CuteBackend):
    """The backend, whose backward pass is executed by the interpreter."""

    def __init__(
        self,
        draw: random.Random,
        num_ctas: int = NUM_SMS,
        changed: ptx.Program | None = None,
        lagging: ptx.Lagging | None = None,
        *,
        by_pairs: bool = False,
        capability: tuple[int, int] = B200,
    ):
        """``by_pairs``: with the kernel of long sequences, of any length."""
        architecture = ARCHITECTURES["sm100"].on(capability)
        if by_pairs:
            backward = architecture.passes["backward"]
            configured = backward._replace(configure=lambda *given, **more: paired(backward.configure(*given, **more)))
            architecture = architecture._replace(passes=architecture.passes | {"backward": configured})
        super().__init__(architecture)
        self.draw, self.num_ctas, self.changed, self.lagging = draw, num_ctas, changed, lagging
        self._prepare_backward = self.prepare  # type: ignore[assignment]

    def prepare(
        self, spec: AttentionSpec, q: Any, k: Any, num: int, longest: int, dlse: bool, layout: Any, _: Any
    ) -> Any:
        """Plans as ``_plan_backward`` does, without a GPU."""
        plan = plan_backward(self.architecture, spec, Shapes(q, k, num, longest, dlse, layout), self.num_ctas)
        return cute_backend._Launch(
            Pass(plan, self.draw, self.changed, self.lagging, self.num_ctas), plan, takes_tiles=True
        )


def execute(
    call: Call, backend: Interpreted, lse: Tensor, dout: Tensor, dlse: Tensor | None, *, wide: bool = False
) -> dict[str, Tensor]:
    """The gradients of a call, from the results of its forward pass in float64."""
    inputs, spec = as_given(call, backward=True)
    spec = spec._replace(wide=wide)
    with torch.no_grad():
        out = oracle.attention(call.to(call.q.dtype))[0].detach()
        sink, bias = call.learnable_sink is not None, call.bias is not None and call.bias.requires_grad
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cute_backend, "next_tile", lambda: torch.zeros(4, dtype=torch.int32))
            found = backend._backward(spec, inputs, out, lse, dout, dlse, bias, sink)
    got = {"dq": found.dq, "dk": found.dk, "dv": found.dv, "dbias": found.dbias, "dlearnable_sink": found.dsink}
    return {name: x for name, x in got.items() if x is not None}


def check(call: Call, backend: Interpreted, *, through_lse: bool = False) -> dict[str, Tensor]:
    """A call's gradients against the oracle's, and what stands in the padding; returns them."""
    truth, low = call.to(torch.float64), call.to(call.q.dtype)
    out, lse = oracle.attention(truth)
    dout = poisoned_dout(call, out.to(call.q.dtype))
    dlse = torch.randn(lse.shape) if through_lse else None
    got = execute(call, backend, lse.detach().float(), dout, dlse)
    expected = gradients(truth, out, lse, dout, dlse)
    yardstick = gradients(low, *oracle.attention(low), dout, dlse)
    size = max([1.0, *(x.abs().max().item() for x in expected.values() if x.numel())])
    for name, x in got.items():
        assert_close(name, x, expected[name], yardstick[name], 3.0 if call.softcap else 2.0, size)
    real_q, real_k = call.real_rows()
    for name, real in (("dq", real_q), ("dk", real_k), ("dv", real_k)):
        assert (got[name][~real] == 0).all(), f"{name}: padding rows are not zero"
    return got
