"""Tables of selections for kernels that go over key blocks, made by interpreted kernels, against loops over queries."""

import random
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute.backends.cute.plan import Shapes
from flash_attn_cute.backends.cute.selection_plan import plan_selection
from flash_attn_cute.kernels.arguments import SelectionArguments, SelectionNumbers, workspace_bytes
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.kernels.selection import PICKS_AT_ONCE, TableSizes, table_parts
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec
from tests.lib.checks import random_call
from tests.lib.interpreted.common import Executed, as_given
from tests.lib.masks import random_selection
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

BLOCK = 64
LENGTHS = (0, 1, 63, 64, 65, 200)


def made(call: Call, rng: random.Random, **replaced: Any) -> tuple[dict[str, Tensor], SelectionNumbers]:
    """Tables of a call by their names, and the numbers of the launch that has made them."""
    inputs, spec = as_given(call)
    assert inputs.selected is not None
    num_sequences = 0 if inputs.cu_seqlens_k is None else len(inputs.cu_seqlens_k) - 1
    shapes = Shapes(inputs.q.shape, inputs.k.shape, num_sequences, 0)
    planned = plan_selection(ARCHITECTURES["sm90"], spec, shapes, inputs.selected.shape, 1)
    numbers = planned.numbers._replace(**replaced)
    sizes = TableSizes.of(numbers.num_rows * numbers.top, numbers.columns, numbers.item_picks)
    if rng.random() < 0.5:  # several chunks even of few picks
        sizes = sizes._replace(chunks=-(-numbers.num_rows * numbers.top // PICKS_AT_ONCE), chunk_picks=PICKS_AT_ONCE)
    numbers = numbers._replace(num_items=sizes.items, num_chunks=sizes.chunks, chunk_picks=sizes.chunk_picks)
    parts = table_parts(planned.config, numbers)
    room = torch.full((workspace_bytes(parts),), 255, dtype=torch.uint8)
    arguments = SelectionArguments(
        mQ=inputs.q,
        mK=inputs.k,
        mV=inputs.v,
        mO=torch.empty_like(inputs.q),
        mLSE=torch.empty(inputs.lse_shape),
        mMaxLogits=None,
        mCuSeqlensQ=inputs.cu_seqlens_q,
        mCuSeqlensK=inputs.cu_seqlens_k,
        mSeqUsedQ=inputs.seqused_q,
        mSeqUsedK=inputs.seqused_k,
        mSink=None,
        mSelected=inputs.selected,
        mTables=room,
        mWorkspace=torch.empty(planned.workspace_size, dtype=torch.uint8),
        numbers=numbers,
    )
    Executed(types.SimpleNamespace(config=planned.config), rng, only="Pick")(arguments)
    tables, place = {}, 0
    for name, shape in parts.items():
        tables[name] = room[place:].view(torch.int32)[: torch.Size(shape).numel()].view(shape)
        place += workspace_bytes({name: shape})
    return tables, numbers


def visible_columns(
    inputs: AttentionInputs, spec: AttentionSpec, call: Call, which: int, parts: int
) -> tuple[Tensor, Tensor]:
    """Columns and bits of all picks (row, rank) of a set.

    Columns: ``columns`` of those without a visible key, and of all but a row's first in a block; one more of padding.
    Bits of visible keys, a word for 32.
    """
    assert inputs.selected is not None
    _, heads, rows, ranks = inputs.selected.shape
    size, sequences = spec.selection_block, call.sequences()
    columns = inputs.k.shape[0] // BLOCK + len(sequences) if inputs.packed else -(-inputs.k.shape[1] // BLOCK)
    found = torch.full((rows, ranks * parts), columns + 1, dtype=torch.int32)
    bits = torch.zeros(rows, ranks * parts, BLOCK, dtype=torch.int64)
    for number, (_, rows_q, rows_k) in enumerate(sequences if inputs.packed else sequences[:1]):
        keys, before = rows_k.stop - rows_k.start, rows_k.start // BLOCK + number if inputs.packed else 0
        for row in range(rows_q.start, rows_q.stop):
            position = row - rows_q.stop + keys
            first = 0 if spec.window_left is None else max(0, position - spec.window_left)
            stop = keys if spec.window_right is None else min(keys, position + spec.window_right + 1)
            selection, taken = inputs.selected[which // heads, which % heads, row].tolist(), set()
            for rank, selected in enumerate(selection):
                for part in range(parts):
                    pick, block = rank * parts + part, selected * size // BLOCK + part
                    has_keys, is_taken = block * BLOCK < (selected + 1) * size, block in taken
                    own = range(max(block * BLOCK, first), min((block + 1) * BLOCK, stop))
                    if has_keys:
                        taken.add(block)
                    for key in own if has_keys and not is_taken else ():
                        bits[row, pick, key % BLOCK] = key // size in selection
                    found[row, pick] = before + block if bits[row, pick].any() else columns
    words = (bits.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return found, (words - (words >> 31 << 32)).int()


def first_keys(inputs: AttentionInputs, call: Call) -> dict[int, tuple[int, int]]:
    """Sequence of each column, and the first key of its block there; of columns that there are."""
    if not inputs.packed:
        return {column: (0, column * BLOCK) for column in range(-(-inputs.k.shape[1] // BLOCK))}
    found = {}
    for number, (_, _, rows) in enumerate(call.sequences()):
        for block in range(-(-(rows.stop - rows.start) // BLOCK)):
            found[rows.start // BLOCK + number + block] = number, block * BLOCK
    return found


def check(call: Call, rng: random.Random, rows: tuple[int, int], item_picks: int) -> None:
    """Compares the tables of some rows with what loops over queries find."""
    tables, n = made(call, rng, first_row=rows[0], num_rows=rows[1] - rows[0], item_picks=item_picks)
    inputs, spec = as_given(call)
    keys = first_keys(inputs, call)
    for which in range(n.sets_batch * n.sets_heads):
        columns, bits = (x[slice(*rows)].flatten(0, 1) for x in visible_columns(inputs, spec, call, which, n.parts))
        assert torch.equal(tables["mColumns"][which], columns)
        if n.block is not None:
            seen = columns < n.columns
            assert torch.equal(tables["mKeyBits"][which, seen], bits[seen])
        spans, items = tables["mItemSpans"][which].tolist(), tables["mItems"][which].tolist()
        entry = 0
        for column in range(n.columns):
            picks = (columns == column).nonzero().flatten()
            expected = [
                [entry + start, entry + min(start + item_picks, len(picks)), *keys[column]]
                for start in range(0, len(picks), item_picks)
            ]
            assert items[spans[column] : spans[column + 1]] == expected
            assert torch.equal(tables["mEntries"][which, entry : entry + len(picks)].long(), picks)
            entry += len(picks)
        assert spans[0] == 0
        assert items[spans[-1] :] == [[0] * 4] * (n.num_items - spans[-1])


def drawn(
    lengths: list[tuple[int, int]],
    rng: random.Random,
    packed: bool,
    blocks: Sequence[int] = (BLOCK, 3 * BLOCK),
    top: int = 4,
    **options: Any,
) -> Call:
    """A call of three heads a group, so that each head has tiles of its own."""
    torch.manual_seed(rng.getrandbits(32))
    options |= {"seqused": packed, "nheads": 6, "nheads_k": 2, "packed": packed, "dtype": torch.bfloat16}
    options |= {"window_size": (rng.choice([0, 30, 1000]), rng.choice([0, 20, 1000]))}
    call = random_call(*map(list, zip(*lengths, strict=True)), **options)
    return random_selection(call, rng, rng.choice(blocks), top)


# Whether sequences are packed, keys of selected blocks, and their number.
CASES = {
    "dense": (False, (BLOCK, 3 * BLOCK), 4),
    "packed": (True, (BLOCK, 3 * BLOCK), 4),
    "dense-bits": (False, (16, 1, 3, 40, 100), 9),
    "packed-bits": (True, (16, 1, 3, 40, 100), 9),
}


@pytest.mark.parametrize("case", tiered(CASES, "packed", "packed-bits", rare=["dense-bits"], values=True))
def test_tables(case: tuple[bool, tuple[int, ...], int]) -> None:
    """Every pick with a visible key is in one item, of its sequence and block, and no other; so are parts of rows."""
    packed, blocks, top = case
    for seed in range(4):
        rng = random.Random(seed)
        lengths = [(rng.choice(LENGTHS), rng.choice(LENGTHS)) for _ in range(3)] + [(65, 100)]
        call = drawn(lengths if packed else lengths[-1:] * 2, rng, packed, blocks, top, head_dim=64)
        rows = call.q.shape[-3]
        middle = rng.randint(1, rows - 1)
        check(call, rng, rng.choice([(0, rows), (0, middle), (middle, rows)]), rng.choice([1, 3, 7, 1000]))


@pytest.mark.slow
def test_more_columns_than_a_warp_counts() -> None:
    rng = random.Random(0)
    check(drawn([(10, 140_000)], rng, packed=False, top=40, head_dim=8), rng, (0, 10), 1000)
