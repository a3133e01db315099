"""Gradients in 16 bits, on CPUs and on GPUs."""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn_cute import BlockMask
from flash_attn_cute.distributed import Sharding
from flash_attn_cute.distributed.packed_calls import is_shared, parts_of
from flash_attn_cute.distributed.rank_layout import Layout, side_by_side
from tests.lib import checks, oracle
from tests.lib.over_ranks.cases import PACKED, WAYS, Case, Leaves, alone, expected_here, together


def low_precision() -> None:
    """Errors are those of low precision, and the same bits come out every time."""
    case = Case(PACKED.lengths, {"causal": True, "deterministic": True}, sink=True, through_lse=True)
    for dtype in (torch.bfloat16, torch.float32):
        assert_precise_and_repeated(case, Leaves.of(case, dtype), repetitions=3)


def one_part_and_several() -> None:
    """Some ranks have several parts of a key's gradient, others one."""
    documents = [70, 230, 1, 211]
    options = {"causal": True, "window_size": (64, None), "deterministic": True}
    case = Case(documents, options, sink=True, through_lse=True)
    sharding = case.sharding(dist.get_world_size())
    layout = Layout.of(sharding, sharding, tuple(documents), tuple(documents), (64, 0))
    assert len({shares_keys(layout, rank) for rank in range(sharding.num_ranks)}) == 2
    assert_precise_and_repeated(case, Leaves.of(case, torch.bfloat16), repetitions=1)


def as_precise_as_one() -> None:
    """Gradients are as far from the truth as those of one process: their parts are not rounded.

    On four ranks two have the same head of k, if rows are traded for heads.
    """
    documents = [450, 3, 260]
    nheads, nheads_k = {3: (6, 6), 4: (4, 2)}[dist.get_world_size()]
    case = Case(documents, {"causal": True}, nheads=nheads, nheads_k=nheads_k, d=32, sink=True)
    leaves = Leaves.of(case, torch.bfloat16)
    truth, one = by_oracle(case, leaves, torch.float64), alone(case, leaves)
    sharding = case.sharding(dist.get_world_size())
    true = expected_here(truth, sharding, dist.get_rank())
    total = sum(documents)
    for way in (*WAYS, {"block_mask": BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool), total)}):
        got = together(case, leaves, sharding, **way)
        for name in ("dq", "dk", "dv"):
            squares = (got[name] - true[name]).square().sum()
            dist.all_reduce(squares)
            assert squares.sqrt() < 1.05 * (one[name] - truth[name]).norm(), (name, way)


def shares_keys(layout: Layout, rank: int) -> bool:
    """Whether several sequences of a rank's calls see the same key."""
    keys, _ = side_by_side(layout.needed_by[rank])
    return is_shared((part.k_start, part.k_stop) for part in parts_of(layout.queries_of[rank], keys, layout.bands))


def on_gpus() -> None:
    """Precision with kernels and NCCL."""
    kernels(repetitions=200)


def on_a_gpu() -> None:
    """Precision with kernels of ranks that share a GPU."""
    kernels(repetitions=10)


def kernels(repetitions: int, device: str = "cuda") -> None:
    """Precision with kernels of the current GPU."""
    documents = [1800, 3, 700, 0, 1025]
    for d, options in ((64, {}), (128, {"window_size": (300, None)}), (256, {"softcap": 20.0})):
        given: dict[str, Any] = {"causal": True, "deterministic": True, **options}
        case = Case(documents, given, d=d, sink=True, through_lse=True, padding=70)
        leaves = Leaves.of(case, torch.bfloat16)
        for name, x in vars(leaves).items():
            setattr(leaves, name, x.detach().to(device).requires_grad_(x.requires_grad))
        assert_precise_and_repeated(case, leaves, repetitions)


def assert_precise_and_repeated(case: Case, leaves: Leaves, repetitions: int) -> None:
    """Errors are within the rule of all tests, and repetitions have the same bits."""
    truth, low = (by_oracle(case, leaves, to) for to in (torch.float64, leaves.q.dtype))
    sharding = case.sharding(dist.get_world_size())
    for way in WAYS:
        got = together(case, leaves, sharding, **way)
        true, rough = (expected_here(x, sharding, dist.get_rank()) for x in (truth, low))
        for name, x in got.items():
            factor = 3.0 if "softcap" in case.options else 2.0
            checks.assert_close(f"{name} of {case}, {way}", x, true[name], rough[name], factor, 1.0)
        got.pop("dsink")  # a sum over ranks, in no order
        begin = time.monotonic()
        differing = checks.differing(got, partial(_without_dsink, case, leaves, sharding, way), repetitions)
        assert not differing, f"{differing} of {case}, {way}"
        if dist.get_rank() == 0:
            took = time.monotonic() - begin
            print(f"d = {case.d}, {way['method']}: the same bits {repetitions} times, {took:.1f} s", flush=True)


def _without_dsink(case: Case, leaves: Leaves, sharding: Sharding, way: dict[str, Any]) -> dict[str, Tensor]:
    found = together(case, leaves, sharding, **way)
    return {name: x for name, x in found.items() if name != "dsink"}


def by_oracle(case: Case, leaves: Leaves, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results of the oracle, in a dtype of its own."""
    cu = torch.tensor(case.offsets, dtype=torch.int32)
    options = {name: x for name, x in case.options.items() if name != "deterministic"}
    call = oracle.Call(leaves.q, leaves.k, leaves.v, cu, cu, learnable_sink=leaves.sink, **options).to(dtype)
    out, lse = oracle.attention(call)
    grads = checks.gradients(call, out, lse, leaves.dout, leaves.dlse)
    grads["dsink"] = grads.pop("dlearnable_sink")
    return {"out": out.detach(), "lse": lse.detach(), **grads}
