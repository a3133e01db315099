"""Equal inputs give equal bits: run after run, under load, in other processes and in replays of a graph."""

import contextlib
import hashlib
import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.backends.cute.plan import plan_backward
from flash_attn_cute.calls import dispatch, prepared_call
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from tests.lib.checks import (
    DEVICES,
    Case,
    Results,
    assert_matches_oracle,
    bits,
    both_passes,
    differing,
    each_of,
    each_on,
    needs_kernels,
    packed_or_dense,
    poisoned_dout,
    random_call,
    same_bits,
    with_gradients,
)
from tests.lib.oracle import Call
from tests.lib.waits import captured

MASKS: dict[str, Case] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (300, 90)},
    "left": {"window_size": (100, None)},
    "softcap": {"causal": True, "softcap": 3.0},
    "sink": {"causal": True, "sink": True},
    "padding": {"causal": True, "sink": True, "seqused": True},
}
HEADS = [(4, 4), (8, 2), (4, 1)]

# Every mask at every d; heads and layouts take turns, so that each meets every mask and every d, and each other.
CASES: dict[str, Case] = {
    f"d{d}-{mask}-{heads[0]}on{heads[1]}-{'packed' if packed else 'dense'}": {
        "head_dim": d,
        "nheads": heads[0],
        "nheads_k": heads[1],
        "packed": packed,
        **MASKS[mask],
    }
    for i, d in enumerate(HEAD_DIMS)
    for j, mask in enumerate(MASKS)
    for heads, packed in [(HEADS[(i + j) % 3], (i + j // 3) % 2 == 0)]
}
# On a CPU the least d will do to see that the tests work.
on_both = pytest.mark.parametrize(
    ("backend", "head_dim"), [("portable", 64), *(pytest.param("sm90", d, marks=needs_kernels) for d in HEAD_DIMS)]
)
each_case_on_both = each_on(CASES, one_in=5)  # each mask once on a CPU
TIME_LIMIT = 300  # seconds that child processes have, compiling included
# Either way in which the portable backend computes.
PORTABLE: dict[str, Case] = {
    "fused": {"causal": True},
    "blockwise": {"window_size": (30, 5), "softcap": 2.0, "sink": True, "bias": (0, 1, 1), "mask": (1, 1, 1)},
}


def prepare(case: Case, backend: str, *, deterministic: bool = True) -> Callable[[], Results]:
    """Both passes of a case's call, which is always the same one.

    On a GPU up to ten tiles of keys add to the same queries, and there are more tiles than CTAs with eight heads.
    """
    torch.manual_seed(0)
    lengths = [137, 0, 37, 64] if case["packed"] else [119, 119]
    call = small_call(lengths, lengths, case, backend)
    return both_passes(call, poisoned_dout(call, call.q), deterministic=deterministic, backend=backend)


def small_call(lengths_q: list[int], lengths_k: list[int], case: Case, backend: str) -> Call:
    """The call of a case, nine times longer on a GPU, which has tiles of 64 to 128."""
    device = DEVICES[backend]
    scale = 9 if device == "cuda" else 1
    lengths = ([scale * length for length in side] for side in (lengths_q, lengths_k))
    return random_call(*lengths, dtype=torch.bfloat16, device=device, **case)


def digest(results: Results) -> str:
    """A number for all bits of all results."""
    sha = hashlib.sha256()
    for x in results.values():
        sha.update(bits(x).cpu().numpy().tobytes())
    return sha.hexdigest()


def digests_under_load(cases: list[Case], backend: str, repetitions: int) -> list[tuple[str, list[str]]]:
    """Digest of each case in this process beside other work, and the results that differ from run to run."""
    found = []
    for case in cases:
        function = prepare(case, backend)
        function()  # compiles
        with load(DEVICES[backend]):
            first = function()
            found.append((digest(first), differing(first, function, repetitions)))
    return found


@contextlib.contextmanager
def load(device: str) -> Iterator[None]:
    """Another thread multiplies matrices all the while, on a GPU on a stream of its own.

    Each product is a batch of one large tile for three quarters of the SMs, on which nothing else has room, and takes
    about as long as a call. So of a kernel that starts meanwhile some CTAs come late.
    """
    cuda = device == "cuda"
    shape = (torch.cuda.get_device_properties().multi_processor_count * 3 // 4, 128, 16384) if cuda else (128, 128)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream() if cuda else None
    stop = threading.Event()

    def multiply() -> None:
        with torch.cuda.stream(stream):
            for _ in range(8):
                product = x @ x.mT
            product.flatten()[0].item()  # waits

    def multiply_on() -> None:
        while not stop.is_set():
            multiply()

    with ThreadPoolExecutor(1) as executor:
        executor.submit(multiply).result()  # loads what it needs
        endless = executor.submit(multiply_on)
        try:
            yield
        finally:
            stop.set()
        endless.result()


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of a function in each of so many fresh processes, which end with the time limit, deadlocked or not."""
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, torch.set_num_threads, (threads,), maxtasksperchild=1) as pool:
        return pool.starmap_async(function, [arguments] * count, chunksize=1).get(TIME_LIMIT)


@each_case_on_both
def test_repetitions(backend: str, case: Case, repetitions: int) -> None:
    """Repeats as often as --repetitions says, on a GPU with nothing else to do."""
    function = prepare(case, backend)
    assert not differing(function(), function, repetitions)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_of("options", PORTABLE)
def test_portable_repetitions(
    options: Case, dtype: torch.dtype, deterministic: bool, device: str, repetitions: int
) -> None:
    """The portable backend has no other way to run, so both settings are held to it, whatever PyTorch's own is."""
    torch.use_deterministic_algorithms(False)
    call = random_call([150, 30, 260], nheads=4, nheads_k=2, dtype=dtype, device=device, **options)
    function = both_passes(call, poisoned_dout(call, call.q), deterministic=deterministic, backend="portable")
    assert not differing(function(), function, repetitions)


@needs_kernels
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_default(head_dim: int, repetitions: int) -> None:
    """On Blackwell it adds in the same order. Control: on Hopper its repetitions are not all equal."""
    case: Case = {"head_dim": head_dim, "nheads": 8, "nheads_k": 2, "packed": True}
    function = prepare(case, "sm90", deterministic=False)
    if dispatch.BACKENDS["sm90"].name == "sm100":
        assert not differing(prepare(case, "sm90")(), function, repetitions)
    else:
        assert "dq" in differing(function(), function, repetitions)


def test_the_check_sees_one_difference_among_many_repetitions() -> None:
    """Control: of one bit, in one element of one result, once."""
    zeros = {"out": torch.zeros(100), "lse": torch.zeros(100)}
    once = {**zeros, "lse": torch.zeros(100).index_fill(0, torch.tensor([70]), -0.0)}
    repetitions = iter([zeros, once, zeros])
    assert differing(zeros, lambda: next(repetitions), 3) == ["lse"]
    assert digest(zeros) != digest(once)


@on_both
def test_under_load(backend: str, head_dim: int, repetitions: int) -> None:
    """Whichever CTAs run at the same time, they come to an end, and to the same bits as here without load.

    Both processes on a GPU compile, or load, the kernels.
    """
    cases = [case for case in CASES.values() if case["head_dim"] == head_dim]
    idle: list[tuple[str, list[str]]] = [(digest(prepare(case, backend)()), []) for case in cases]
    for loaded in in_processes(1 if backend == "portable" else 2, digests_under_load, cases, backend, repetitions):
        assert loaded == idle


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.numerics.test_determinism.TIME_LIMIT", 0.5)
    with pytest.raises(multiprocessing.TimeoutError):
        in_processes(1, time.sleep, 1000)


@needs_kernels
@each_of("case", CASES)
def test_replays(case: Case) -> None:
    """A captured graph gives the bits of the eager call every time: of its workspace nothing is left behind."""
    function = prepare(case, "sm90")
    expected = function()
    graph, found = captured(function)

    def replay() -> Results:
        graph.replay()
        return found

    assert not differing(expected, replay, 50)


@each_case_on_both
def test_against_the_oracle(backend: str, case: Case) -> None:
    """Results that are equal every time are right, too, and gradients through lse beside a sink."""
    lengths = ([37, 1, 0, 16, 33], [25, 5, 7, 0, 50]) if case["packed"] else ([33] * 2, [43] * 2)
    call = small_call(*lengths, case, backend)
    assert_matches_oracle(call, through_lse="sink" in case, deterministic=True, backend=backend)


@needs_kernels
@pytest.mark.parametrize(("heads_in_cache", "sections"), [(1, 3), (1, 2), (2, 1), (3, 0)])
@packed_or_dense
@pytest.mark.parametrize("heads", [(4, 4), (16, 4)], ids=["alone", "grouped"])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sections_of_heads(
    head_dim: int,
    mask: str,
    heads: tuple[int, int],
    packed: bool,
    heads_in_cache: int,
    sections: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few heads at a time, as only long sequences have them, and those that are left together."""
    backend: Any = dispatch.BACKENDS["sm90"]
    launch_of = backend.launch_of

    def few_together(plan_pass: Any, *arguments: Any) -> Any:
        launch = launch_of(plan_pass, *arguments)
        if plan_pass is not plan_backward:
            return launch
        numbers = launch.plan.numbers._replace(heads_in_cache=heads_in_cache, sections=sections)
        return launch._replace(plan=launch.plan._replace(numbers=numbers))

    monkeypatch.setattr(backend, "launch_of", few_together)
    monkeypatch.setattr(prepared_call, "_kept", {})  # with passes that have been prepared before
    case: Case = {"head_dim": head_dim, "nheads": heads[0], "nheads_k": heads[1], "packed": packed, **MASKS[mask]}
    lengths = ([137, 0, 37, 64], [119, 7, 37, 70]) if packed else ([119] * 2, [137] * 2)
    call = small_call(*lengths, case, "sm90")
    assert_matches_oracle(call, deterministic=True, backend="sm90")
    repeat = both_passes(call, poisoned_dout(call, call.q), deterministic=True, backend="sm90")
    assert not differing(repeat(), repeat, 5)


def run_beyond_slots(head_dim: int, packed: bool) -> None:
    """Both passes of a call whose first sequence has a seqused_k above its own rows, all of them in the buffer."""
    case: Case = {"head_dim": head_dim, "nheads": 2, "packed": packed}
    call = small_call([37, 37], [7, 200] if packed else [67, 67], case, "sm90")
    used = torch.tensor([1000, 603], dtype=torch.int32, device="cuda")
    both_passes(replace(call, seqused_k=used), torch.randn_like(call.q), deterministic=True, backend="sm90")()
    torch.cuda.synchronize()


@needs_kernels
@packed_or_dense
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_beyond_what_sequences_own(head_dim: int, packed: bool) -> None:
    """They break the contract, and the results may be anything, but no CTA waits for tiles that do not exist."""
    in_processes(1, run_beyond_slots, head_dim, packed)


def run_beyond_tensors(head_dim: int) -> None:
    """Offsets that end behind the tensors give the bits of offsets that end with them, in both passes."""
    q, k, v, dout = torch.randn(4, 300, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    cu, beyond = (torch.tensor([0, 170, end], dtype=torch.int32, device="cuda") for end in (300, 3000))
    for heads in (8, 2):
        a, b, c = leaves = [x.detach().requires_grad_() for x in (q, k[:, :heads], v[:, :heads])]
        results = []
        for of_q, of_k in itertools.product((cu, beyond), repeat=2):
            out = flash_attn_varlen_func(a, b, c, of_q, of_k, 170, 170, deterministic=True, backend="sm90")
            results.append(with_gradients(out, leaves, dout))
            torch.cuda.synchronize()
        assert all(same_bits(results[0], other) for other in results[1:])


@needs_kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_offsets_beyond_the_tensors(head_dim: int) -> None:
    """Offsets beyond the tensors count as the tensors' ends."""
    in_processes(1, run_beyond_tensors, head_dim)
