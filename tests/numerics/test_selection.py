"""Calls in which each query selects key blocks (``BlockMask.from_selection``), against the oracle."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_attn_cute import BlockMask, explain, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.cute import CuteBackend, selection_plan
from flash_attn_cute.backends.portable import selected
from flash_attn_cute.calls import dispatch
from tests.lib import checks
from tests.lib.checks import (
    Case,
    assert_compiles,
    assert_matches_oracle,
    assert_rows_reach_nothing,
    bitwise_equal,
    differing,
    draws,
    each_of,
    hopper_alone,
    needs_kernels,
    offsets,
    packed_or_dense,
    padded_results,
    random_call,
    run,
    same_bits,
    small_call,
)
from tests.lib.masks import assert_masks_are_captured, random_selection, with_selection
from tests.lib.oracle import Call
from tests.lib.refusals import assert_refused, refusals

LENGTHS = (0, 1, 15, 63, 64, 65, 128, 129, 200)
ON_HOPPER = hopper_alone("no other architecture has kernels for selections")


def drawn(draw: random.Random, device: str) -> Call:
    call = small_call(draw, LENGTHS, device=device)
    return random_selection(call, draw, draw.choice([1, 3, 16, 64, 64, 100, 128]), draw.choice([0, 1, 2, 5]))


def test_random_selections(fuzz_seconds: float, device: str) -> None:
    for _, draw in draws("selections", 2 * fuzz_seconds, least=10):  # a busy machine may be slow
        asked: Case = {"through_lse": draw.random() < 0.5, "return_max_logits": draw.random() < 0.3}
        assert_matches_oracle(drawn(draw, device), backend="portable", **asked)


@ON_HOPPER
def test_random_selections_on_hopper(fuzz_seconds: float) -> None:
    """Calls of 32 kinds, as each kind compiles kernels of its own."""
    sizes = (*LENGTHS, 127, 500)
    for _, rng in draws("selections on sm90", 4 * fuzz_seconds, least=10):
        kind = random.Random(f"{checks.fuzz_seed} {rng.randrange(32)}")
        torch.manual_seed(rng.randrange(2**31))
        nheads_k, group = rng.randint(1, 2), kind.choice([1, 2, 3, 4, 8, 16, 32])
        packed, seqused, batch = kind.random() < 0.5, kind.random() < 0.3, rng.randint(1, 3)
        lengths = [(rng.choice(sizes), rng.choice(sizes)) for _ in range(batch)]
        lengths = lengths if packed or seqused else lengths[:1] * batch
        call = random_call(
            *map(list, zip(*lengths, strict=True)),
            nheads=nheads_k * group,
            nheads_k=nheads_k,
            head_dim=kind.choice([64, 128, 128, 72, 32, 136, 192, 256]),
            head_dim_v=kind.choice([None, None, 64, 128, 256]),
            dtype=kind.choice([torch.bfloat16, torch.float16]),
            packed=packed,
            seqused=seqused,
            causal=kind.random() < 0.5,
            window_size=(kind.choice([None, None, 0, 90]), kind.choice([None, None, 3, 150])),
            softcap=kind.choice([0.0, 0.0, 2.0]),
            sink=kind.random() < 0.3,
            device="cuda",
        )
        block = kind.choice([64, 128, 192, 1, 4, 16, 32, 40, 100])
        call = random_selection(call, rng, block, rng.choice([0, 1, 2, 5, 16]))
        max_logits = kind.random() < 0.3
        assert_matches_oracle(call, through_lse=kind.random() < 0.5, return_max_logits=max_logits, backend="sm90")


@packed_or_dense
@pytest.mark.parametrize("elements", [1, 40_000])
def test_parts_of_queries(packed: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query at a time, or some: as good as all at once."""
    monkeypatch.setitem(selected._ELEMENTS, "cpu", elements)
    call = random_call([70, 70], [130, 130], nheads=4, nheads_k=2, packed=packed, causal=True)
    assert_matches_oracle(random_selection(call, random.Random(elements), 16, 3), through_lse=True)


@packed_or_dense
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rows_that_reach_nothing(softcap: float, packed: bool, device: str) -> None:
    """Keys of blocks that no query selects, or none whose window shows them; and queries that select nothing else."""
    options: Case = {"nheads": 4, "nheads_k": 2, "causal": True, "window_size": (40, None), "softcap": softcap}
    call = random_call([150, 150], packed=packed, device=device, **options)
    indices = torch.randint(0, 3, (2, 2, 150, 4))
    indices[:, :, 30] = -1  # selects nothing, and the next one what the window hides
    indices[:, :, 31] = torch.tensor([4, -1, 9, 4])
    indices[:, :, 120:, 0], indices[:, :, 110:, 1] = 8, 3
    # No query selects blocks 5, 6 and 7; queries that select 3 come too late, and those that select 4 too early.
    queries, keys = (torch.zeros(2, 150, dtype=torch.bool) for _ in range(2))
    queries[:, 30:32], keys[:, 48:128] = True, True
    if packed:
        indices = indices.transpose(1, 2).flatten(0, 1)
        queries, keys = queries.flatten(), keys.flatten()
    call = with_selection(call, indices.to(device), 16)
    assert_matches_oracle(call, through_lse=True, backend="portable")
    assert_rows_reach_nothing(call, queries.to(device), keys.to(device), through_lse=True, backend="portable")


def test_blocks_count_once_in_any_order() -> None:
    """Repeats, other orders and int32 change no bit."""
    call = random_call([50], [300], packed=False)
    indices = torch.rand(1, 2, 50, 5).argsort(-1)[..., :3]
    expected = padded_results(with_selection(call, indices, 64), 0.0)
    for other in (torch.cat((indices.flip(-1), indices[..., 1:]), -1), indices.roll(1, -1).int()):
        found = padded_results(with_selection(call, other, 64), 0.0)
        assert all(bitwise_equal(x, found[name]) for name, x in expected.items())


def test_the_same_bits_every_time(device: str, repetitions: int) -> None:
    call = random_call([500], nheads=4, nheads_k=2, packed=False, device=device)
    call = random_selection(call, random.Random(0), 16, 8)
    both = partial(padded_results, call, 0.0, backend="portable")
    assert not differing(both(), both, repetitions if device == "cuda" else 5)


@pytest.mark.parametrize(
    ("backend", "block"),
    [
        pytest.param("portable", 64, marks=needs_kernels),
        *(pytest.param("sm90", block, marks=ON_HOPPER) for block in (64, 16)),
    ],
)
def test_the_host_never_waits(backend: str, block: int) -> None:
    indices = torch.randint(-1, 8, (1, 2, 512, 3), device="cuda")

    def make() -> BlockMask:
        return BlockMask.from_selection(indices, block=block, seqlen_k=512)

    assert_masks_are_captured(backend, make, lambda: indices.random_(-1, 8), causal=True)


def test_blocks_of_another_size() -> None:
    """Calls that look alike but for the size of blocks."""
    call = random_call([50], [300], packed=False)
    indices = torch.randint(0, 5, (1, 1, 50, 2))
    for block in (64, 32, 64):
        assert_matches_oracle(with_selection(call, indices, block))


@packed_or_dense
def test_compiled(packed: bool) -> None:
    """A mask that is made in the program, whose indices are an argument; nothing is compiled anew."""
    qkv = [torch.randn(2, rows, n, 8, requires_grad=True) for rows, n in ((90, 4), (130, 2), (130, 2))]
    lengths = offsets([90, 90]), offsets([130, 130]), 90, 130

    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        mask = BlockMask.from_selection(indices, block=32, seqlen_k=260 if packed else 130)
        if not packed:
            return flash_attn_func(q, k, v, causal=True, block_mask=mask)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out: Tensor = flash_attn_varlen_func(q, k, v, *lengths, causal=True, block_mask=mask)
        return out

    shape = (180, 2, 3) if packed else (2, 2, 90, 3)
    assert_compiles(step, [(*qkv, torch.randint(-1, 5, shape)) for _ in range(3)], 1)


@ON_HOPPER
def test_compiled_on_hopper() -> None:
    qkv = [torch.randn(1, 512, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]

    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        mask = BlockMask.from_selection(indices, block=64, seqlen_k=512)
        out: Tensor = flash_attn_func(q, k, v, causal=True, block_mask=mask, backend="sm90")
        return out

    calls = [(*qkv, torch.randint(-1, 8, (1, 2, 512, 3), device="cuda")) for _ in range(2)]
    assert_compiles(step, calls, 1, "inductor")


GROUPS: dict[str, Case] = {
    "group-of-16": {"nheads": 16, "nheads_k": 1, "head_dim": 128, "top": 16},
    "group-of-4": {"nheads": 16, "nheads_k": 4, "head_dim": 128, "top": 16},
    "heads-alone": {"nheads": 4, "nheads_k": 4, "head_dim": 64, "top": 8},
    "d192-dv128": {"nheads": 16, "nheads_k": 1, "head_dim": 192, "head_dim_v": 128, "top": 16},
    "d256": {"nheads": 8, "nheads_k": 2, "head_dim": 256, "top": 8},
    "blocks-of-128": {"nheads": 16, "nheads_k": 1, "head_dim": 128, "top": 8, "block": 128},
    "blocks-of-16": {"nheads": 16, "nheads_k": 1, "head_dim": 128, "top": 64, "block": 16},
    "blocks-of-4": {"nheads": 8, "nheads_k": 2, "head_dim": 64, "top": 128, "block": 4},
}


def causal(options: Case, rows: int) -> Call:
    """A causal call whose queries select their own block, the first, and others before their own."""
    given = dict(options)
    top, block = given.pop("top"), given.pop("block", 64)
    torch.manual_seed(0)
    call = random_call([rows], dtype=torch.bfloat16, packed=False, causal=True, device="cuda", **given)
    own = torch.arange(rows, device="cuda")[:, None] // block
    indices = (torch.rand(1, given["nheads_k"], rows, top, device="cuda") * (own + 1)).int()
    indices[..., 0], indices[..., 1] = 0, own[:, 0]
    return with_selection(call, indices, block)


@ON_HOPPER
@each_of("options", GROUPS)
def test_causal(options: Case) -> None:
    assert_matches_oracle(causal(options, 1500), through_lse=True, backend="sm90")


@ON_HOPPER
@each_of("options", GROUPS)
def test_the_same_bits_on_hopper(options: Case, repetitions: int) -> None:
    both = partial(padded_results, causal(options, 1500), 0.0, backend="sm90")
    assert not differing(both(), both, repetitions)


@ON_HOPPER
@torch.no_grad()
def test_the_same_bits_in_any_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    call, backend = causal(GROUPS["group-of-4"], 1000), dispatch.BACKENDS["sm90"]
    whole = run(call, return_lse=True, backend="sm90")
    assert isinstance(backend, CuteBackend)
    monkeypatch.setattr(backend, "launch_of", backend._launch_of)  # anew in each call
    for bound in (1 << 22, 1 << 20):
        monkeypatch.setattr(selection_plan, "_WORKSPACE", bound)
        assert same_bits(whole, run(call, return_lse=True, backend="sm90"))


@ON_HOPPER
def test_tables_take_little_time() -> None:
    """Kernels that list 2.1 million picks take less than half a millisecond."""
    rows, top = 32_768, 16
    q, k, v = (torch.randn(1, rows, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    own = torch.arange(rows, device="cuda")[:, None] // 64
    indices = (torch.rand(1, 4, rows, top, device="cuda") * (own + 1)).int()
    mask = BlockMask.from_selection(indices, block=64, seqlen_k=rows)
    attend = partial(flash_attn_func, q, k, v, causal=True, block_mask=mask, backend="sm90")
    attend()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend()
        torch.cuda.synchronize()
    times = [event.device_time_total for event in profile.key_averages() if "tablesPick" in event.key]  # microseconds
    assert len(times) == 3
    assert sum(times) < 500


def test_recomputed() -> None:
    """A checkpoint recomputes from the blocks that were selected first."""
    q, k, v = (torch.randn(1, 100, 2, 8, requires_grad=True) for _ in range(3))
    indices = torch.randint(0, 7, (1, 2, 100, 2))

    def grads(indices: Tensor) -> tuple[Tensor, ...]:
        mask = BlockMask.from_selection(indices, block=16, seqlen_k=100)
        out = checkpoint(lambda q: flash_attn_func(q, k, v, block_mask=mask, causal=True), q, use_reentrant=False)
        indices.zero_()
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    mask = BlockMask.from_selection(indices.clone(), block=16, seqlen_k=100)
    out = flash_attn_func(q, k, v, block_mask=mask, causal=True)
    assert same_bits(grads(indices), torch.autograd.grad(out.square().sum(), (q, k, v)))


def on_meta(d: int = 64, block: int = 64, **options: Any) -> Any:
    """An explanation of a call, of tensors without memory."""
    q = torch.empty(1, 256, 4, d, dtype=torch.bfloat16, device="meta")
    indices = torch.empty(1, 4, 256, 2, dtype=torch.int32, device="meta")
    mask = BlockMask.from_selection(indices, block=block, seqlen_k=256)
    return explain(q, q, q, block_mask=mask, **options)


def test_which_backend_serves_it() -> None:
    passed_over = on_meta(gpu="sm100")
    assert passed_over.backend == "portable"
    assert passed_over.passed_over == {"sm100": ("key blocks selected per query (BlockMask.from_selection)",)}
    assert on_meta().spec.selection_block == 64
    chosen = on_meta(gpu="sm90")
    assert chosen.backend == "sm90"
    assert chosen.forward.config.pass_name == "selection"
    assert chosen.backward.config.pass_name == "selection_backward"
    assert chosen.backward.deterministic
    for given in ({"d": 256}, {"block": 32}, {"block": 100}):
        assert on_meta(gpu="sm90", **given).backend == "sm90"


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        ("sm100", {}, "key blocks selected per query"),
        ("sm90", {"precise_gradients": True}, "precise_gradients=True beside BlockMask.from_selection"),
    ],
)
def test_kernels_refuse_by_name(gpu: str, options: Case, words: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{gpu}', which cannot: .*") as raised:
        on_meta(gpu=gpu, backend=gpu, **options)
    assert words in str(raised.value)


INDICES = torch.zeros(1, 2, 6, 2, dtype=torch.int64)


def attend(indices: Tensor = INDICES, **options: Any) -> Any:
    x = torch.randn(1, 6, 4, 8)
    return flash_attn_func(x, x, x, block_mask=BlockMask.from_selection(indices, block=4, seqlen_k=6), **options)


def made(**options: Any) -> BlockMask:
    given: Case = {"indices": INDICES, "block": 4, "seqlen_k": 6}
    return BlockMask.from_selection(**given | options)


def test_blocks_may_be_longer_than_sequences() -> None:
    """A block of any size takes no more memory than its keys."""
    offsets = torch.tensor([0, 5, 5, 17], dtype=torch.int32)
    call = replace(random_call([17], causal=True), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    indices = torch.randint(-1, 2, (17, 1, 2))
    assert_matches_oracle(with_selection(call, indices, 2**31 - 1), through_lse=True)


@refusals("""
made(indices=[0])
    TypeError: indices: expected a torch.Tensor, got list
made(indices=INDICES.float())
    TypeError: indices: expected int32 or int64, got torch.float32
made(indices=INDICES[0, 0])
    ValueError: indices: expected shape (batch, heads, seqlen_q, top) or
made(block=(4, 4))
    TypeError: block: expected an int, got (4, 4)
made(block=0)
    ValueError: block: expected at least 1, got 0
made(block=2**31)
    ValueError: block: expected fewer than 2^31 keys, got 2147483648
made(seqlen_k=6.0)
    TypeError: seqlen_k: expected an int, got 6.0
made(seqlen_k=-1)
    ValueError: seqlen_k: expected 0 to 2147483647, got -1
attend(INDICES[:, :, 1:])
    ValueError: ... (seqlen_q, seqlen_k) = (6, 6), got one over (5, 6)
attend(INDICES.expand(2, -1, -1, -1))
    ValueError: block_mask: expected a batch of 1 or 1, got 2
attend(INDICES.repeat(1, 2, 1, 1)[:, 1:])
    ValueError: ... nheads = 4 or nheads_k = 4 heads, got 3
attend(INDICES)
    ValueError: ... nheads = 4 or nheads_k = 4 heads, got 2
made() & BlockMask.causal(6, 6)
    ValueError: &: expected a mask of blocks of queries, got
BlockMask.causal(6, 6) | made()
    ValueError: |: expected a mask of blocks of queries, got
made().with_order("spt")
    ValueError: order: expected a mask of blocks of queries, got key blocks
made().statistics
    ValueError: ... (from_selection), which has no tables
made().to_flex()
    ValueError: ... (from_selection), which has no tables
made().plot()
    ValueError: ... (from_selection), which has no tables
""")
def test_errors(call: str, error: str) -> None:
    assert_refused(call, error, globals())


def test_numbers_are_checked_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_attn_cute.runtime.settings.check_data", lambda: True)
    made(indices=INDICES + 1)
    with pytest.raises(ValueError, match=r"^indices: expected numbers below 2, got 2$"):
        made(indices=INDICES + 2)


def test_repr() -> None:
    words = "BlockMask(6 x 6 of 2 heads, blocks of 4 keys selected per query, order default)"
    assert repr(made()) == words
    assert repr(made().build()) == words
