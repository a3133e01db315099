"""Steps of the self-check, in their order: what each does, which family of kernels it judges, and how long it may take.

A family is a class of kernels at one size of tiles (``kernels.registry.family``), or ``MASKS``, ``BIASES``,
``MAX_LOGITS`` or ``TOGETHER``, which calls with a mask, a bias or max_logits, and all calls, need besides. Of each
family the steps are:

1. one tile of integers, for which every product is exact: registers, barriers and descriptors;
2. so many tiles a CTA that every ring of stages wraps at least thrice, at lengths that fill no tile;
3. random calls: packed sequences with NaN in their padding, windows, grouped heads, softcap, sinks, slices;
4. scores that raise row_max, with the same bits again and again, alone, beside copies and GEMMs of other streams, and
   in a CUDA graph;
5. backward, sums of dQ that take more than 2^31 bytes.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Backend
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.jit import warm
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.registry import Architecture, family
from flash_attn_cute.runtime import settings
from flash_attn_cute.selfcheck import samples
from flash_attn_cute.selfcheck.samples import Sample, WrongResultError, bits

MASKS, BIASES, MAX_LOGITS, TOGETHER = "masks", "biases", "max logits", "together"

_HEADS = ((64, 64), (128, 128), (96, 96), (192, 128), (192, 192), (256, 256))
# Rows of a sequence: fewer than pairs of CTAs are used for; and as many as they are, with a right bound, too.
_FEW, _MANY, _MANY_CAUSAL = 200, 1100, 2100
_WIDE = 900  # keys to the left of a query, within a window that pairs of CTAs are used for
_REPEATED = "repeated"
_SIXTEEN_BITS = torch.bfloat16
_LARGE = 2**31  # bytes of dQ's sums
_MANY_COPIES = 200  # of a call that is not compiled ahead: its kernels are those of others
_MOST_COMPILERS = 32
_ROOM_FOR_LARGE = 10 * 2**30  # bytes that such a call takes, at most


@dataclass(frozen=True)
class Target:
    """A backend on a device, as a process that runs steps has it."""

    backend: Backend
    device: torch.device
    repetitions: int
    chosen: frozenset[str]  # names of all steps of this run
    failed: frozenset[str]  # families that have failed before this step
    # Runs steps of these names in another process; what it gives says whether that is over, and raises if it failed.
    other_process: Callable[[list[str]], AbstractContextManager[Callable[[], bool]]]


class Step(NamedTuple):
    """One step of the check."""

    name: str
    family: str  # that is not to serve calls if the step fails; "": none
    run: Callable[[Target], str | None]  # raises what is wrong; returns why it was left out, if it was
    sample: Sample | None = None  # whose kernels are compiled ahead
    passes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # families without which it says nothing
    is_long: bool = False  # left to ``--all``
    seconds: float = 60.0  # that it may take

    def judged_by(self, failed: dict[str, str]) -> bool:
        """Whether it still has something to say, after these families have failed."""
        return not failed.keys() & {self.family, *self.needs}


class Kernels(NamedTuple):
    """A family of one pass, and where calls get its kernels."""

    family: str
    pass_name: str
    d: int
    d_v: int
    rows: int  # of a sequence of queries and of keys


def family_of_sample(architecture: Architecture, pass_name: str, sample: Sample) -> str:
    """The family that a sample's pass is computed by."""
    lengths = sample.lengths_q if pass_name == "forward" else sample.lengths_k or sample.lengths_q
    rows = sum(lengths) // len(lengths) if sample.packed else max(lengths)
    window = None if sample.left is None or sample.right is None else sample.left + sample.right + 1
    return _family(architecture, pass_name, sample.d, sample.d_v, _features(sample), rows, window)


def _features(sample: Sample) -> Features:
    return Features(
        packed=sample.packed,
        left=sample.left is not None and not sample.mask,
        right=sample.right is not None and not sample.mask,
        softcap=sample.softcap > 0,
        sink=sample.sink,
        mask=bool(sample.mask),
        block_mask=sample.blocks,
        bias=bool(sample.bias),
        max_logits=sample.max_logits,
        grouped=sample.heads > sample.heads_k,
        deterministic=True,
    )


def _family(
    architecture: Architecture,
    pass_name: str,
    d: int,
    d_v: int,
    features: Features,
    rows: int,
    window: int | None = None,
) -> str:
    options = {"queries" if pass_name == "forward" else "keys": rows, "window": window}
    return family(architecture.passes[pass_name].configure("bfloat16", d, d_v, features, **options))  # type: ignore[index]


def families_of_call(
    architecture: Architecture, d: int, d_v: int, flags: frozenset[str], rows: tuple[int, int] | None
) -> frozenset[str]:
    """The families that a call may come to, in either pass and of any part of its sequences.

    ``flags``: those of ``Features`` that are on: left, right, mask, block_mask, bias and max_logits matter. ``rows``: a
    sequence's of queries and of keys, on average, at most; None: any number.
    """
    features = Features(**dict.fromkeys(flags, True))
    found = {TOGETHER}
    for pass_name, most in zip(("forward", "backward"), rows or (2**30, 2**30), strict=True):
        found |= {_family(architecture, pass_name, d, d_v, features, n) for n in (0, most)}
    found |= {MASKS} if features.listed else set()
    found |= {BIASES} if features.bias else set()
    return frozenset(found | ({MAX_LOGITS} if features.max_logits else set()))


def kernels_of(architecture: Architecture) -> list[Kernels]:
    """The families of both passes, each where it is first met."""
    found: dict[str, Kernels] = {}
    for pass_name in ("forward", "backward"):
        for (d, d_v), rows in [(heads, rows) for heads in _HEADS for rows in (_FEW, _MANY)]:
            name = _family(architecture, pass_name, d, d_v, Features(deterministic=True), rows)
            found.setdefault(name, Kernels(name, pass_name, d, d_v, rows))
    return list(found.values())


def steps_of(architecture: Architecture) -> list[Step]:
    """All steps, those of ``--all`` included."""
    found = []
    for number, kernels in enumerate(kernels_of(architecture)):
        found += list(_steps_of_family(architecture, kernels, number))
    found += list(_steps_of_tensors(architecture, found))
    return [Step("kernels compiled", "", partial(_compile, found), seconds=300.0), *found, _together(found)]


def _steps_of_family(architecture: Architecture, kernels: Kernels, number: int) -> Iterator[Step]:
    d, d_v, rows = kernels.d, kernels.d_v, kernels.rows
    is_pair = rows > _FEW

    def step(name: str, sample: Sample, run: Run = _compare, *, is_long: bool = False) -> Step:
        return _step(f"{kernels.family}: {name}", kernels.family, sample, (kernels.pass_name,), run, is_long=is_long)

    yield step("one tile, exact", Sample(d, d_v, (1024 if is_pair else 128,), exact=True))
    batch, copies = (1, (2, 40)) if is_pair else (6, (1, 96))
    yield step("rings wrap", Sample(d, d_v, (rows,) * batch, heads=1, heads_k=1, copies=copies))
    candidates = [
        Sample(d, d_v, (150, 17, 0, 63), packed=True, padded=True, right=0, heads=4, dlse=True),
        Sample(d - 8, d_v - 8, (130,) * 2, (210,) * 2, heads=4, heads_k=1, left=50, right=20, dtype=torch.float16),
        Sample(d, d_v, (177,), (50,), softcap=15.0, sink=True, scale=-0.2, left=90, sliced=True),
        Sample(d, d_v, (_MANY, _MANY + 61), packed=True, padded=True, heads=4, dlse=True),
        Sample(d, d_v, (_MANY_CAUSAL,), left=_WIDE, right=0, softcap=15.0, sink=True, scale=-0.2),
        Sample(d - 8, d_v - 8, (_MANY,), (_MANY + 90,), sliced=True, dtype=torch.float16),
    ]
    fitting = [x for x in candidates if family_of_sample(architecture, kernels.pass_name, x) == kernels.family]
    for i, sample in enumerate(fitting):
        is_long = (i - number) % len(fitting) >= 2  # every kernel gets two of them, in turn
        yield step(f"random call {i + 1}", sample, is_long=is_long)
    yield step(_REPEATED, Sample(d, d_v, (rows,), heads=8, heads_k=8, rising=True), _repeat)
    if kernels.pass_name == "backward":
        tile_d = architecture.passes["backward"].configure("bfloat16", d, d_v, Features()).tile_d
        batch = math.ceil(_LARGE / (8192 * 64 * tile_d * 4)) + 1
        large = Sample(d, d_v, (8192,), (rows,), heads=1, heads_k=1, copies=(batch, 64))
        yield step("sums of dQ above 2^31 bytes", large, _large)


def _steps_of_tensors(architecture: Architecture, before: list[Step]) -> Iterator[Step]:
    known = {step.family for step in before}
    both, forward = ("forward", "backward"), ("forward",)
    seen = set()
    for d, d_v in _HEADS:
        kinds = (
            ("mask", MASKS, both, Sample(d, d_v, (700,), (590,), heads=4, mask="hqk", right=30)),
            ("mask, packed", MASKS, both, Sample(d, d_v, (300, 41, 259), packed=True, padded=True, mask="qk")),
            ("block mask", MASKS, both, Sample(d, d_v, (650, 650), heads=4, blocks=True)),
            ("bias", BIASES, both, Sample(d, d_v, (400,), (348,), heads=4, bias="bhqk", right=0)),
            ("bias, shared", BIASES, both, Sample(d, d_v, (300, 300), (333, 333), bias="qk", float32_bias=True)),
            ("bias, packed", BIASES, both, Sample(d, d_v, (300, 41, 259), packed=True, padded=True, bias="hqk")),
            ("causal", MAX_LOGITS, forward, Sample(d, d_v, (_MANY,), (_MANY + 90,), right=0, max_logits=True)),
            ("softcap", MAX_LOGITS, forward, Sample(d, d_v, (400,), (348,), softcap=15.0, max_logits=True)),
            ("rising", MAX_LOGITS, forward, Sample(d, d_v, (300,), heads=4, rising=True, max_logits=True)),
        )
        for name, judged, passes, sample in kinds:
            needs = tuple(family_of_sample(architecture, p, sample) for p in passes)
            if (name, needs) in seen:
                continue
            seen.add((name, needs))
            assert set(needs) <= known, f"{sample} gets kernels that no step checks: {needs}"
            full_name, is_long = f"{judged}: {name} d{d} {d_v}", "packed" in name or name == "rising"
            yield _step(full_name, judged, sample, passes, _compare, needs=needs, is_long=is_long)


Run = Callable[[Sample, tuple[str, ...], Target], str | None]


def _step(name: str, family: str, sample: Sample, passes: tuple[str, ...], run: Run, **others: Any) -> Step:
    return Step(name, family, partial(run, sample, passes), sample, passes, **others)


def _compile(steps: list[Step], target: Target) -> str | None:
    """Compiles all kernels of steps by many processes, into the folder where calls find them."""
    if not isinstance(target.backend, CuteBackend):
        return "the backend has none"
    if settings.cache_dir() is None:
        return "FLASH_ATTN_CUTE_CACHE_DIR is 0: each step compiles for itself"
    asked: dict[Any, None] = {}

    def note(config: Any) -> Callable[..., None]:
        asked[config] = None
        return lambda arguments: None

    dry = CuteBackend(target.backend.architecture, kernel_of=note)
    for step in steps:
        if step.sample is not None and step.name in target.chosen and math.prod(step.sample.copies) < _MANY_COPIES:
            drawn = samples.draw(step.sample, target.device, is_dry=True)
            for name in step.passes:
                getattr(drawn, name)(dry)
    if not asked:
        return "none of the steps has a kernel of its own"
    for warmed in warm.warm(list(asked), min(len(os.sched_getaffinity(0)), _MOST_COMPILERS)):
        print(f"{warmed.seconds:5.1f} s  {warmed.config}", flush=True)
    return None


def _together(steps: list[Step]) -> Step:
    """The step of two processes that repeat calls of each pass at the same time, of this GPU alone."""
    repeated = [step for step in steps if step.name.endswith(_REPEATED) and step.family.split()[-1] in ("d64", "d256")]

    def run(target: Target) -> str | None:
        chosen = [step for step in repeated if step.name in target.chosen and step.family not in target.failed]
        if not chosen:
            return "none of the steps that it repeats has passed"
        with target.other_process([step.name for step in chosen]) as is_over:
            while not is_over():
                for step in chosen:
                    step.run(target)
        return None

    return Step("two processes", TOGETHER, run, seconds=180.0)


def _compare(sample: Sample, passes: tuple[str, ...], target: Target) -> None:
    """Compares passes of one call with the truth."""
    drawn = samples.draw(sample, target.device)
    for name in passes:
        drawn.compare(getattr(drawn, name)(target.backend))


def _repeat(sample: Sample, passes: tuple[str, ...], target: Target) -> None:
    """Compares the bits of many runs: alone, beside work of other streams, and of a graph."""
    drawn = samples.draw(sample, target.device)
    run: Callable[[], dict[str, Tensor]] = partial(getattr(drawn, passes[0]), target.backend)
    expected = run()
    drawn.compare(expected)
    _same_bits("alone", expected, run, target.repetitions)
    if target.device.type != "cuda":
        return
    with _load(target.device, target.repetitions):
        _same_bits("beside copies and GEMMs", expected, run, target.repetitions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for x in captured.values():
            x.fill_(torch.nan)
        graph.replay()
        _same_bits("in a CUDA graph", expected, lambda: captured, 1)


def _same_bits(where: str, expected: dict[str, Tensor], run: Callable[[], dict[str, Tensor]], times: int) -> None:
    differs = {name: torch.zeros((), dtype=torch.bool, device=x.device) for name, x in expected.items()}
    for _ in range(times):
        for name, x in run().items():
            differs[name] |= (bits(x) != bits(expected[name])).any()
    wrong = [name for name, seen in differs.items() if seen]
    if wrong:
        raise WrongResultError(f"{', '.join(wrong)}: expected the same bits in {times} runs {where}")


class _load:
    """Copies and GEMMs on two other streams, enqueued when it is entered."""

    def __init__(self, device: torch.device, times: int) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        self.device, self.times = device, times

    def __enter__(self) -> None:
        copied = torch.zeros(2**25, dtype=_SIXTEEN_BITS, device=self.device)
        factor = torch.zeros(3072, 3072, dtype=_SIXTEEN_BITS, device=self.device)
        for stream, work in zip(self.streams, (copied.clone, lambda: factor @ factor), strict=True):
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                for _ in range(2 * self.times):
                    work()

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize(self.device)


def _large(sample: Sample, passes: tuple[str, ...], target: Target) -> str | None:
    """Compares copies of a head and of a batch entry, so many that dQ's sums take more than 2^31 bytes."""
    if target.device.type != "cuda":
        return "only a GPU has the memory for it"
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(target.device)
    if free < _ROOM_FOR_LARGE:
        return f"{free / 2**30:.1f} GiB of the GPU's memory are free, and it takes {_ROOM_FOR_LARGE / 2**30:.0f}"
    _compare(sample, passes, target)
    return None
