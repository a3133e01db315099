"""Calls with a block mask: against the oracle, beside everything they compose with, compiled and transformed."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

from flash_attn_cute import BlockMask, explain, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.portable import blockwise, products
from tests.lib.checks import (
    DEVICES,
    DTYPES,
    Case,
    assert_compiles,
    assert_matches_oracle,
    bitwise_equal,
    call_on,
    compiled,
    needs_kernels,
    on_each_backend,
    random_call,
    run,
    same_bits,
    with_gradients,
)
from tests.lib.masks import KINDS, as_if_captured, attend, listed, masked, spread, with_block_mask
from tests.lib.oracle import Call
from tests.lib.waits import NeverWaiting, Waits


def dense_call(length_q: int, length_k: int, batch: int, **options: Any) -> Call:
    return random_call([length_q] * batch, [length_k] * batch, packed=False, **options)


def random_dense(rng: random.Random, options: Case, dtype: torch.dtype, kind: str | None = None) -> Call:
    call = dense_call(rng.choice([1, 64, 130, 257]), rng.choice([1, 128, 200, 300]), 2, dtype=dtype, **options)
    heads = rng.choice([1, call.q.shape[2], call.k.shape[2]])
    return with_block_mask(call, rng, kind, sets=(rng.choice([1, 2]), heads))


@pytest.mark.parametrize("kind", KINDS)
@on_each_backend
def test_every_kind_of_mask(backend: str, kind: str) -> None:
    rng = random.Random(kind)
    shape: Case = {"nheads": 4, "nheads_k": 2, "head_dim": 16 if backend == "portable" else 128}
    for _ in range(3):
        call = random_dense(rng, shape | {"device": DEVICES[backend]}, DTYPES[backend], kind)
        assert_matches_oracle(call, backend=backend)


@on_each_backend
def test_masks_of_nothing_and_of_everything(backend: str) -> None:
    call = call_on(backend, [300], packed=False, nheads=2)
    for visible in (torch.zeros(3, 3).bool(), torch.ones(3, 3).bool()):
        mask = BlockMask.from_blocks(visible.to(call.q.device), seqlen_q=300, seqlen_k=300)
        assert_matches_oracle(masked(call, mask, visible[:1, :1].expand(300, 300)), backend=backend)


@pytest.mark.parametrize(
    ("backend", "head_dim"),
    [("portable", 16), *(pytest.param("sm90", d, marks=needs_kernels) for d in (64, 128, 192, 256))],
)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_rows_and_columns_that_see_nothing(sink: bool, backend: str, head_dim: int) -> None:
    """Whole blocks of them, and single rows; gradients of the blocks, and in PyTorch of any rows, may be NaN."""
    shown = torch.rand(520, 460) < 0.5
    shown[128:256], shown[300], shown[:, 256:390] = False, False, False
    call = call_on(backend, [520], [460], packed=False, nheads=2, head_dim=head_dim, sink=sink)
    call = masked(call, BlockMask.from_dense(shown.to(call.q.device)), shown)
    assert_matches_oracle(call, through_lse=not sink, backend=backend)
    out, results = run(call, deterministic=True, backend=backend), []
    fully_masked = ~shown.any(1) if backend == "portable" else torch.arange(520) // 128 == 1
    for fill in (0.0, torch.nan):
        dout = torch.ones_like(out)
        dout[:, fully_masked] = fill
        results.append(torch.autograd.grad(out, call.qkv, dout, retain_graph=True))
    assert same_bits(*results)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (300, 100)}], ids=str)
def test_blocks_apart_from_each_other(options: Case) -> None:
    """Keys that are gathered, beside a window that cuts them, and a bias that all queries add to the gradient of."""
    visible = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0], [1, 0, 1, 1, 0], [1, 1, 0, 1, 1]])
    made = BlockMask.from_blocks(visible.bool()), spread(visible.bool(), 128, 128, 640, 640)
    for bias in ((0, 1), (1, 1)):
        assert_matches_oracle(masked(dense_call(640, 640, 1, bias=bias, **options), *made))


def test_packed_sequences_of_equal_lengths() -> None:
    """Which are served together without a mask: each has rows of its own."""
    call = random_call([130] * 3, [90] * 3)
    shown = torch.rand(1, 2, 390, 270) < 0.5
    assert_matches_oracle(masked(call, BlockMask.from_dense(shown), shown))


def test_empty_blocks_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is that of the visible blocks, forward and backward, wherever they are."""
    sizes = []
    original = products.product

    def spy(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        sizes.append(a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2])
        return original(a, b, scale)

    monkeypatch.setattr("flash_attn_cute.backends.portable.blockwise.product", spy)

    def work(mask: BlockMask | None) -> int:
        sizes.clear()
        q, k, v = (torch.randn(1, 1024, 2, 16, requires_grad=True) for _ in range(3))
        flash_attn_func(q, k, v, block_mask=mask, softcap=1.0).sum().backward()
        return sum(sizes)

    whole = work(None)
    scattered = torch.zeros(2, 8, 8, dtype=torch.bool)
    scattered[0, :, [1, 5]] = True
    scattered[1, 3, [0, 2, 7]] = True
    assert work(BlockMask.from_blocks(scattered)) == whole * 19 // 128
    assert work(BlockMask.from_blocks(scattered[:1])) == whole * 2 // 8
    assert work(listed(BlockMask.window(1024, 1024, left=127, right=0))) == whole * 15 // 64
    causal = work(BlockMask.from_blocks(torch.ones(8, 8, dtype=torch.bool)) & BlockMask.causal(1024, 1024))
    assert causal == whole * 36 // 64


@pytest.mark.parametrize("first", [0, 1])
def test_heads_of_a_group_that_see_more_than_others(first: int) -> None:
    """One sees all of what any of them sees, another one less, and whole blocks both."""
    visible = torch.ones(1, 2, 2, 2, dtype=torch.bool)
    visible[0, first, :, 1] = False
    call = dense_call(256, 256, 1, nheads=2, nheads_k=1)
    assert_matches_oracle(masked(call, BlockMask.from_blocks(visible), spread(visible, 128, 128, 256, 256)))


def test_deterministic_and_orders() -> None:
    """The order of launches is for kernels' backward passes; here the same bits come out of any."""
    call = random_dense(random.Random(3), {"nheads": 4, "nheads_k": 2}, torch.float32)
    orders = ("default", "spt", torch.arange(call.block_mask.sizes.blocks_k))
    masks = [call.block_mask.with_order(order, group=1) for order in orders]
    first, *others = (
        with_gradients(run(replace(call, block_mask=mask), deterministic=True), call.qkv) for mask in masks
    )
    assert all(same_bits(first, other) for other in others)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_gives_the_same() -> None:
    ids = torch.arange(300) // 110

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    flex = create_block_mask(mask_mod, None, None, 300, 300, device="cpu")
    q, k, v = (torch.randn(2, 300, 2, 16, dtype=torch.float64) for _ in range(3))
    by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    expected = flex_attention(*by_head, block_mask=flex)
    out = flash_attn_func(q, k, v, block_mask=BlockMask.from_flex(flex))
    torch.testing.assert_close(out.transpose(1, 2), expected)
    back = BlockMask.from_flex(flex).to_flex()
    torch.testing.assert_close(flex_attention(*by_head, block_mask=back), expected)


def documents(length: int, at: int) -> BlockMask:
    return BlockMask.documents((torch.arange(length) >= at).long()) & BlockMask.causal(length, length)


def test_compile_without_recompiling_for_new_masks() -> None:
    """Masks of the same sizes, with lists of other lengths."""
    masks = [documents(400, at).build("cpu") for at in (3, 64, 128, 200, 256, 300, 301, 302)]
    calls = [(*torch.randn(3, 1, 400, 2, 16).requires_grad_().unbind(), mask) for mask in masks]
    assert_compiles(attend, calls, 2)  # with the first bound on their rows, and with any


def test_compile_with_changing_lengths() -> None:
    masks = [documents(length, length // 2).build("cpu") for length in (100, 300, 411, 517, 600)]
    assert_compiles(attend, [(*torch.randn(3, 1, mask.seqlen_q, 2, 16), mask) for mask in masks], 3)


@pytest.mark.parametrize("heads", [2, 4], ids=["key heads", "query heads"])
def test_compile_with_heads_that_may_change(heads: int) -> None:
    """Heads are numbers in a mask, and symbols in the tensors beside it."""
    step, _ = compiled(attend)
    mask = BlockMask.from_dense(torch.rand(1, heads, 5, 5) < 0.5)
    mask = mask.with_order(torch.zeros(1, 2, 1, dtype=torch.int32), group=heads // 2)
    q, k, v = (torch.randn(1, 5, n, 16) for n in (4, 2, 2))
    for x in (q, k, v):
        torch._dynamo.maybe_mark_dynamic(x, 2)
    torch.testing.assert_close(step(q, k, v, mask.build()), attend(q, k, v, mask), rtol=0, atol=0)


def top_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of keys chosen by the means of blocks, within the model."""
    means_q, means_k = (x.unflatten(1, (-1, 64)).mean(2).transpose(1, 2) for x in (q, k))
    indices = (means_q @ means_k.mT).topk(3, dim=-1).indices
    mask = BlockMask.from_indices(indices, block=64, seqlen_k=k.shape[1])
    out: Tensor = flash_attn_func(q, k, v, block_mask=mask)
    return out


def test_compile_with_indices_made_inside() -> None:
    assert_compiles(top_blocks, [torch.randn(3, 1, 512, 2, 16).requires_grad_().unbind() for _ in range(3)], 1)


def test_graphs_keep_nothing_in_masks() -> None:
    """Tables made within a CUDA graph exist when it runs: those of indices are made anew, others have to be built."""
    indices = BlockMask.from_indices(torch.tensor([[[[0, 1], [1, 0], [1, 2]]]]), seqlen_k=384)
    causal = listed(BlockMask.causal(384, 384))
    q = torch.randn(1, 384, 2, 16)
    with as_if_captured():
        first = flash_attn_func(q, q, q, block_mask=indices)
        assert not indices._rows
        assert not indices._tables
        searching = indices.with_order("auto")
        assert bitwise_equal(first, flash_attn_func(q, q, q, block_mask=searching))  # an order is for backward passes
        for mask, x in ((causal, q), (searching, q.clone().requires_grad_())):
            with pytest.raises(RuntimeError, match="block_mask: expected one that has been built"):
                flash_attn_func(x, q, q, block_mask=mask)
    assert bitwise_equal(first, flash_attn_func(q, q, q, block_mask=indices))
    indices.build()
    causal.build("cpu")
    with as_if_captured():
        flash_attn_func(q, q, q, block_mask=causal)
        assert bitwise_equal(first, flash_attn_func(q, q, q, block_mask=indices))


def test_unbuilt_masks_do_not_compile() -> None:
    step, _ = compiled(attend)
    q = torch.randn(1, 300, 2, 16)
    with pytest.raises(Exception, match=r"expected one that has been built, .* call its build\(\) before"):
        step(q, q, q, listed(BlockMask.causal(300, 300)))


class NoCopy(TorchFunctionMode):
    """Refuses constants of the host, which would be copied to the device, and waited for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray), func
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("made_in_modes")
def test_indices_stay_on_the_device() -> None:
    """Rows and columns of indices follow there: not one number goes to the host, or comes from it."""
    indices = torch.rand(2, 3, 4, 4).argsort(-1)
    counts = torch.tensor([0, 1, 3, 4]).expand(2, 3, 4)
    blocks = (64, 64), (128, 128), (64, 256), (256, 64)
    for block, order, given in itertools.product(blocks, ("default", "spt"), (None, counts)):
        with NeverWaiting(), NoCopy():
            mask = BlockMask.from_indices(indices, given, block=block, seqlen_k=4 * block[1] - 5)
            mask.with_order(order).tables(torch.device("cpu"), backward=True)
    with pytest.raises(Waits), NeverWaiting():
        listed(BlockMask.causal(300, 300)).build("cpu")
    with pytest.raises(AssertionError), NoCopy():
        torch.tensor([1, 2])


def test_indices_are_checked_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_attn_cute.runtime.settings.check_data", lambda: True)
    ok = torch.tensor([[[[0, 2, -1], [1, 0, 2]]]])
    BlockMask.from_indices(ok, seqlen_k=384)
    for indices, counts, match in (
        (ok + 1, None, "indices: expected numbers below 3, got 3"),
        (torch.tensor([[[[0, 0, 1]]]]), None, "indices: expected each number once in a row, got one twice"),
        (ok, torch.tensor([[[4, 0]]]), "counts: expected 0 to 3, got 0 to 4"),
    ):
        with pytest.raises(ValueError, match=match):
            BlockMask.from_indices(indices, counts, seqlen_k=384)
    BlockMask.from_indices(torch.tensor([[[[0, 9, 9]]]]), torch.tensor([[[1]]]), seqlen_k=384)


def test_indices_twice_count_once() -> None:
    twice = BlockMask.from_indices(torch.tensor([[[[1, 1, 0, 1, 0]]]]), block=64, seqlen_k=128)
    once = BlockMask.from_indices(torch.tensor([[[[0, 1]]]]), block=64, seqlen_k=128)
    qkv = [torch.randn(1, rows, 1, 16, requires_grad=True) for rows in (64, 128, 128)]
    assert same_bits(*(with_gradients(flash_attn_func(*qkv, block_mask=mask), qkv) for mask in (twice, once)))


def test_nested_tensors() -> None:
    lengths = (100, 233)
    parts = [[torch.randn(length, 2, 16) for length in lengths] for _ in range(3)]
    offsets = torch.tensor([0, 100, 333])
    q, k, v = (torch.nested.nested_tensor_from_jagged(torch.cat(x), offsets) for x in parts)
    out = flash_attn_func(q, k, v, block_mask=documents(333, 50))
    cu = offsets.int()
    q, k, v = (torch.cat(x) for x in parts)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 233, 233, block_mask=documents(333, 50))
    assert bitwise_equal(out.values(), expected)


def test_explained_without_being_built() -> None:
    q = torch.randn(1, 300, 2, 64, dtype=torch.bfloat16)
    mask = listed(BlockMask.causal(300, 300))
    explained = explain(q, q, q, block_mask=mask, gpu="sm90")
    assert explained.backend == "sm90"
    assert not mask._rows


def test_plans_are_not_mixed_up() -> None:
    """Calls that look alike but for their masks: each is checked, and gets its own."""
    q = torch.randn(2, 300, 4, 16)
    plain = flash_attn_func(q, q, q)
    causal = flash_attn_func(q, q, q, block_mask=BlockMask.causal(300, 300))
    assert not torch.equal(plain, causal)
    torch.testing.assert_close(causal, flash_attn_func(q, q, q, causal=True))
    with pytest.raises(ValueError, match="block_mask: expected one over"):
        flash_attn_func(q, q, q, block_mask=BlockMask.causal(300, 299))
    window = flash_attn_func(q, q, q, block_mask=BlockMask.window(300, 300, left=3, right=0))
    torch.testing.assert_close(window, flash_attn_func(q, q, q, window_size=(3, 0)))


def test_long_window() -> None:
    """Rows of a mask that would not fit as a whole: (65536, 65536) would be 4 GB of bools."""
    length = 1 << 16
    q, k, v = (torch.randn(1, length, 1, 8) for _ in range(3))
    out = flash_attn_func(q, k, v, block_mask=listed(BlockMask.window(length, length, left=200, right=0)))
    torch.testing.assert_close(out, flash_attn_func(q, k, v, window_size=(200, 0)))


@pytest.mark.parametrize(
    "size", [(1, 32, 128), (1 << 12, 32, 128), (1 << 26, 128, 1024)], ids=["rows", "few elements", "several blocks"]
)
def test_pieces_of_other_sizes(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces may also be longer than a block of the mask, as they are on a GPU."""
    monkeypatch.setitem(blockwise._BLOCK_SIZES, "cpu", blockwise.BlockSize(*size))
    rng = random.Random(str(size))
    for _ in range(4):
        assert_matches_oracle(random_dense(rng, {"nheads": 6, "nheads_k": 3, "bias": (1, 1, 1)}, torch.float32))
