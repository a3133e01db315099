"""Numbers at an edge, on Blackwell's kernels, executed on the CPU; and their polynomials of exp2 alone."""

import dataclasses
import random
import tempfile

import numpy as np
import pytest
import torch

from lab import interpreter
from lab.interpreter.state import Array
from tests.lib import oracle
from tests.lib.checks import bitwise_equal, poisoned_dout
from tests.lib.edge_calls import EDGES
from tests.lib.interpreted import backward, forward
from tests.lib.interpreted.common import packed
from tests.lib.tiers import tiered


@pytest.mark.parametrize("name", tiered(EDGES, rare=["rising-in-a-block"]))
def test_edges(name: str) -> None:
    """In bfloat16, whose kernels other tests compile."""
    call = EDGES[name](dtype=torch.bfloat16)
    forward.check(call, random.Random(name))
    backward.check(call, backward.Interpreted(random.Random(name)))


@pytest.mark.slow
def test_seqused_beyond_its_slot_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts for the slot's rows: gradients and out have the same bits as with their number."""
    call = packed([33, 0, 20], [40, 5, 30], nheads=1, causal=True)()
    slots, beyond = (torch.tensor(x, dtype=torch.int32) for x in ([33, 0, 20], [200, 5, 1000]))
    fits = dataclasses.replace(call, seqused_q=slots, seqused_k=torch.tensor([40, 5, 30], dtype=torch.int32))
    more = dataclasses.replace(call, seqused_q=beyond, seqused_k=beyond + 200)
    out, lse = oracle.attention(fits.to(torch.float64))
    dout = poisoned_dout(fits, out.to(call.q.dtype))
    monkeypatch.setattr(oracle, "attention", lambda _: (out.to(call.q.dtype), lse))  # of the forward pass, for both
    for expected, found in zip(*(forward.execute(each, random.Random(0)) for each in (fits, more)), strict=True):
        assert bitwise_equal(found, expected)
    expected, found = (
        backward.execute(each, backward.Interpreted(random.Random(0)), lse.detach().float(), dout, None)
        for each in (fits, more)
    )
    assert all(bitwise_equal(found[name], x) for name, x in expected.items())


def exp2_by_polynomials(x: Array) -> Array:
    """Two numbers a thread, of 512."""
    cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    import cutlass
    from cutlass.base_dsl.compiler import DumpDir

    from tests.lib.exponentials import Exponentials

    numbers = cute.runtime.make_fake_tensor(cutlass.Float32, (512,), (1,), assumed_align=16)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = cute.EnableTVMFFI, cute.GPUArch("sm_100a"), cute.KeepPTX, DumpDir(folder)
        kernel = cute.compile[options](Exponentials(), numbers, numbers, stream, no_jit_engine=True)
    memory = np.concatenate([x, np.zeros_like(x)]).view(np.uint8)
    params = [interpreter.address_of(place).to_bytes(8, "little") for place in (0, 2048)]
    program = interpreter.Program(kernel.artifacts.PTX)
    launch = interpreter.Launch(params, (1, 1, 1), (32 * program.num_warps, 1, 1))
    interpreter.run(program, launch, memory, random.Random(0))
    return memory.view(np.float32)[512:]


def test_exp2_by_polynomials() -> None:
    """Within 1e-4 of 2^x; nothing below -127, 2^127 above 127, NaN of NaN."""
    x = np.concatenate([np.linspace(-126, 127, 509), [-np.inf, np.inf, np.nan]]).astype(np.float32)
    found = exp2_by_polynomials(x).astype(np.float64)
    assert np.abs(found[:509] / np.exp2(x[:509].astype(np.float64)) - 1).max() < 1e-4
    assert found[509] < 2.0**-120
    assert found[510] == 2.0**127
    assert np.isnan(found[511])
