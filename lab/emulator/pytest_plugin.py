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
    group.addoption("--sm100-jitter-us", type=float, default=0.0, help="longest random delay of what is asynchronous")
    group.addoption("--sm100-limit-s", type=float, default=20.0, help="how long a CTA may take")
    group.addoption("--sm100-b300", action="store_true", help="kernels of a B300 instead of a B200")
    group.addoption("--sm100-plant", nargs=2, default=None, help="a regular expression and what replaces it in PTX")
    group.addoption("--sm100-instead-of", default=None, help="another backend whose calls go to sm100's kernels")


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest) -> Mailbox:
    """The emulation: its settings, counts and faults."""
    option = request.config.getoption
    plant = option("--sm100-plant")
    mailbox = hook.install(
        gpu=(10, 3 * option("--sm100-b300")),
        instead_of=option("--sm100-instead-of"),
        plant=tuple(plant) if plant else None,
    )
    mailbox.configure(
        jitter_ns=round(1e3 * option("--sm100-jitter-us")), limit_ms=round(1e3 * option("--sm100-limit-s"))
    )
    return mailbox


@pytest.fixture(autouse=True)
def _no_faults(emulator: Mailbox) -> Iterator[None]:
    import torch

    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # nothing more can run in this process
        pytest.exit(f"{error}\n{_report(emulator)}", returncode=3)
    reported = _report(emulator)
    if reported:
        pytest.fail(reported, pytrace=False)


def _report(mailbox: Mailbox) -> str:
    return "\n".join(dict.fromkeys(map(str, mailbox.take_faults())))
