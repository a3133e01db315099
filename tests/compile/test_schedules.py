"""Kernels have the mbarriers, arrive counts, expected bytes and registers that their schedules say."""

from typing import Any

import pytest

from flash_attn_cute.kernels import registry
from lab.ptx import tree
from lab.ptx.threads import Program, Thread
from tests.lib.compiled import code_for
from tests.lib.configurations import DESCRIBED
from tests.lib.tiers import tiered

BARRIER_BYTES = 8


def _num_bytes(thread: Thread, arrival: tree.Instruction) -> set[int]:
    """Bytes that an arrival expects: a constant, or one of two, of which none is 0."""
    (register,) = arrival.operands[-1].names or ("",)
    chosen = [x for x in thread.program.instructions if x.is_a("selp") and x.operands[0].names == (register,)]
    operands = [(x, operand) for x in chosen for operand in x.operands[1:3]] or [(arrival, arrival.operands[-1])]
    values = [thread.value(x, operand) for x, operand in operands]
    assert all(value is not None and value.is_exact for value in values), arrival
    return {value.number for value in values if value is not None} - {0}


@pytest.mark.parametrize("config", tiered(DESCRIBED, "sm90-forward-causal", values=True))
def test_the_code_is_as_described(config: Any) -> None:
    """The PTX of the main kernel, thread by thread, against the description."""
    schedule = registry.pass_of(config).schedule(config)
    name = schedule.kernel.partition(":")[2]
    (function,) = (f for f in tree.parse(code_for(config).ptx).functions if f"{name}_obj" in f.name)
    assert function.num_threads == schedule.threads
    program = Program(function)
    counts: dict[int, int] = {}
    expected_bytes = set()
    registers: dict[int, int] = {}
    for warp, threads in enumerate(program.warps):
        for thread in threads:
            for number in thread.executed:
                x = program.instructions[number]
                if x.is_a("mbarrier.init"):
                    address, count = thread.address(number, 0), thread.value(x, x.operands[1])
                    assert address is not None
                    assert count is not None
                    counts[address.number] = count.number
                elif x.is_a("mbarrier.arrive") and "expect_tx" in x.parts:
                    expected_bytes |= _num_bytes(thread, x)
                elif x.is_a("setmaxnreg"):
                    registers[warp] = x.operands[0].number or 0
    start = min(counts)
    assert counts == {start + BARRIER_BYTES * i: n for i, n in enumerate(schedule.arrive_counts)}
    assert registers == {warp: role.registers for role in schedule.roles for warp in role.warps}
    described = {
        pipeline.num_bytes // pipeline.full_count
        for pipeline in schedule.pipelines
        if pipeline.stages and pipeline.num_bytes
    }
    assert expected_bytes == described
