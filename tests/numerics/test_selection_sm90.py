"""Hopper's kernels for key blocks that each query selects, on a GPU, against the oracle."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.backends.cute import CuteBackend, selection_plan
from flash_attn_cute.calls import dispatch
from tests.lib import checks
from tests.lib.checks import (
    Case,
    assert_compiles,
    assert_matches_oracle,
    bitwise_equal,
    differing,
    draws,
    each_of,
    hopper_alone,
    padded_results,
    random_call,
    run,
)
from tests.lib.masks import assert_selections_are_captured, random_selection, with_selection
from tests.lib.oracle import Call

pytestmark = hopper_alone("no other architecture has kernels for selections")
LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 500)


@torch.no_grad()
def results(call: Call) -> dict[str, Tensor]:
    return dict(zip(("out", "lse"), run(call, return_lse=True, backend="sm90"), strict=True))


def check(rng: random.Random) -> None:
    """A call of one of 32 kinds, as each kind compiles kernels of its own."""
    kind = random.Random(f"{checks.fuzz_seed} {rng.randrange(32)}")
    torch.manual_seed(rng.randrange(2**31))
    nheads_k, group = rng.randint(1, 2), kind.choice([1, 2, 3, 4, 8, 16, 32])
    packed, seqused, batch = kind.random() < 0.5, kind.random() < 0.3, rng.randint(1, 3)
    lengths = [(rng.choice(LENGTHS), rng.choice(LENGTHS)) for _ in range(batch)]
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


def test_random_selections(fuzz_seconds: float) -> None:
    for _, rng in draws("selections on sm90", 4 * fuzz_seconds, least=10):
        check(rng)


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


@each_of("options", GROUPS)
def test_causal(options: Case) -> None:
    assert_matches_oracle(causal(options, 1500), through_lse=True, backend="sm90")


@each_of("options", GROUPS)
def test_the_same_bits_every_time(options: Case, repetitions: int) -> None:
    both = partial(padded_results, causal(options, 1500), 0.0, backend="sm90")
    assert not differing(both(), both, repetitions)


def test_the_same_bits_in_any_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    call, backend = causal(GROUPS["group-of-4"], 1000), dispatch.BACKENDS["sm90"]
    whole = results(call)
    assert isinstance(backend, CuteBackend)
    monkeypatch.setattr(backend, "launch_of", backend._launch_of)  # anew in each call
    for bound in (1 << 22, 1 << 20):
        monkeypatch.setattr(selection_plan, "_WORKSPACE", bound)
        parts = results(call)
        assert all(bitwise_equal(whole[name], parts[name]) for name in whole)


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


@pytest.mark.parametrize("block", [64, 16])
def test_the_host_never_waits(block: int) -> None:
    assert_selections_are_captured("sm90", block)


def test_compiled() -> None:
    qkv = [torch.randn(1, 512, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]

    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        mask = BlockMask.from_selection(indices, block=64, seqlen_k=512)
        out: Tensor = flash_attn_func(q, k, v, causal=True, block_mask=mask, backend="sm90")
        return out

    calls = [(*qkv, torch.randint(-1, 8, (1, 2, 512, 3), device="cuda")) for _ in range(2)]
    assert_compiles(step, calls, 1, "inductor")
