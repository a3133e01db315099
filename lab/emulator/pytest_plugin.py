"""A pytest plugin: with ``pytest -p lab.emulator.pytest_plugin`` calls of ``backend="sm100"`` run on a Hopper GPU.

Every test that a kernel's fault falls into fails, whatever it computed. Workers of pytest-xdist are given the plugin
and its options. A kernel that does not end takes the process's CUDA context with it, and the session ends there.
"""

from collections.abc import Iterator

import pytest

from lab.emulator import hook
from lab.emulator.mailbox import Mailbox


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of emulated runs."""
    group = parser.getgroup("SM100 kernels on a Hopper GPU")
    for name, option in hook.OPTIONS.items():
        group.addoption(f"--sm100-{name}", **option)


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest) -> Mailbox:
    """The emulation: its settings, counts and faults."""
    return hook.start({name: request.config.getoption(f"--sm100-{name}") for name in hook.OPTIONS})


@pytest.fixture(autouse=True)
def _no_faults(emulator: Mailbox) -> Iterator[None]:
    import torch

    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # nothing more can run in this process
        pytest.exit("\n".join([str(error), *emulator.take_reports()]), returncode=3)
    reports = emulator.take_reports()
    if reports:
        pytest.fail("\n".join(reports), pytrace=False)
