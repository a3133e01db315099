"""Which tests run on which GPU, and whose kernels they and users' calls get; no GPU is needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HOPPER_ALONE = {
    "tests/numerics/test_demo.py::test_training_on_hopper",
    "tests/host/test_jit_cache.py::test_first_call_of_a_warm_process",
    "tests/numerics/test_mask_bias_memory.py::test_peak_memory",
    "tests/host/test_profile.py::test_real_ncu",
    "tests/host/test_profile.py::test_real_nsys",
    "tests/numerics/test_sm90.py::test_host_time",
}
OF_KERNELS = {
    "tests/numerics/test_determinism.py::test_the_default",
    "tests/numerics/test_hopper_block_masks.py::test_blocks_of_64",
    "tests/numerics/test_hopper_edges.py::test_threads_of_two_gpus",
    "tests/numerics/test_mask_bias_memory.py::test_graph_capture",
    "tests/numerics/test_random_calls.py::test_kernels_pass",
}


def on(*capability: int) -> dict[str, Any]:
    """The report of ``tests.lib.supposed_gpu`` on a GPU of that compute capability."""
    command = [sys.executable, "-m", "tests.lib.supposed_gpu", *map(str, capability), "--", *HOPPER_ALONE, *OF_KERNELS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "target"), [((10, 0), "sm_100a"), ((10, 3), "sm_103a")], ids=str)
def test_on_blackwell_tests_of_kernels_run_on_its_own(capability: tuple[int, int], target: str) -> None:
    """Users who name no backend get the portable one all the same."""
    reported = on(*capability)
    assert reported["tests"] == {"None": target, "sm90": target, "sm100": target}
    assert set(reported["run"]) == OF_KERNELS
    assert reported["skipped"].keys() == HOPPER_ALONE
    assert all(reason.startswith("Skipped: needs a Hopper GPU: ") for reason in reported["skipped"].values())
    users = reported["users"]
    assert (users["None"], users["sm100"]) == ("portable", target)
    assert f"got 'sm90', which cannot: GPUs of compute capability {'.'.join(map(str, capability))}" in users["sm90"]


@pytest.mark.slow
def test_on_hopper_all_run() -> None:
    reported = on(9, 0)
    assert set(reported["run"]) == OF_KERNELS | HOPPER_ALONE
    assert reported["tests"] == reported["users"]
    assert (reported["users"]["None"], reported["users"]["sm90"]) == ("sm_90a", "sm_90a")
    assert "got 'sm100', which cannot: GPUs of compute capability 9.0" in reported["users"]["sm100"]


@pytest.mark.slow
def test_without_a_gpu_they_are_skipped() -> None:
    reported = on()
    assert not reported["run"]
    assert reported["skipped"].keys() == OF_KERNELS | HOPPER_ALONE
    assert reported["tests"] == reported["users"]
    assert reported["users"]["None"] == "portable"
    assert all("which cannot" in reported["users"][name] for name in ("sm90", "sm100"))
