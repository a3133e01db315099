"""Columns of 64 keys, or of 128: which of them a block mask has for a call."""

from typing import Any
from unittest import mock

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.backends.cute.plan import Shapes, plan_backward
from flash_attn_cute.backends.cute.score_layout import half_entries, score_layout
from flash_attn_cute.calls import dispatch
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.calls.prepared_call import prepare
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.problem.spec import Options
from flash_attn_cute.sparsity import column_tables

VISIBLE = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0)).argsort(-1) < 3  # 3 of 8 blocks in each row
OF_128, OF_64 = BlockMask.from_blocks(VISIBLE), BlockMask.from_blocks(VISIBLE, 64)
DENSE = BlockMask.from_blocks(torch.rand(2, 8, 8).argsort(-1) < 5)  # more than four tenths
INDICES = BlockMask.from_indices(VISIBLE.int().argsort(-1, descending=True)[None, ..., :3], seqlen_k=1024)
ORDERED = Options(deterministic=True)


@pytest.mark.parametrize(
    ("gpu", "mask", "head_dim", "options", "has_halves"),
    [
        ("sm90", OF_128, 128, ORDERED, True),
        ("sm90", INDICES, 128, ORDERED, True),
        ("sm90", OF_128.with_order("spt"), 128, ORDERED, True),
        ("sm90", DENSE, 128, ORDERED, False),
        ("sm90", OF_128, 64, ORDERED, False),
        ("sm90", OF_128, 256, ORDERED, False),
        ("sm90", OF_128, 128, Options(), False),
        ("sm90", OF_128, 128, Options(window_right=0, deterministic=True), False),
        ("sm90", BlockMask.causal(1024, 1024) & BlockMask.window(1024, 1024, left=200), 128, ORDERED, False),
        ("sm90", OF_64, 128, Options(), True),
        ("sm90", OF_64, 64, Options(), True),
        ("sm90", OF_64, 64, ORDERED, True),
        ("sm90", OF_64, 256, Options(), False),
        ("sm90", OF_64, 64, Options(window_right=0), False),
        ("sm100", OF_64, 128, ORDERED, False),
        ("sm100", OF_128, 128, ORDERED, False),
    ],
)
def test_a_call_has_the_columns_that_its_backward_pass_reads(
    gpu: str, mask: BlockMask, head_dim: int, options: Options, has_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others are made; what is planned reads them."""
    monkeypatch.setattr(dispatch, "BACKENDS", dispatch.supposing(gpu))
    mask = BlockMask(mask._node, mask.seqlen_q, mask.seqlen_k, mask._order)  # without what other cases have kept
    q = torch.empty(1, mask.seqlen_q, 2, head_dim, dtype=torch.bfloat16)
    made = {name: mock.Mock(wraps=getattr(column_tables, name)) for name in ("columns", "half_columns")}
    for name, wrapped in made.items():
        monkeypatch.setattr(column_tables, name, wrapped)
    for _ in range(2):
        inputs, plan = prepare(AttentionCall(q, q, q, block_mask=mask, options=options, backend=gpu), backward=True)
        assert inputs.block_mask is not None
        assert inputs.block_mask.has_half_columns == has_halves
    assert (made["columns"].call_count, made["half_columns"].call_count) == (not has_halves, has_halves)
    scores = score_layout(inputs)._replace(half_entries=half_entries(inputs), intervals=plan.spec.window_right == 0)
    shapes = Shapes(q.shape, q.shape, 0, q.shape[1], scores=scores)
    architecture = ARCHITECTURES[gpu].on((10, 0)) if gpu == "sm100" else ARCHITECTURES[gpu]
    assert (plan_backward(architecture, plan.spec, shapes, 132).config.tile_n == 64) == has_halves


@pytest.mark.parametrize(
    ("capability", "mask", "made"),
    [
        (9, OF_128, [False, True]),
        (9, OF_64, [False, True]),
        (9, DENSE, [False]),
        (9, DENSE & BlockMask.from_blocks(torch.ones(8, 8, dtype=torch.bool), seqlen_q=1024), [False]),
        (10, OF_128, [False]),
        (10, OF_64, [False]),
    ],
)
def test_columns_made_ahead(
    capability: int, mask: BlockMask, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds where a call may read either, which is not known then."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    assert BlockMask._most_listed(mask, torch.device("cpu")) == 0
    monkeypatch.setattr(BlockMask, "_most_listed", lambda self, _, ask=BlockMask._most_listed: ask(self, cuda))
    mask = BlockMask(mask._node, mask.seqlen_q, mask.seqlen_k).build("cpu")
    kept: list[Any] = [x.value for x in mask._tables.values()]
    assert [x.has_half_columns for x in kept if hasattr(x, "rows")] == made
