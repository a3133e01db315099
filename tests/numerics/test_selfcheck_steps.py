"""The calls of the self-check: their truth is the oracle's, they pass on plain PyTorch, and what is wrong they find.

On a Hopper GPU: the check passes, and each of many bugs is a verdict.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute import CuteBackend, counters
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.jit import key, warm
from flash_attn_cute.kernels.registry import ARCHITECTURES, family
from flash_attn_cute.problem.spec import Results
from flash_attn_cute.selfcheck import __main__ as command
from flash_attn_cute.selfcheck import report, samples, steps, verdict, worker
from flash_attn_cute.selfcheck.runner import WORKER, Findings, Limits
from flash_attn_cute.selfcheck.samples import Sample, WrongResultError
from flash_attn_cute.selfcheck.steps import Step, Target
from flash_attn_cute.selfcheck.verdict import Gpu, Verdict
from tests.lib import oracle
from tests.lib.checks import each_of, gradients, hopper_alone, needs_kernels
from tests.lib.oracle import Call
from tests.lib.selfcheck_bugs import BUGS
from tests.lib.tiers import tiered

CPU = torch.device("cpu")
STEPS = {step.name: step for name in ("sm100", "sm90") for step in steps.steps_of(ARCHITECTURES[name])}
PLAIN_GPU = Gpu("cpu", "", "sm90", "none", (9, 0), 132, 80, "none")


def target(*failed: str) -> Target:
    """Plain PyTorch on the CPU."""
    return Target(PortableBackend(), CPU, 2, frozenset(STEPS), frozenset(failed), lambda names: pytest.fail("no GPU"))


def on_cpu(step: Step) -> bool:
    """Whether a step has something to do there."""
    return step.sample is not None and "2^31" not in step.name


def is_small(step: Step) -> bool:
    """Whether it takes the CPU no time."""
    assert step.sample is not None
    return max(step.sample.d, *step.sample.lengths_q, 3 * step.sample.copies[1]) <= 256


# Both architectures have some calls in common.
_BY_CALL = {(step.sample, step.passes, step.run.func): name for name, step in STEPS.items() if on_cpu(step)}  # type: ignore[attr-defined]
ON_CPU = list(_BY_CALL.values())
SMALL = [name for name in ON_CPU if is_small(STEPS[name])]


def narrowest(names: Iterable[str]) -> list[str]:
    """Chooses the smallest heads among steps that differ in nothing but their head dimensions."""
    found: dict[object, str] = {}
    for name in sorted(names, key=lambda name: -sample_of(name).d - sample_of(name).d_v):
        found[replace(sample_of(name), d=0, d_v=0), STEPS[name].passes, STEPS[name].run.func] = name  # type: ignore[attr-defined]
    return list(found.values())


def sample_of(name: str) -> Sample:
    sample = STEPS[name].sample
    assert sample is not None
    return sample


LARGE = narrowest(name for name in ON_CPU if name not in SMALL)


@pytest.mark.parametrize("name", tiered(dict.fromkeys(SMALL + LARGE), *SMALL))
def test_plain_pytorch_passes_all_steps(name: str) -> None:
    """Each one compares what bfloat16 or float16 gives with float64: the steps and their truth are right.

    Plain PyTorch computes all head dimensions by the same code, so large calls are of the smallest alone.
    """
    assert STEPS[name].run(target()) is None


SAMPLES = {
    "packed": Sample(
        16, 24, (40, 17, 0, 9), packed=True, padded=True, right=0, heads=4, sink=True, dlse=True, max_logits=True
    ),
    "window": Sample(16, 16, (13, 13), (21, 21), heads=4, heads_k=1, left=5, right=2, scale=-0.2),
    "softcap": Sample(16, 16, (17,), (5,), softcap=1.5, left=4, max_logits=True),
    "mask": Sample(16, 16, (30, 30), (33, 33), mask="hqk", right=3),
    "mask of keys, packed": Sample(16, 16, (30, 11, 5), packed=True, padded=True, mask="qk"),
    "bias": Sample(16, 16, (20, 20), (31, 31), bias="hqk", float32_bias=True),
    "bias, packed": Sample(16, 16, (20, 0, 31), packed=True, padded=True, bias="hqk"),
    "block mask": Sample(16, 16, (150, 150), blocks=True),
    "padded": Sample(16, 16, (8, 0, 5), (9, 7, 0), padded=True),
    "exact": Sample(64, 64, (64,), exact=True),
}


@each_of("sample", SAMPLES)
def test_the_truth_is_the_oracles(sample: Sample) -> None:
    drawn = samples.draw(sample, CPU)
    inputs, spec = drawn.inputs, drawn.spec
    named = {name: getattr(inputs, name) for name in vars(Call(inputs.q, inputs.k, inputs.v)) if hasattr(inputs, name)}
    call = Call(
        **named | {"block_mask": None},
        softmax_scale=spec.softmax_scale,
        window_size=(spec.window_left, spec.window_right),
        softcap=spec.softcap,
        shown=drawn.shown,
    ).to(torch.float64)
    out, lse = oracle.attention(call)
    expected = {"out": out, "lse": lse, **gradients(call, out, lse, drawn.dout, drawn.dlse)}
    if sample.max_logits:
        expected["max_logits"] = oracle.max_logits(call)
    found = {name: x for name, x in drawn.truth._asdict().items() if x is not None}
    assert {name.replace("dlearnable_sink", "dsink") for name in expected} == found.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name.replace("dlearnable_sink", "dsink")], x.detach(), rtol=0, atol=1e-11)


class Wrong(PortableBackend):
    """Plain PyTorch with something wrong behind it."""

    def __init__(self, name: str, change: Callable[[Tensor], object]) -> None:
        self.wrong, self.change = name, change

    def forward(self, *given: Any) -> Results:
        """Wrong, if that is about its results."""
        out, lse, *_ = super().forward(*given)
        return Results(self._wrong("out", out), self._wrong("lse", lse))

    def backward(self, call: BackwardCall) -> Gradients:
        """Wrong, if that is about a gradient."""
        found = super().backward(call)
        return Gradients(*(self._wrong(name, x) for name, x in found._asdict().items()))

    def _wrong(self, name: str, x: Any) -> Any:
        if name == self.wrong:
            self.change(x)
        return x


def _one_element(x: Tensor) -> None:
    x.view(-1)[x.numel() // 2] += 0.3 + 0.3 * x.abs().max()


def _not_a_number(x: Tensor) -> None:
    x.view(-1)[-1] = torch.nan


PADDED = Sample(16, 16, (8, 5), packed=True, padded=True, sink=True, bias="hqk")


@pytest.mark.parametrize("change", [_one_element, _not_a_number])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dbias", "dsink"])
def test_wrong_results_are_found(name: str, change: Callable[[Tensor], object]) -> None:
    drawn = samples.draw(PADDED, CPU)
    for wrong_pass in (drawn.forward, drawn.backward):
        if name in wrong_pass(PortableBackend()):
            with pytest.raises(WrongResultError, match=f"^{name}: "):
                drawn.compare(wrong_pass(Wrong(name, change)))


def test_an_exponential_that_is_one_percent_off_is_found() -> None:
    """One pair of P in eight is, as by a wrong coefficient of a polynomial."""
    drawn = samples.draw(Sample(64, 64, (200,)), CPU)
    found = drawn.forward(PortableBackend())
    scores = drawn.spec.softmax_scale * torch.einsum("bqhd,bkhd->bhqk", *(x.float() for x in drawn.inputs[:2]))
    scores[..., 14::16] += 0.01
    scores[..., 15::16] += 0.01
    with pytest.raises(WrongResultError, match=r"^lse: "):
        drawn.compare(found | {"lse": scores.logsumexp(-1)})


def test_every_wrong_bit_of_an_exact_call_is_found() -> None:
    drawn = samples.draw(SAMPLES["exact"], CPU)
    for name in ("out", "dq", "dk", "dv"):
        wrong_pass = drawn.forward if name == "out" else drawn.backward
        found = wrong_pass(PortableBackend())
        drawn.compare(found)
        x = found[name].view(-1)
        assert (x != 0).any()
        index = int(x.abs().argmax())
        x.view(torch.int16)[index] ^= 1
        with pytest.raises(WrongResultError, match=f"^{name}: 1 of"):
            drawn.compare(found)


def test_copies_that_differ_are_found() -> None:
    drawn = samples.draw(Sample(16, 16, (9,), heads=1, heads_k=1, copies=(2, 3)), CPU)
    for name in ("out", "lse", "dq", "dk", "dv"):
        wrong_pass = drawn.forward if name in ("out", "lse") else drawn.backward
        drawn.compare(wrong_pass(PortableBackend()))

        def flip(x: Tensor) -> None:
            samples.bits(x).view(-1)[-1] ^= 1

        with pytest.raises(WrongResultError, match=f"{name}: expected the same bits for 6 copies"):
            drawn.compare(wrong_pass(Wrong(name, flip)))


def test_runs_that_differ_are_found() -> None:
    runs = 0

    def now_and_then(x: Tensor) -> None:
        nonlocal runs
        runs += 1
        if runs == 3:
            samples.bits(x).view(-1)[-1] ^= 1

    repeated = STEPS["backward d64: repeated"]
    with pytest.raises(WrongResultError, match="dk: expected the same bits in 2 runs alone"):
        repeated.run(replace(target(), backend=Wrong("dk", now_and_then)))


@pytest.mark.parametrize("name", tiered(ARCHITECTURES, "sm90"))
def test_kernels_are_compiled_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run, which launches none, finds those of all steps, and each step gets the kernels that it judges."""
    architecture = ARCHITECTURES[name]
    (major, minor), compiled = next(iter(architecture.targets)), list[Any]()
    gpu = SimpleNamespace(multi_processor_count=architecture.num_sms, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(counters, "next_tile", lambda *_: None)

    def note(configs: list[Any], jobs: int) -> list[warm.Warmed]:
        compiled.append(configs)
        return []

    monkeypatch.setattr(warm, "warm", note)
    prepare, *others = (step for step in steps.steps_of(architecture) if not step.is_long)
    chosen = frozenset(step.name for step in others)
    kernels = replace(target(), backend=CuteBackend(architecture), chosen=chosen)
    assert prepare.run(kernels) is None
    (configs,) = compiled
    assert len(configs) < 120
    found = {family(config) for config in configs}
    assert found == {step.family for step in others} - {"masks", "max logits", "together"}
    for step in others:
        if step.passes and step.family not in ("masks", "biases", "max logits") and "2^31" not in step.name:
            assert prepare.run(replace(kernels, chosen=frozenset({step.name}))) is None
            assert [family(config) for config in compiled[-1]] == [step.family]
            assert set(compiled[-1]) <= set(configs)


@pytest.mark.slow
def test_a_process_runs_steps(tmp_path: Path) -> None:
    """The real one, on the CPU, and another one beside it."""
    with (tmp_path / "log").open("wb", buffering=0) as log:
        findings, families = verdict.checked(
            PLAIN_GPU, log, backend="portable", chosen=lambda name: name in ("forward d64", "together")
        )
    assert families == ["forward d64", "together"]
    assert not findings.failed
    assert not findings.unjudged
    assert findings.left_out == {"kernels compiled": "the backend has none"}
    text = (tmp_path / "log").read_text()
    assert text.count("--- forward d64: repeated") == 2  # the second one by the other process


@pytest.mark.slow
def test_a_gpu_that_another_process_does_not_see(tmp_path: Path) -> None:
    gpu = PLAIN_GPU._replace(device="cuda:7", uuid="GPU-7")
    with (tmp_path / "log").open("wb", buffering=0) as log:
        findings, _ = verdict.checked(gpu, log, chosen=lambda name: name == "forward d64")
    why = "not judged, as another process does not see cuda:7 (UUID GPU-7)"
    assert findings.unjudged == {"forward d64": why}
    assert not findings.is_final


def test_a_worker_finds_its_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def __init__(self, uuid: str) -> None:
            self.uuid = uuid

    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties(f"GPU-{i}"))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    request = worker.Request("sm90", "sm90", "cuda:0", "GPU-2", 1, [], [])
    assert worker._device(request) == torch.device("cuda", 2)
    assert chosen == [2]
    assert worker._device(request._replace(uuid="MIG-1")) is None


# The command


@pytest.mark.parametrize(
    ("count", "said"), [(0, "a GPU, but PyTorch sees none, got 7"), (2, "a GPU's number, 0 to 1, got 7")]
)
def test_without_a_gpu_the_command_says_so(
    count: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert command.main(["--device", "7"]) == 2
    assert capsys.readouterr().err == f"--device: expected {said}\n"


def test_without_a_compiler_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "gpu_of", lambda index: PLAIN_GPU)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    key._compiler.cache_clear()
    assert command.main([]) == 2
    assert "nvidia-cutlass-dsl, which cannot be imported" in capsys.readouterr().err


def test_the_command_keeps_its_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "gpu_of", lambda index: PLAIN_GPU)
    found = Findings({"b": "b: rings wrap: dq: wrong"}, {}, {}, True)
    monkeypatch.setattr(verdict, "checked", lambda gpu, log, **options: (found, ["a", "b"]))
    assert command.main([]) == 1
    assert "passed  a\nFAILED  b: b: rings wrap: dq: wrong\n" in capsys.readouterr().out
    kept = verdict.stored(PLAIN_GPU)
    assert kept is not None
    assert kept.families == {"a": None, "b": "b: rings wrap: dq: wrong"}
    found = found._replace(failed={})
    assert command.main(["--families", "a"]) == 0  # nothing of which is kept
    assert verdict.stored(PLAIN_GPU) == kept
    assert command.main([]) == 0
    assert verdict.stored(PLAIN_GPU) != kept


def test_a_report_has_what_was_run(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    report.begin(folder)
    log = tmp_path / "log"
    log.write_text("steps\n")
    chosen = [
        report.Command("fine", (sys.executable, "-c", "print('hello')"), 60.0),
        report.Command("fails", (sys.executable, "-c", "raise SystemExit(3)"), 60.0),
        report.Command("hangs", (sys.executable, "-c", "import time; time.sleep(1000)"), 0.2),
        report.Command("missing", ("no-such-command",), 60.0),
        report.Command("no clone", (sys.executable,), 60.0, needs="no-such-folder"),
    ]
    archive = report.write(folder, PLAIN_GPU, Verdict({"a": None}, {}, True, 0.0, 1.0, str(log)), "passed  a", chosen)
    assert archive == tmp_path / "report.tar.gz"
    assert archive.stat().st_size > 0
    text = (folder / "report.md").read_text()
    assert "- fine: exit code 0" in text
    assert "- fails: exit code 3" in text
    assert "- hangs: not over after 0 seconds" in text
    assert "- missing: left out: " in text
    assert "- no clone: left out: no clone of the repository, which has no-such-folder" in text
    assert (folder / "fine.txt").read_text() == "hello\n"
    assert (folder / "selfcheck.log").read_text() == "steps\n"
    assert json.loads((folder / "verdict.json").read_text())["verdict"]["families"] == {"a": None}
    with pytest.raises(FileExistsError, match="--report: expected a new or empty folder"):
        report.begin(folder)


# On a GPU


def is_emulated_in_seconds(step: Step) -> bool:
    """Whether it takes an emulated GPU no time."""
    return on_cpu(step) and not step.is_long and step.sample is not None and step.sample.copies == (1, 1)


@needs_kernels
@pytest.mark.parametrize(
    "name", [step.name for step in steps.steps_of(ARCHITECTURES["sm100"]) if is_emulated_in_seconds(step)]
)
def test_blackwells_kernels_pass(name: str) -> None:
    """A Hopper GPU runs it emulated: ``python -m lab.emulator --instead-of sm90 -- pytest``."""
    backend: Any = dispatch.BACKENDS["sm90"]
    if not backend.architecture.is_checked_first:
        pytest.skip("the kernels of this GPU are Hopper's, and not emulated")
    assert STEPS[name].run(replace(target(), backend=backend, device=torch.device("cuda", 0))) is None


@hopper_alone("Blackwell's own check is the command")
def test_it_passes_on_a_gpu(tmp_path: Path) -> None:
    """Cold, in less than two minutes, if nothing else runs."""
    environment = {**os.environ, "FLASH_ATTN_CUTE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn_cute.selfcheck"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "FAILED" not in done.stdout
    if "PYTEST_XDIST_WORKER" not in os.environ:
        (seconds,) = map(int, re.findall(r"^(\d+) seconds; the log is", done.stdout, re.MULTILINE))
        assert seconds < 120


@hopper_alone("the bugs are planted in Hopper's kernels")
@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_verdicts(name: str, tmp_path: Path) -> None:
    """And nothing hangs here."""
    bug = BUGS[name]
    gpu = command.gpu_of(torch.cuda.current_device())
    with (tmp_path / "log").open("wb", buffering=0) as log:
        findings, _ = verdict.checked(
            gpu,
            log,
            chosen=lambda family: re.fullmatch(bug.families, family) is not None,
            command=[WORKER[0], "-m", "tests.lib.selfcheck_bugs", name],
            limits=Limits(scale=0.5),
        )
    print((tmp_path / "log").read_text()[-10_000:])
    assert findings.failed.keys() == {bug.failed}
    assert bug.why in findings.failed[bug.failed]
