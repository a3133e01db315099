"""The self-check's verdict and what the dispatcher makes of it, on a machine that pretends to have a Blackwell GPU."""

import functools
import inspect
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cute import explain, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute import CuteBackend
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch, prepared_call
from flash_attn_cute.jit import disk, key
from flash_attn_cute.kernels.registry import ARCHITECTURES, family
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Results
from flash_attn_cute.runtime import kept, settings
from flash_attn_cute.selfcheck import gate, steps, verdict
from flash_attn_cute.selfcheck.runner import Findings
from flash_attn_cute.selfcheck.verdict import Gpu, Verdict
from flash_attn_cute.sparsity.block_mask import BlockMask
from flash_attn_cute.sparsity.dq_order import launch_orders

# Of calls that a refused family leaves to the portable backend; tests of the warning itself record all.
pytestmark = pytest.mark.filterwarnings(
    "ignore:flash_attn_cute. a call on cpu goes to the backend 'portable':UserWarning"
)

SM100 = ARCHITECTURES["sm100"]
GPU = Gpu("cuda:0", "GPU-1", "sm100", "NVIDIA B200", (10, 0), 148, 180, "580.1")
FAMILIES = [*dict.fromkeys(step.family for step in steps.steps_of(SM100) if step.family)]


class Kernels(CuteBackend):
    """Blackwell's backend on the CPU, as plain PyTorch; counts its calls, and works out nothing ahead of them."""

    def __init__(self) -> None:
        super().__init__(SM100)
        self.calls = 0

    def is_made_for(self, device: torch.device) -> bool:
        return True

    def forward(self, *given: Any) -> Results:
        self.calls += 1
        return PortableBackend().forward(*given)

    def forward_for(self, spec: AttentionSpec, like: AttentionInputs) -> Callable[[AttentionInputs], Results]:
        return lambda inputs: self.forward(spec, inputs)

    def backward(self, call: BackwardCall) -> Gradients:
        return PortableBackend().backward(call)

    def backward_for(self, like: BackwardCall) -> Callable[[BackwardCall], Gradients]:
        return self.backward


class Machine:
    """A machine with a Blackwell GPU, and what its self-check will find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.kernels, self.checks = Kernels(), 0
        self.failed: dict[str, str] = {}
        self.unjudged: dict[str, str] = {}
        self.is_final = True
        self.monkeypatch, self.folder = monkeypatch, folder
        monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", str(folder))
        monkeypatch.delenv("FLASH_ATTN_CUTE_SELFCHECK", raising=False)
        backends = {"sm90": CuteBackend(ARCHITECTURES["sm90"]), "portable": PortableBackend(), "sm100": self.kernels}
        monkeypatch.setattr(dispatch, "BACKENDS", backends)
        # Not ``torch.cuda.current_device``: what stands there when Dynamo first looks counts as an operator of torch.
        monkeypatch.setattr(gate, "_index_of", lambda device: 0)
        monkeypatch.setattr(Gpu, "of", lambda architecture, index: GPU)
        monkeypatch.setattr(verdict, "checked", self.check)
        monkeypatch.setattr(verdict, "_POLL", 0.01)
        self.restart()

    def check(self, gpu: Gpu, log: IO[bytes]) -> tuple[Findings, list[str]]:
        """The check, in no time."""
        self.checks += 1
        log.write(b"a step\n")
        return Findings(self.failed, self.unjudged, {}, self.is_final), FAMILIES

    def restart(self, setting: str | None = None) -> None:
        """Forgets what a process keeps, as another one begins without it."""
        if setting is not None:
            self.monkeypatch.setenv("FLASH_ATTN_CUTE_SELFCHECK", setting)
        settings.selfcheck.cache_clear()
        self.monkeypatch.setattr(gate, "_answers", {})
        self.monkeypatch.setattr(gate, "_has_warned", False)
        self.monkeypatch.setattr(gate, "_STARTED", time.time())
        for name in ("_has_warned", "_has_warned_of_refusal"):
            self.monkeypatch.setattr(dispatch, name, False)
        self.monkeypatch.setattr(prepared_call, "_kept", {})

    def serves(self, d: int = 64, rows: int = 5, dtype: torch.dtype = torch.bfloat16, **options: Any) -> bool:
        """Whether a call gets the kernels."""
        q = torch.zeros(1, rows, 1, d, dtype=dtype)
        return self.has_kernels(lambda: flash_attn_func(q, q, q, **options))

    def has_kernels(self, call: Callable[[], object]) -> bool:
        before = self.kernels.calls
        call()
        return self.kernels.calls > before

    def finds_no_verdict(self) -> None:
        """Another process runs the check, and serves the call."""
        checks = self.checks
        self.restart()
        assert self.serves()
        assert self.checks == checks + 1

    @property
    def entry(self) -> Path:
        (path,) = (self.folder / "selfcheck").glob("*.verdict")
        return path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield Machine(monkeypatch, tmp_path / "kernels")
    settings.selfcheck.cache_clear()


@contextmanager
def warned() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        yield found
        found += [str(x.message) for x in caught if str(x.message).startswith("flash_attn_cute")]


# What the dispatcher makes of a verdict


def test_families_that_passed_are_served(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with warned() as found:
        assert machine.serves()
        assert machine.serves(rows=7)
        assert machine.serves(d=256)
    assert not found
    assert machine.checks == 1
    assert "checking the kernels of sm100 on NVIDIA B200, once" in caplog.text


def test_families_that_failed_are_portable_with_one_warning(machine: Machine) -> None:
    machine.failed = {"backward d128": "backward d128: rings wrap: it did not end within 60 seconds"}
    with warned() as found:
        assert not machine.serves(d=128)
        assert machine.serves(d=64)
        assert not machine.serves(d=120, rows=6)
    assert len(found) == 1
    with warned() as others:
        machine.serves(dtype=torch.float64)
        machine.serves(dtype=torch.float64)
    assert ["torch.float64" in text for text in others] == [True]
    (log,) = (machine.folder / "selfcheck").glob("*.log")
    for said in (
        "serves calls with backend='sm100' alone, as its self-check on this GPU has not passed backward d128 (",
        "rings wrap: it did not end within 60 seconds",
        f"The log is {log}",
    ):
        assert said in found[0]
    assert "a step" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


def test_pairs_that_failed_leave_shorter_sequences_alone(machine: Machine) -> None:
    machine.failed = {"backward pair d128": "no"}
    assert machine.serves(d=128, rows=500)
    assert not machine.serves(d=128, rows=1500)
    assert machine.serves(d=128, rows=1500, causal=True)
    q = torch.zeros(1500, 1, 128, dtype=torch.bfloat16)
    for sequences, is_served in ((3, True), (1, False)):
        longest = 1500 // sequences
        cu = torch.arange(sequences + 1, dtype=torch.int32) * longest
        call = functools.partial(flash_attn_varlen_func, q, q, q, cu, cu, longest, longest)
        assert machine.has_kernels(call) == is_served


def test_masks_biases_and_max_logits_are_families(machine: Machine) -> None:
    machine.failed = {"masks": "no", "biases": "no", "max logits": "no"}
    shown = torch.ones(5, 5, dtype=torch.bool)
    assert machine.serves()
    assert not machine.serves(mask=shown)
    assert not machine.serves(bias=torch.zeros(5, 5, dtype=torch.bfloat16))
    assert not machine.serves(return_max_logits=True)


def test_what_is_no_family_of_one_pass_is_needed_by_all(machine: Machine) -> None:
    machine.failed = {"together": "no"}
    assert not machine.serves()


def test_named_backends_run_without_a_verdict(machine: Machine) -> None:
    assert machine.serves(backend="sm100")
    assert not machine.serves(backend="portable")
    assert machine.checks == 0


def test_calls_that_look_alike_do_not_ask_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.serves()
    monkeypatch.setattr(gate, "ask", None)
    assert machine.serves()


def test_explain_shows_it_and_runs_nothing(machine: Machine) -> None:
    q = torch.zeros(1, 5, 1, 128, dtype=torch.bfloat16)
    why = explain(q, q, q)
    assert (why.backend, why.on_request) == ("portable", ("sm100",))
    assert "its self-check has not run on this GPU, and does not run for an explanation" in str(why)
    assert machine.checks == 0
    assert not machine.folder.exists()
    machine.failed = {"backward d64": "hangs"}
    assert machine.serves(d=128)
    wrong = str(explain(q[..., :64], q[..., :64], q[..., :64]))
    assert "only with backend='sm100': its self-check on this GPU has not passed backward d64 (hangs)" in wrong


# Settings


def test_off(machine: Machine) -> None:
    assert machine.serves()
    machine.restart("0")
    with warned() as found:
        assert not machine.serves()
    assert "backend='sm100' alone, as FLASH_ATTN_CUTE_SELFCHECK is 0" in found[0]
    assert machine.checks == 1


def test_force_takes_no_verdict_from_before_the_process(machine: Machine) -> None:
    machine.failed = {"together": "no"}
    assert not machine.serves()
    machine.failed = {}
    machine.restart("force")
    assert machine.serves()
    assert machine.checks == 2
    # Another rank of the same job, which was started before the verdict was made.
    started = gate._STARTED
    machine.restart()
    machine.monkeypatch.setattr(gate, "_STARTED", started)
    assert machine.serves()
    assert machine.checks == 2


FOLDERS = {
    "": "as FLASH_ATTN_CUTE_CACHE_DIR is 0, so that no verdict of its self-check can be kept",
    "read-only": "its self-check cannot run: [Errno 30] Read-only file system",
    "of others": "its self-check cannot run: FLASH_ATTN_CUTE_CACHE_DIR: the cache folder",
}


@pytest.mark.parametrize(("folder", "why"), FOLDERS.items(), ids=FOLDERS)
def test_without_a_usable_folder_nothing_is_run(folder: str, why: str, machine: Machine) -> None:
    if not folder:
        machine.monkeypatch.setenv("FLASH_ATTN_CUTE_CACHE_DIR", "0")
    elif folder == "read-only":
        machine.monkeypatch.setattr(disk, "Folder", mock.Mock(side_effect=OSError(30, "Read-only file system")))
    else:
        machine.folder.mkdir()
        machine.folder.chmod(0o777)
    with warned() as found:
        assert not machine.serves()
    assert why in found[0]
    assert machine.checks == 0


# Where it does not run


@pytest.mark.parametrize(
    ("place", "name", "why"),
    [(torch.cuda, "_is_in_bad_fork", "was forked"), (kept, "is_captured", "a CUDA graph is captured")],
)
def test_it_does_not_run_there_and_the_answer_does_not_last(place: Any, name: str, why: str, machine: Machine) -> None:
    there = mock.patch.object(place, name, return_value=True)
    with warned() as found, there:
        assert not machine.serves()
    assert why in found[0]
    assert "`python -m flash_attn_cute.selfcheck` runs it" in found[0]
    assert machine.checks == 0
    assert machine.serves()
    with there:
        assert machine.serves()
        machine.restart()
        assert machine.serves()  # a verdict is read everywhere
    assert machine.checks == 1


def test_fake_tensors(machine: Machine) -> None:
    with FakeTensorMode():
        q = torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16)
        flash_attn_func(q, q, q)
    assert machine.checks == 0
    assert machine.serves()


def test_traced_programs_read_a_verdict_and_run_nothing(machine: Machine) -> None:
    def compiled(d: int) -> bool:
        torch.compiler.reset()
        q = torch.zeros(1, 5, 1, d, dtype=torch.bfloat16)
        return machine.has_kernels(torch.compile(lambda: flash_attn_func(q, q, q), backend="eager", fullgraph=True))

    with warned() as found:
        assert not compiled(64)
        assert not compiled(64)
    assert len(found) == 1
    assert "a compiled program gets the backend 'portable': its self-check has not run on this GPU" in found[0]
    assert machine.checks == 0
    machine.failed = {"forward d256": "no"}
    assert machine.serves()
    assert compiled(64)
    assert not compiled(256)
    assert machine.checks == 1


# The verdict on disk


def test_processes_share_a_verdict(machine: Machine) -> None:
    machine.failed = {"forward d256": "no"}
    assert machine.serves()
    machine.restart()
    assert machine.serves()
    assert not machine.serves(d=256)
    assert machine.checks == 1


@pytest.mark.parametrize("change", ["damaged", "another version", "another's"])
def test_unusable_verdicts_are_made_again(change: str, machine: Machine) -> None:
    assert machine.serves()
    if change == "damaged":
        machine.entry.write_bytes(machine.entry.read_bytes()[:-9])
    elif change == "another's":
        machine.entry.chmod(0o666)
    else:
        with disk.Folder(machine.folder / "selfcheck", kind="verdict") as folder:
            folder.write(machine.entry.stem, {}, json.dumps({"passed": True}).encode())
    machine.finds_no_verdict()


def test_a_gpu_is_known_by_what_kernels_depend_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = SimpleNamespace(
        name="NVIDIA B200", uuid="GPU-1", major=10, minor=0, multi_processor_count=148, total_memory=180 * 2**30
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(verdict, "_DRIVER", tmp_path / "version")
    assert Gpu.of("sm100", 0) == GPU._replace(driver="unknown")
    (tmp_path / "version").write_text("580.1\nGCC version")
    assert Gpu.of("sm100", 3) == GPU._replace(device="cuda:3")


@pytest.mark.parametrize("change", [{"driver": "590.1"}, {"name": "NVIDIA B300"}, {"num_sms": 74}])
def test_a_verdict_holds_for_a_gpu_and_a_driver(change: dict[str, Any], machine: Machine) -> None:
    assert machine.serves()
    machine.monkeypatch.setattr(Gpu, "of", lambda architecture, index: GPU._replace(**change))
    machine.finds_no_verdict()


def test_a_verdict_holds_for_sources_and_compilers() -> None:
    name = key.name(GPU.identity())
    assert name == key.name(GPU._replace(device="cuda:3", uuid="GPU-2").identity())
    with mock.patch.object(key, "_SOURCES", "others"):
        assert name != key.name(GPU.identity())
    with mock.patch.dict("os.environ", CUTE_DSL_OPT="1"):
        assert name != key.name(GPU.identity())


def test_a_verdict_holds_for_the_code_that_makes_calls() -> None:
    """Kernels of a mask whose tables were wrong are checked again when the tables are mended."""
    files: list[Path] = []
    with mock.patch.object(key, "hash_of", files.extend):
        verdict._host_code.__wrapped__()
    assert {Path(inspect.getfile(x)) for x in (CuteBackend, AttentionSpec, BlockMask, launch_orders, steps)} <= {*files}


@pytest.mark.parametrize("clock", ["goes on", "was ahead"])
def test_what_was_not_judged_is_tried_again_later(clock: str, machine: Machine) -> None:
    machine.unjudged, machine.is_final = dict.fromkeys(FAMILIES, "not judged, as the GPU's memory is full"), False
    with warned() as found:
        assert not machine.serves()
    assert "not judged, as the GPU's memory is full" in found[0]
    machine.unjudged, machine.is_final = {}, True
    machine.restart()
    assert not machine.serves()  # ranks of a job do not try one after the other
    assert machine.checks == 1
    later, day = time.time(), 24 * 60 * 60
    machine.monkeypatch.setattr(time, "time", lambda: later + (day if clock == "goes on" else -day))
    machine.finds_no_verdict()


# Processes at the same time


def _ranks(machine: Machine, number: int) -> list[Verdict | str]:
    """Verdicts of ranks that ask at the same time; threads that open the folder each are processes to its locks."""
    found: list[Verdict | str] = []
    threads = [
        threading.Thread(target=lambda: found.append(verdict.made(GPU, say=lambda line: None))) for _ in range(number)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_one_rank_runs_the_check(machine: Machine) -> None:
    found = _ranks(machine, 8)
    assert machine.checks == 1
    assert len(found) == 8
    assert all(found[0] == one for one in found)


def test_a_rank_waits_no_longer_than_it_should(machine: Machine) -> None:
    machine.monkeypatch.setattr(verdict, "_WAIT_FOR_OTHERS", 0.05)
    said: list[str] = []
    (machine.folder / "selfcheck").mkdir(mode=0o700, parents=True)
    name = key.name(GPU.identity())
    with disk.Folder(machine.folder / "selfcheck", kind="verdict") as folder, folder.lock(name, waits=False) as is_held:
        assert is_held
        found = verdict.made(GPU, say=said.append)
    assert found == "another process has been running its self-check for 0 seconds"
    assert said == ["another process checks this kind of GPU; waiting for its verdict"]
    assert machine.checks == 0


def test_without_any_locks_nothing_is_run(machine: Machine) -> None:
    @contextmanager
    def no_locks(folder: disk.Folder, name: str, *, waits: bool) -> Iterator[None]:
        yield None

    machine.monkeypatch.setattr(disk.Folder, "_locked", no_locks)
    assert "locks" in str(verdict.made(GPU, say=print))
    assert machine.checks == 0


def test_a_lock_of_the_machine_will_do(machine: Machine, tmp_path: Path) -> None:
    plain = disk.Folder._locked

    @contextmanager
    def on_machine_alone(folder: disk.Folder, name: str, *, waits: bool) -> Iterator[bool | None]:
        if folder._kind == "verdict":
            yield None
        else:
            with plain(folder, name, waits=waits) as is_held:
                yield is_held

    machine.monkeypatch.setattr(disk.Folder, "_locked", on_machine_alone)
    machine.monkeypatch.setattr(disk, "machine_folder", lambda: tmp_path / "machine")
    assert all(isinstance(found, Verdict) for found in _ranks(machine, 4))
    assert machine.checks == 1


# Families


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_steps_have_names_of_their_own(architecture: Any) -> None:
    names = [step.name for step in steps.steps_of(architecture)]
    assert len(set(names)) == len(names)


def test_every_call_comes_to_families_that_are_checked() -> None:
    """All head dimensions, flags and lengths, for kernels that are checked first."""
    checked = {step.family for step in steps.steps_of(SM100) if not step.is_long}
    for flags in ("", "left", "right", "left,right", "mask", "block_mask", "bias", "right,bias"):
        for d in range(8, 257, 8):
            for d_v in {8, 64, 128, 136, 192, 256, d}:
                asked = gate._families("sm100", d, d_v, flags, None)
                assert asked <= checked, f"{asked - checked} of ({d}, {d_v}) with {flags}"


def test_families_of_a_call_are_those_of_its_kernels() -> None:
    """Also of what it becomes: sequences that are split, or a dense batch that is packed."""
    used = torch.tensor([70, 1200], dtype=torch.int32)
    for d, d_v in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256)):
        for rows_q, rows_k in ((100, 100), (700, 700), (1200, 1200), (1200, 600), (600, 2200), (2200, 2200)):
            q, k, v = (
                torch.zeros(2, rows, 1, width, dtype=torch.bfloat16, device="meta")
                for rows, width in ((rows_q, d), (rows_k, d), (rows_k, d_v))
            )
            for options in ({}, {"causal": True}, {"window_size": (20, 0)}, {"seqused_q": used.to("meta")}):
                explained = explain(q, k, v, gpu="sm100", backend="sm100", **options)
                spec = explained.spec
                on = [side for side in ("left", "right") if getattr(spec, f"window_{side}") is not None]
                asked = gate._families("sm100", d, d_v, ",".join(on), (rows_q, rows_k))
                for planned in (explained.forward, explained.backward):
                    assert planned is not None
                    assert family(planned.config) in asked
