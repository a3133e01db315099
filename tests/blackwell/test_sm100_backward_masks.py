"""Gradients under masks and block masks in the Blackwell backward kernels, executed on the CPU from their PTX."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.dq_order import launch_orders
from flash_attn_cute.kernels.arguments import BLOCK, BackwardArguments
from flash_attn_cute.sparsity import column_tables
from tests.lib import oracle
from tests.lib.checks import bitwise_equal, drawn, poisoned_dout, random_call
from tests.lib.interpreted import backward
from tests.lib.interpreted.backward import NO_ENTRY, NO_LIST, Interpreted, Pass, check, execute, program
from tests.lib.interpreted.common import EMPTY, Memory, at, spread, table_argument, tensor_argument, tensors_of
from tests.lib.masks import with_block_mask
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

# Lengths of q and k, and options; packed sequences and windows are intervals of a mask over all rows.
BLOCK_MASKS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([200], [200], {"packed": False, "head_dim": 128, "nheads": 1}),
    "d128-packed": ([130, 0, 60], [100, 40, 130], {"head_dim": 128, "nheads": 1, "window_size": (None, 30)}),
    "d64-grouped": ([140, 140], [200, 200], {"packed": False, "nheads": 4, "nheads_k": 1}),
    "d64-everything": ([130, 1, 90], [200, 129, 0], {"softcap": 5.0, "sink": True, "seqused": True, "causal": True}),
    "d192-dv128-window": ([150], [200], {"packed": False, "head_dim": 192, "head_dim_v": 128, "window_size": (90, 20)}),
    "d192": ([200], [140], {"packed": False, "head_dim": 192, "nheads": 1, "dtype": torch.float16}),
    "d256-everything": ([90, 60], [100, 130], {"head_dim": 256, "nheads_k": 1, "causal": True, "softcap": 5.0}),
}


def with_order(call: Call, draw: random.Random) -> Call:
    """The call with an order in which blocks of keys are launched, for all, or for each set of the mask."""
    mask, (nheads, nheads_k) = call.block_mask, (x.shape[-2] for x in (call.q, call.k))
    assert mask is not None
    group = nheads // nheads_k if mask.heads == nheads else 1
    if draw.random() < 0.5:
        return replace(call, block_mask=mask.with_order(draw.choice(launch_orders.NAMES), group=group))
    sets = draw.choice([1, mask.batch]), draw.choice([1, mask.heads // group])
    orders = torch.stack([torch.randperm(mask.sizes.blocks_k) for _ in range(sets[0] * sets[1])])
    return replace(call, block_mask=mask.with_order(orders.view(*sets, -1).int(), group=group))


@pytest.mark.parametrize("case", tiered(BLOCK_MASKS, "d64-grouped"))
def test_block_masks(case: str, fuzz_seconds: float) -> None:
    """Any kind of mask, first one that shows something, and any order of launches: turns come from tables."""
    lengths_q, lengths_k, options = BLOCK_MASKS[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, "head_dim": 64, **options})
        call = with_block_mask(call, draw, least=0.0 if count else 0.1)
        check(with_order(call, draw), Interpreted(draw), through_lse=count % 2 == 1)


def test_keys_and_queries_that_see_nothing() -> None:
    """Blocks of fully masked keys, of one head or of all; fully masked queries."""
    visible = torch.ones(2, 2, 3, dtype=torch.bool)
    visible[:, :, 1] = visible[1, :, 0] = visible[0, 1] = False
    call = random_call([140], [300], packed=False, nheads=2, nheads_k=1, head_dim=64, dtype=torch.bfloat16)
    shown = visible.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :140, :300]
    mask = BlockMask.from_blocks(visible[None], (128, 128), seqlen_q=140, seqlen_k=300)
    got = check(replace(call, block_mask=mask, shown=shown[None]), Interpreted(random.Random(0)))
    assert not got["dk"][:, 128:256].any()
    assert not got["dv"][:, 128:256].any()
    assert not got["dq"][:, 128:, 0].any()


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "order"), [(64, "auto"), (192, "permutation")])
def test_block_orders_that_do_not_ascend(head_dim: int, order: str) -> None:
    """Tiles of keys take blocks of queries as others hand them over, whole ones, and halves above d = 128.

    Whichever CTA takes which tile, the bits are the same.
    """
    visible = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    shown = visible.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :522, :524]
    shown[..., 5::7] = False
    mask = BlockMask.from_dense(shown).with_order(order)
    tables = mask.tables(torch.device("cpu"), backward=True)
    steps = column_tables.steps(tables.rows, mask.sizes) > 0
    ascending = steps.cumsum(2, dtype=torch.int16) - 1
    assert (column_tables.m_block_order_of(tables, mask.sizes) != ascending)[steps].any()
    options: dict[str, Any] = {"packed": False, "head_dim": head_dim, "nheads": 1, "dtype": torch.bfloat16}
    call = replace(random_call([522], [524], **options), block_mask=mask, shown=shown)
    results = []
    for num_ctas in (1, 3):
        torch.manual_seed(0)  # of the gradient of out
        results.append(check(call, Interpreted(random.Random(num_ctas), num_ctas)))
    first, other = results
    assert all(bitwise_equal(first[name], other[name]) for name in first)


MASKS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128-causal": ([200], [300], {"packed": False, "head_dim": 128, "causal": True, "mask": (1, 1)}),
    "d64-packed": (
        [150, 0, 60],
        [200, 100, 40],
        {"nheads": 2, "nheads_k": 1, "mask": (1, 1, 1), "window_size": (9, 60)},
    ),
    "d64-shared": ([140, 140], [140, 140], {"packed": False, "nheads_k": 1, "mask": (1, 0, 0, 1)}),
    "d192-dv128": ([70], [140], {"packed": False, "head_dim": 192, "head_dim_v": 128, "nheads": 1}),
    "d256-everything": ([70, 1], [140, 0], {"head_dim": 256, "softcap": 5.0, "sink": True, "seqused": True}),
    "d192-by-batch": ([60, 90], [140, 80], {"head_dim": 192, "packed": False, "seqused": True, "mask": (1, 0, 1, 1)}),
}


def with_blocks_of(call: Call, draw: random.Random) -> Call:
    """The call with a mask that hides all of some blocks, and nothing of others."""
    assert call.mask is not None
    for value in (False, True):
        rows, keys = draw.choice([0, 64, 128]), draw.choice([0, 128])
        call.mask[..., rows : rows + 128, keys : keys + draw.choice([100, 128])] = value
    return call


@pytest.mark.parametrize("case", tiered(MASKS, "d64-shared"))
def test_masks(case: str, fuzz_seconds: float) -> None:
    """Some blocks are EMPTY, others FULL, beside windows and the ends of sequences."""
    lengths_q, lengths_k, options = MASKS[case]
    for count, draw in drawn(case, fuzz_seconds):
        torch.manual_seed(count)
        call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, "head_dim": 64, "mask": (1, 1), **options})
        check(with_blocks_of(call, draw), Interpreted(draw), through_lse=count % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "kind"), [(100, 300, 64, "block_mask"), (20, 140, 192, "mask")]
)
def test_schedules_give_the_same_bits(queries: int, keys: int, head_dim: int, kind: str) -> None:
    """Lists and turns of a tile do not depend on which CTA takes which tile, or on which role is late."""
    options: dict[str, Any] = {"head_dim": head_dim, "nheads": 4, "nheads_k": 1, "dtype": torch.bfloat16}
    if kind == "mask":
        call = with_blocks_of(random_call([queries], [keys], packed=False, mask=(1, 1), **options), random.Random(0))
    else:
        call = with_block_mask(random_call([queries], [keys], packed=False, **options), random.Random(0), "causal")
    out, lse = oracle.attention(call.to(torch.float64))
    dout = poisoned_dout(call, out.to(call.q.dtype))
    first, other = (execute(call, Interpreted(random.Random(n), n), lse.detach().float(), dout, None) for n in (1, 3))
    assert all(bitwise_equal(first[name], other[name]) for name in first)


@dataclass(frozen=True)
class KernelsAhead(Pass):
    """Kernels that make tables of a mask, executed in the place of the whole pass: they make what other tests take.

    All but the order of additions, which preprocessing makes on any architecture.
    """

    def __call__(self, a: BackwardArguments) -> None:
        """Compares what the kernels make with ``tables_of``."""
        expected, given, memory = self.tables_of(a), tensors_of(a), Memory()
        unwritten = {name: x if name in ("order", "adding") else torch.full_like(x, -3) for name, x in expected.items()}
        places = {name: memory.put(spread(x)) for name, x in (given | unwritten).items()}
        everything, config = memory.bytes(), self.plan.config
        if a.blocks.mTiles is not None:
            num_tiles = a.blocks.mTiles.numel() // (BLOCK * BLOCK // 32)
            tiles = tensor_argument(places["mTiles"], (num_tiles,), ())
            params = [tiles, table_argument("bits", places["bits"], expected["bits"])]
            self.run(program(config, "BlockTiles"), params, everything, {}, num_tiles)
            assert torch.equal(at(everything, places["bits"], expected["bits"]), expected["bits"])
            return
        rows, blocks = expected["codes"].shape
        if a.mCuSeqlensQ is not None:
            rows = a.mQ.shape[0] // config.tile_m + len(a.mCuSeqlensQ) + 1
        arguments, tables = self.arguments(given, places), self.workspace(a, unwritten, places)
        codes_and_bits = [table_argument(name, places[name], unwritten[name]) for name in ("codes", "bits")]
        self.run(program(config, "MaskTiles"), arguments + codes_and_bits, everything, {}, rows * blocks)
        self.run(program(config, "KeyLists"), arguments + tables, everything, {}, 1)
        made = {name: at(everything, places[name], x) for name, x in unwritten.items()}
        real = (expected["codes"] != EMPTY).any(1)  # rows of no queries hold anything
        assert real.sum() > 1
        assert torch.equal(made["codes"][real], expected["codes"][real])
        coded = expected["codes"][expected["codes"] >= 0].long()
        assert torch.equal(made["bits"][coded], expected["bits"][coded])
        is_list = expected["lists"][:, 0] != NO_LIST
        assert torch.equal(made["lists"][is_list], expected["lists"][is_list])
        is_entry = expected["entries"][:, 0] != NO_ENTRY
        assert torch.equal(made["entries"][is_entry], expected["entries"][is_entry])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "head_dim"), [("packed", 64), ("dense", 192), ("blocks", 64), ("blocks", 192)])
def test_tables(kind: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden blocks, whole ones, and bits; of a window, and of ends of sequences."""
    lengths = ([140, 20], [130, 200]) if kind == "packed" else ([200], [270])
    options: dict[str, Any] = {} if kind == "blocks" else {"mask": (1, 1), "window_size": (250, 90)}
    call = random_call(*lengths, packed=kind == "packed", nheads=1, dtype=torch.bfloat16, head_dim=head_dim, **options)
    if call.mask is None:
        call = with_block_mask(call, random.Random(0), "causal")
    else:
        call.mask[..., 20:128, 64:128] = False
        call.mask[:, :64] = True
    monkeypatch.setattr(backward, "Pass", KernelsAhead)
    out, lse = oracle.attention(call.to(torch.float64))
    execute(call, Interpreted(random.Random(0)), lse.detach().float(), torch.zeros_like(out, dtype=call.q.dtype), None)
