"""Arguments that constructors of block masks refuse, and what they say."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.runtime import settings
from tests.lib.masks import tables_of
from tests.lib.refusals import assert_refused, refusals

INDICES = torch.zeros(1, 1, 2, 1, dtype=torch.int64)
IDS = torch.zeros(5, dtype=torch.int32)
MAP = torch.ones(2, 3, dtype=torch.bool)
_REFUSED = """
BlockMask.causal(2.0, 3)
    TypeError: seqlen_q: expected an int, got 2.0
BlockMask.window(2, 3, left=1.5)
    TypeError: left: expected None or an int, got 1.5
BlockMask.documents(IDS.float())
    TypeError: ids: expected int32 or int64, got torch.float32
BlockMask.documents([1])
    TypeError: ids: expected a torch.Tensor, got list
BlockMask.documents(cu_seqlens=IDS)
    TypeError: seqlen_q: expected an int beside cu_seqlens, got None
BlockMask.documents(cu_seqlens=IDS.float(), seqlen_q=5)
    TypeError: cu_seqlens: expected int32 or int64, got torch.float32
BlockMask.documents(cu_seqlens=IDS, cu_seqlens_k=IDS.to("meta"), seqlen_q=5)
    ValueError: cu_seqlens_k: expected the device cpu, got meta
BlockMask.documents(IDS.to_sparse())
    TypeError: ids: expected a strided tensor, got torch.sparse_coo
BlockMask.from_dense(MAP.to_sparse())
    TypeError: mask: expected a strided tensor, got torch.sparse_coo
BlockMask.prefix_lm(3, 3, 1.0)
    TypeError: length: expected an int or a tensor, got 1.0
BlockMask.dilated(3, 3, 2.0)
    TypeError: step: expected an int, got 2.0
BlockMask.from_blocks(MAP.int())
    TypeError: visible: expected a bool tensor, got torch.int32
BlockMask.from_blocks(MAP, (1, 2, 3))
    TypeError: block: expected an int or a pair of them
BlockMask.from_indices(MAP, seqlen_k=9)
    TypeError: indices: expected int32 or int64, got torch.bool
BlockMask.from_function(3, 3, 3)
    TypeError: mask_mod: expected a function of
BlockMask.from_function(lower, 3, 3, batch=1.0)
    TypeError: batch: expected None or an int, got 1.0
BlockMask.from_function(lambda b, h, q, k: q - k, 3, 3).build()
    TypeError: mask_mod: expected a function that gives a bool tensor, got torch.int64
BlockMask.from_function(lambda b, h, q, k: True, 3, 3).build()
    TypeError: mask_mod: expected a function that gives a bool tensor, got bool
BlockMask.from_dense(MAP.float())
    TypeError: mask: expected a bool tensor, got torch.float32
BlockMask.from_flex(MAP)
    TypeError: mask: expected FlexAttention's BlockMask, got Tensor
BlockMask.from_function(lower, 3, 3, device=torch.bfloat16)
    TypeError: device: expected a torch.device or a str, got torch.bfloat16
BlockMask.causal(3, 3).to(torch.bfloat16)
    TypeError: device: expected a torch.device or a str, got torch.bfloat16
BlockMask.causal(3, 3).build(torch.bfloat16)
    TypeError: device: expected a torch.device or a str, got torch.bfloat16
BlockMask.causal(3, 3).to("gpu")
    ValueError: device: expected one that PyTorch knows, got 'gpu'
BlockMask.causal(3, 3).with_order(3)
    TypeError: order: expected one of
BlockMask.causal(3, 3).with_order(torch.zeros(1))
    TypeError: order: expected dtype torch.int32 or torch.int64
BlockMask.causal(3, 3).with_order("spt", group=1.0)
    TypeError: group: expected an int, got 1.0
BlockMask.causal(3, 3) & MAP
    TypeError: unsupported operand
BlockMask.causal(3, 3) | 1
    TypeError: unsupported operand
BlockMask.causal(2, -3)
    ValueError: seqlen_k: expected 0 to 2147483647, got -3
BlockMask.documents()
    ValueError: ids: expected either ids or cu_seqlens, got neither
BlockMask.documents(IDS, cu_seqlens=IDS)
    ValueError: ... either ids or cu_seqlens, got both
BlockMask.documents(IDS[None, None])
    ValueError: ids: expected shape (seqlen_q,) or (batch, seqlen_q)
BlockMask.documents(IDS[None], IDS.expand(2, 5))
    ValueError: ids_k: expected the batch size of ids, 1
BlockMask.documents(IDS, IDS.to("meta"))
    ValueError: ids_k: expected the device cpu, got meta
BlockMask.documents(cu_seqlens=IDS[:0], seqlen_q=1)
    ValueError: cu_seqlens: expected shape (documents
BlockMask.documents(cu_seqlens=IDS, cu_seqlens_k=IDS[1:], seqlen_q=1)
    ValueError: cu_seqlens_k: expected shape (5,), got (4,)
BlockMask.documents(IDS, cu_seqlens_k=IDS)
    ValueError: cu_seqlens_k: expected None beside ids, got a tensor
BlockMask.documents(ids_k=IDS, cu_seqlens=IDS, seqlen_q=5)
    ValueError: ids_k: expected None beside cu_seqlens, got a tensor
BlockMask.documents(IDS, seqlen_q=7)
    ValueError: seqlen_q: expected None or the rows of ids, 5, got 7
BlockMask.documents(IDS, seqlen_k=4)
    ValueError: seqlen_k: expected None or the rows of ids, 5, got 4
BlockMask.prefix_lm(3, 3, IDS[None])
    ValueError: length: expected shape (batch,), got shape (1, 5)
BlockMask.dilated(3, 3, 0)
    ValueError: step: expected at least 1, got 0
BlockMask.from_blocks(MAP[0])
    ValueError: visible: expected shape ([[batch,] heads,] blocks_q, blocks_k)
BlockMask.from_blocks(MAP.expand(0, 2, 3))
    ValueError: visible: expected at least one head, got shape
BlockMask.from_dense(MAP.expand(0, 2, 3))
    ValueError: mask: expected at least one head, got shape
BlockMask.from_indices(MAP.int().expand(1, 0, 2, 3), seqlen_k=384)
    ValueError: indices: expected at least one head, got shape
BlockMask.from_selection(MAP.int()[:, None, :][:, :0], block=64, seqlen_k=384)
    ValueError: indices: expected at least one head, got shape
BlockMask.from_blocks(MAP, 0)
    ValueError: block: expected at least 1, got 0
BlockMask.from_blocks(MAP, seqlen_k=-1)
    ValueError: seqlen_k: expected 0 to 2147483647, got -1
BlockMask.from_blocks(MAP, (1, 2 ** 30))
    ValueError: seqlen_k: expected 0 to 2147483647, got 3221225472
BlockMask.from_blocks(MAP, seqlen_k=256)
    ValueError: seqlen_k: expected a length of 3 blocks of 128, got 256
BlockMask.from_indices(INDICES[0], seqlen_k=9)
    ValueError: indices: expected shape (batch, heads, blocks_q, width)
BlockMask.from_indices(INDICES, block=96, seqlen_k=9)
    ValueError: block: expected 64 or multiples of 128
BlockMask.from_indices(INDICES, INDICES[..., 0, 0], seqlen_k=9)
    ValueError: counts: expected shape (batch, heads
BlockMask.from_indices(INDICES, INDICES[:, :, :1, 0], seqlen_k=9)
    ValueError: counts: expected shape (1, 1, 2)
BlockMask.from_function(lower, 3, 3, heads=0)
    ValueError: heads: expected None or at least 1, got 0
BlockMask.from_function(lambda b, h, q, k: (q >= k)[None], 3, 3).build()
    ValueError: mask_mod: expected a function that gives a 0-d tensor, got shape (1,)
BlockMask.from_dense(MAP[0])
    ValueError: mask: expected shape ([[batch,] heads,] seqlen_q, seqlen_k)
BlockMask.causal(3, 4) & BlockMask.causal(3, 5)
    ValueError: &: expected masks of sizes that fit, 3 x 4, got 3 x 5
BlockMask.from_dense(MAP.expand(2, 1, 2, 3)) | BlockMask.from_dense(MAP.expand(3, 1, 2, 3))
    ValueError: |: expected masks of sizes that fit, 2 x 3 of 2 batch entries, got 2 x 3 of 3 batch entries
BlockMask.from_dense(MAP) & BlockMask.from_dense(MAP.to("meta"))
    ValueError: &: expected masks of one device, cpu, got meta
BlockMask.causal(3, 3).build()
    ValueError: device: expected one, as the mask has no tensors, got None
BlockMask.causal(8, 8).build("cpu", tables="no")
    TypeError: tables: expected a bool, got 'no'
BlockMask.from_dense(MAP).build("meta")
    ValueError: device: expected that of the mask, cpu, got meta
BlockMask.causal(3, 3).with_order("fast")
    ValueError: order: expected one of ['auto', 'default', 'spt'
BlockMask.causal(3, 3).with_order(torch.tensor([1]))
    ValueError: order: expected permutations of 0 .. 0, got [1]
BlockMask.causal(3, 300).with_order(torch.tensor([1, 1, 2]))
    ValueError: order: expected permutations of 0 .. 2
BlockMask.causal(3, 3).with_order(torch.zeros(2, 1).int())
    ValueError: order: expected a shape that broadcasts to (1, 1, 1), got (2, 1)
BlockMask.causal(3, 3).with_order(torch.tensor(0))
    ValueError: order: expected a shape that broadcasts
BlockMask.causal(3, 3).with_order("spt", group=2)
    ValueError: group: expected a divisor of the mask's 1 heads
"""


@refusals(_REFUSED)
def test_wrong_arguments(call: str, error: str) -> None:
    assert_refused(call, error, globals())


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_ints_of_numpy(kind: Any) -> None:
    """Every constructor takes them, and its mask has plain ints alone."""
    two, sizes, dilated = kind(2), (kind(130), kind(200)), {"left": kind(3), "right": kind(0)}
    offsets = torch.tensor([0, 5])
    for make, given in (
        (BlockMask.causal, sizes),
        (partial(BlockMask.window, left=kind(3), right=kind(1)), sizes),
        (lambda q, k: BlockMask.documents(cu_seqlens=offsets, seqlen_q=q, seqlen_k=k), sizes),
        (BlockMask.prefix, (*sizes, kind(7))),
        (BlockMask.prefix_lm, (*sizes, kind(7))),
        (partial(BlockMask.dilated, **dilated), (*sizes, two)),
        (
            lambda block, q, k: BlockMask.from_blocks(MAP, (block, block), seqlen_q=q, seqlen_k=k),
            (two, kind(3), kind(5)),
        ),
        (lambda block: BlockMask.from_blocks(MAP, block), (two,)),
        (
            lambda block, k, length: BlockMask.from_indices(
                INDICES, block=block, seqlen_k=k, seqlen_q=k, block_lengths=[length, length]
            ),
            (kind(64), kind(128), kind(9)),
        ),
        (lambda block, k: BlockMask.from_selection(INDICES, block=block, seqlen_k=k), (kind(3), kind(7))),
        (lambda q, k, n: BlockMask.from_function(lower, q, k, batch=n, heads=n), (*sizes, two)),
        (lambda group: BlockMask.from_dense(MAP.expand(2, 2, 3)).with_order("spt", group=group), (two,)),
    ):
        mask, plain = make(*given), make(*map(int, given))
        assert mask.sizes == plain.sizes
        assert all(type(size) is int for size in mask.sizes)
        if not mask.selection_block:
            rows = (tables_of(x).rows[:3] for x in (mask, plain))
            assert all(map(torch.equal, *rows))


def lower(_b: torch.Tensor, _h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return j <= i


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4, 2], "cu_seqlens: expected offsets that never decrease, got [0, 4, 2]"),
        ([0, 4, 20], "cu_seqlens: expected offsets within 6 rows, got a range from 0 to 20"),
        ([-3, 4, 6], "cu_seqlens: expected offsets within 6 rows, got a range from -3 to 6"),
    ],
    ids=str,
)
def test_offsets_are_checked_on_request(offsets: list[int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cu_seqlens = torch.tensor(offsets)
    BlockMask.documents(cu_seqlens=cu_seqlens, seqlen_q=6)
    monkeypatch.setattr(settings, "check_data", lambda: True)
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockMask.documents(cu_seqlens=cu_seqlens, seqlen_q=6)
    with pytest.raises(ValueError, match="cu_seqlens_k: expected offsets"):
        BlockMask.documents(cu_seqlens=torch.tensor([0, 6, 6]), cu_seqlens_k=cu_seqlens, seqlen_q=6)


@pytest.mark.parametrize("number", [2**31 - 2, 2**31, 2**70], ids=["2^31 - 2", "2^31", "2^70"])
def test_numbers_beyond_any_sequence(number: int) -> None:
    """They have all keys, or none but each query's own; also above 2^63, which no tensor holds."""
    q = torch.randn(1, 200, 1, 8)
    prefix, own = BlockMask.prefix(200, 200, 3), BlockMask.window(200, 200, left=0, right=0)
    for mask, expected in (
        (BlockMask.window(200, 200, left=number, right=number) | prefix, None),
        (BlockMask.window(200, 200, left=0, right=number) | BlockMask.causal(200, 200), None),
        (BlockMask.prefix(200, 200, number), None),
        (BlockMask.prefix(200, 200, -number) | own, own),
        (BlockMask.dilated(200, 200, number), own),
    ):
        given = flash_attn_func(q, q, q, block_mask=mask)
        torch.testing.assert_close(given, flash_attn_func(q, q, q, block_mask=expected))
