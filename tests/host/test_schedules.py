"""Schedules of kernels: they name what they wait for, fit the hardware, and are printed without a compiler."""

from typing import Any

import pytest

from flash_attn_cute.kernels import __main__ as command
from flash_attn_cute.kernels import registry
from flash_attn_cute.kernels.schedule import Schedule
from flash_attn_cute.kernels.sm90.backward.gradient_q_schedule import gradient_q_schedule
from tests.lib.configurations import DESCRIBED

REGISTERS = 64 * 1024  # of an SM
SHARED_MEMORY = 227 * 1024  # bytes, that a CTA can have


def schedule_of(config: Any) -> Schedule:
    return registry.pass_of(config).schedule(config)


SCHEDULES = {name: schedule_of(config) for name, config in DESCRIBED.items()}
SCHEDULES |= {f"{name}-dQ": gradient_q_schedule(DESCRIBED[name]) for name in DESCRIBED if "stored-ds" in name}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_roles_and_sizes_fit(schedule: Schedule) -> None:
    """Each warp has one role, and registers and shared memory suffice for all."""
    warps = [warp for role in schedule.roles for warp in role.warps]
    assert warps == list(range(schedule.threads // 32))
    registers = {warp // 4: role.registers for role in schedule.roles for warp in role.warps}
    assert all(registers[warp // 4] == role.registers for role in schedule.roles for warp in role.warps)
    assert 128 * sum(registers.values()) <= REGISTERS
    assert schedule.num_bytes <= SHARED_MEMORY


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_steps_name_all_barriers(schedule: Schedule) -> None:
    """Each role that arrives at a barrier has a step that says so, each barrier is waited for, and no others are."""
    signals = {(step.role, name) for step in schedule.steps for name in step.signals.split(", ") if "." in name}
    waits = {name.split()[0] for step in schedule.steps for name in step.waits.split(", ") if "." in name}
    used = [pipeline for pipeline in schedule.pipelines if pipeline.stages]
    sides = [(f"{p.name}.{side}", getattr(p, side)) for p in used for side in ("full", "empty") if getattr(p, side)]
    assert signals == {(arrivals.role, name) for name, all_of in sides for arrivals in all_of}
    assert waits == {name for name, _ in sides}
    assert {step.role for step in schedule.steps} <= {role.name for role in schedule.roles}


def test_each_pass_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """The page has every pipeline that is used, its arrive counts, and every role."""
    for config in DESCRIBED.values():
        schedule = schedule_of(config)
        text = command.page(schedule, "title")
        pipelines = text.split("\n\n")[2]
        for pipeline in schedule.pipelines:
            assert (f"\n  {pipeline.name} " in pipelines) == (pipeline.stages > 0)
        for role in schedule.roles:
            assert role.does in text
    for architecture in registry.ARCHITECTURES.values():
        for name in architecture.passes:
            assert command.main(["describe", architecture.name, name, "--d", "128", "--causal"]) == 0
            assert f"{architecture.name} {name}, d = 128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sm90", "forward", "--d", "512"], "expected 1 to 256, got 512 and 512"),
        (["sm90", "forward", "--d", "0"], "expected 1 to 256, got 0 and 0"),
        (["sm90", "forward", "--d", "64", "--d-v", "0"], "--d, --d-v: expected 1 to 256, got 64 and 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["describe", *arguments]) == 2
    assert said in capsys.readouterr().err
