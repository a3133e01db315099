"""What the Blackwell kernels are made of: configurations within the machine's sizes, and the machine code of some.

No test here runs a kernel.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_cute import flash_attn_func
from flash_attn_cute.backends.cute.plan import plan_forward
from flash_attn_cute.dispatch import BACKENDS, supposing
from flash_attn_cute.jit import __main__ as command
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.registry import ARCHITECTURES, pass_of
from flash_attn_cute.kernels.sm100.config import HEAD_DIMS, SHARED_MEMORY, TARGETS, TENSOR_COLUMNS, ForwardConfig
from flash_attn_cute.kernels.sm100.config import forward_config as config
from tests.test_cute_plan import DENSE, spec_of
from tests.test_machine_code import EVERYTHING, machine_code
from tools.ptx_lint import lint

B200, B300 = TARGETS.values()


def chosen(d: int, d_v: int | None = None, **options: Any) -> ForwardConfig:
    dtype, target = options.pop("dtype", "bfloat16"), options.pop("target", B200)
    return config(dtype, d, d_v or d, Features(**options), target=target)


FEW = {
    "d64-packed-causal": chosen(64, right=True, packed=True),
    "d128": chosen(128),
    "d128-b300": chosen(128, target=B300),
    "d96-float16-everything": chosen(96, dtype="float16", **EVERYTHING),
    "d192-dv128-causal": chosen(192, 128, right=True),
    "d256-everything-b300": chosen(256, target=B300, **EVERYTHING),
}
MASKS = {
    "full": {},
    "causal": {"right": True},
    "packed-causal": {"packed": True, "right": True},
    "everything": EVERYTHING,
}
ALL = {
    f"d{d}-dv{d_v}-{mask}-{target}": chosen(d, d_v, target=target, **MASKS[mask])
    for d, d_v in itertools.product(HEAD_DIMS, HEAD_DIMS)
    if d >= d_v
    for mask, target in itertools.product(MASKS, TARGETS.values())
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compiling all configurations takes minutes, so it has to be asked for."""
    if "compiled" in metafunc.fixturenames:
        cases = FEW | ALL if metafunc.config.getoption("--all-configurations") else FEW
        metafunc.parametrize("compiled", cases.values(), ids=cases)


def test_compiled_forward(compiled: ForwardConfig, tmp_path: Path) -> None:
    """No spills; products, weights, loads and stores as they should be; tensor memory is allocated and freed."""
    (sass,) = machine_code(compiled, tmp_path)["Forward"]
    (ptx,) = (path.read_text() for path in tmp_path.glob("*.ptx"))
    assert not lint(ptx)
    c = compiled
    count = {name: len(re.findall(rf"\b{name}\b", sass)) for name in ("UTCHMMA", "HGMMA", "LDTM", "STTM", "USETMAXREG")}
    # Loops of four steps, for each part: of scores and output, and of outputs where no tile is known to follow.
    assert count["UTCHMMA"] == 4 * 3 * c.q_parts
    assert count["HGMMA"] == 0
    assert count["USETMAXREG"] == 3 + (c.q_parts == 1)
    # Scores are read to be weighed in advance, for a maximum, and to be weighed by it, and, 32 columns at a time, to be
    # capped and hidden. O is read to be rescaled, and to be stored.
    changes = 1 + c.features.softcap
    assert count["LDTM"] == 4 * 3 + 4 * changes + c.tile_dv // 32 + c.tile_dv // 16
    # Weights are stored at two places, and zeros at a third.
    assert count["STTM"] == 2 * 3 + 4 * changes + c.tile_dv // 32
    # Pairs of weights at two places, fused, so that bits never depend on the place; four more of a polynomial.
    polynomials = c.tile_n // 2 // c.polynomial_every if c.polynomial_every else 0
    assert len(re.findall(r"\bFFMA2\b", sass)) == 2 * (c.tile_n // 2 + 4 * polynomials)
    assert len(re.findall(r"\bMUFU\.EX2\b", sass)) >= 2 * (c.tile_n - 2 * polynomials)
    assert len(re.findall(r"\bUTMALDG", sass)) == (c.q_parts + 1) * c.tile_d // 64 + c.tile_dv // 64
    assert len(re.findall(r"\bUTMASTG", sass)) == c.tile_dv // 64
    assert len(re.findall(r"\btcgen05\.alloc\b", ptx)) == len(re.findall(r"\btcgen05\.dealloc\b", ptx)) == 1
    assert len(re.findall(r"\btcgen05\.relinquish_alloc_permit\b", ptx)) == 1
    assert f".target {c.target}" in ptx
    for kind in ("ld", "st"):
        for block in assembly(ptx, f"tcgen05.{kind}"):
            assert block[-1] == f"tcgen05.wait::{kind}.sync.aligned;", (
                "registers or columns are used before they are there"
            )


def assembly(ptx: str, instruction: str) -> Iterator[list[str]]:
    """The inline assembly that has an instruction, which stands nowhere else."""
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL)
    found = [block for block in blocks if f"{instruction}." in block]
    assert sum(block.count(f"{instruction}.") for block in found) == ptx.count(f"{instruction}.")
    for block in found:
        yield [line.strip() for line in block.strip().splitlines()]


@pytest.mark.parametrize("d", range(8, 264, 8))
def test_sizes(d: int) -> None:
    """Within shared memory, tensor memory and registers; wide enough; rings of a power of 2."""
    for d_v in range(8, 264, 8):
        check_sizes(chosen(d, d_v), d, d_v)


def check_sizes(c: ForwardConfig, d: int, d_v: int) -> None:
    assert c.tile_d >= d
    assert c.tile_dv >= d_v
    assert c.bytes_shared <= SHARED_MEMORY
    assert c.first_O(c.q_parts - 1) + c.tile_dv <= TENSOR_COLUMNS
    r = c.registers
    assert r.softmax + (r.softmax if c.q_parts == 2 else r.none) + r.epilogue + r.others <= 512
    assert all(24 <= x <= 256 and x % 8 == 0 for x in r)
    assert all(stages & stages - 1 == 0 for stages in (c.k_stages, c.v_stages, c.q_parts))
    assert c.blocks_ahead * c.q_parts == 2


def test_targets_have_kernels_of_their_own() -> None:
    sm100 = ARCHITECTURES["sm100"]
    for capability, target in TARGETS.items():
        planned = plan_forward(sm100.on(capability), spec_of(), DENSE, 148)
        assert planned.config.target == target
        assert pass_of(planned.config) is sm100.passes["forward"]
        assert planned.config == dataclasses.replace(plan_forward(sm100, spec_of(), DENSE, 148).config, target=target)


def test_warming_is_for_all_gpus() -> None:
    given = command.parser().parse_args(["warm", "--architecture", "sm100", "--masks", "full", "--layouts", "dense"])
    assert {c.target for c in command.configurations(given)} == set(TARGETS.values())
    given.passes = ["backward"]
    with pytest.raises(ValueError, match="--passes: expected some of forward for sm100, got backward"):
        command.configurations(given)


def test_features_that_are_lacking_are_refused() -> None:
    with pytest.raises(ValueError, match="features: expected none that the sm100 kernels lack, got mask, bias"):
        chosen(128, mask=True, bias=True)


def test_heads_of_a_group_never_share_a_tile() -> None:
    few = DENSE._replace(max_seqlen_q=1)
    planned = plan_forward(ARCHITECTURES["sm100"], spec_of(nheads_k=1), few, 148)
    assert planned.config == plan_forward(ARCHITECTURES["sm100"], spec_of(nheads_k=1), DENSE, 148).config
    assert planned.numbers.heads_in_cache > 0


def test_only_those_who_ask_get_it() -> None:
    """There is no backward pass yet."""
    names = list(BACKENDS)
    assert names.index("portable") < names.index("sm100")
    assert list(supposing("sm100")) == ["portable", "sm100"]
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    mask, bias = torch.ones(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=q.dtype)
    with pytest.raises(ValueError, match=r"got 'sm100', which cannot: mask; bias; tensors on cpu$"):
        flash_attn_func(q, q, q, mask=mask, bias=bias, backend="sm100")
    backend: Any = BACKENDS["sm100"]
    with pytest.raises(ValueError, match="has a backward pass, as gradients are asked for, got 'sm100'"):
        backend.backward(None, None, None, None, None, None, need_dbias=False, need_dsink=False)
