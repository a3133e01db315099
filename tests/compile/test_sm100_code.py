"""Blackwell kernels: configurations within the machine's sizes, and the machine code of some.

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

from flash_attn_cute import explain, flash_attn_func
from flash_attn_cute.backends.cute.plan import Shapes, plan_backward, plan_forward
from flash_attn_cute.calls.dispatch import BACKENDS, supposing
from flash_attn_cute.jit import __main__ as command
from flash_attn_cute.kernels.registry import ARCHITECTURES, pass_of
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_schedule import backward_schedule
from flash_attn_cute.kernels.sm100.backward.bias_gradient_config import BiasGradientConfig
from flash_attn_cute.kernels.sm100.backward.bias_gradient_schedule import bias_gradient_schedule
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    HEAD_DIMS,
    O_COLUMNS,
    PART_ROWS,
    SHARED_MEMORY,
    TARGETS,
    TENSOR_COLUMNS,
)
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward_schedule import forward_schedule
from lab.emulator.translate import translate
from lab.lint import lint
from lab.ptx import tree
from tests.lib import tiers
from tests.lib.compiled import check_before_and_after, code_for, machine_code
from tests.lib.configurations import (
    B200,
    B300,
    BACKWARD_EVERYTHING,
    EVERYTHING,
    LONG,
    MASKED,
    backward,
    bias_gradient,
    chosen,
    forward_pair,
    pair,
)
from tests.lib.specs import DENSE, spec_of

# Of packed sequences and windows a block mask's kernels see intervals of a dense batch.
LISTED = {"block_mask": True, "intervals": True, "softcap": True, "sink": True}
FEW = {
    "d64-packed-causal": chosen(64, right=True, packed=True),
    "d128": chosen(128),
    "d128-causal": chosen(128, right=True),
    "d128-b300": chosen(128, target=B300),
    "d192": chosen(192),
    "d192-dv128-packed-causal": chosen(192, 128, packed=True, right=True),
    "d256-everything-b300": chosen(256, target=B300, **EVERYTHING),
    "d128-block-mask": chosen(128, block_mask=True),
    "d64-block-mask-intervals": chosen(64, **LISTED),
    "d128-mask-everything": chosen(128, mask=True, **MASKED),
    "d128-bias": chosen(128, bias=True, right=True),
    "d192-dv128-wide": chosen(192, 128, wide=True, packed=True),
    "d128-block-mask-float32-bias-b300": chosen(128, target=B300, block_mask=True, bias=True, float32_bias=True),
    "d128-strided-bias": chosen(128, bias=True, strided_bias=True),
    "d64-max-logits": chosen(64, max_logits=True),
    "d64-max-logits-everything": chosen(64, max_logits=True, **EVERYTHING),
    "d128-max-logits-bias": chosen(128, bias=True, right=True, max_logits=True),
    "d64-residual": chosen(64, residual=True),
    **{f"d{d}-residual": chosen(d, right=True, residual=True) for d in (128, 192, 256)},
    "pair-d256-residual": forward_pair(256, 256, residual=True),
    "pair-d192-dv128-max-logits": forward_pair(192, 128, packed=True, right=True, max_logits=True),
    "pair-d256": forward_pair(256, 256),
    "pair-d256-dv128": forward_pair(256, 128),
    "pair-d192-dv128-everything-float16": forward_pair(192, 128, dtype="float16", **EVERYTHING),
    "d64-everything-b300": chosen(64, target=B300, **EVERYTHING),
    "pair-d192-dv128-packed-b300": forward_pair(192, 128, packed=True, target=B300),
}
MASKS = {
    "full": {},
    "causal": {"right": True},
    "packed-causal": {"packed": True, "right": True},
    "everything": EVERYTHING,
    "block-mask": {"block_mask": True},
    "intervals": LISTED,
    "mask": {"mask": True, **MASKED},
    "bias": {"bias": True, **EVERYTHING},
    "bias-mask": {"bias": True, "mask": True, **MASKED},
    "float32-bias": {"bias": True, "float32_bias": True, "block_mask": True, "softcap": True},
    "strided-bias": {"bias": True, "strided_bias": True, **EVERYTHING},
}
WITHOUT_TENSORS = [name for name, mask in MASKS.items() if not {"mask", "bias", "block_mask"} & mask.keys()]
# A B300 computes no exponentials by polynomials, whatever the mask.
OF_B300 = ["full", "everything", "intervals"]
ALL = {
    f"d{d}-dv{d_v}-{mask}-{target}": chosen(d, d_v, target=target, **MASKS[mask])
    for d, d_v in itertools.product(HEAD_DIMS, HEAD_DIMS)
    if d >= d_v
    for target, masks in ((B200, MASKS), (B300, OF_B300))
    for mask in masks
} | {
    f"pair-d{d}-dv{d_v}-{mask}-{target}": forward_pair(d, d_v, target=target, **MASKS[mask])
    for d, d_v in ((256, 256), (256, 128), (192, 128))
    for target, masks in ((B200, WITHOUT_TENSORS), (B300, ["full", "everything"]))
    for mask in masks
}


LISTED_BACKWARD = LISTED | {"dlse": True, "grouped": True}
MASKED_BACKWARD = BACKWARD_EVERYTHING | MASKED
# Many are those of calls that tests/blackwell interprets, so that they are compiled once.
FEW_BACKWARD = {
    "d192": backward(192),
    "d256-packed-causal": backward(256, packed=True, right=True),
    "d256-everything": backward(256, **BACKWARD_EVERYTHING),
    "d192-dv128": backward(192, 128),
    "d192-dv128-everything": backward(192, 128, **BACKWARD_EVERYTHING),
    "d64-packed-causal": backward(64, packed=True, right=True),
    "d64-everything-ungrouped": backward(64, **BACKWARD_EVERYTHING | {"grouped": False}),
    "d128": backward(128),
    "d128-float16": backward(128, dtype="float16"),
    "d128-everything": backward(128, **BACKWARD_EVERYTHING),
    "d128-block-mask": backward(128, block_mask=True, keys=LONG),
    "d64-intervals": backward(64, block_mask=True, intervals=True, softcap=True),
    "d192-dv128-intervals": backward(192, 128, block_mask=True, intervals=True),
    "d128-mask-everything": backward(128, mask=True, **MASKED_BACKWARD),
    "d192-mask-grouped": backward(192, packed=True, seqused_q=True, seqused_k=True, mask=True, grouped=True),
    "d256-intervals": backward(256, **LISTED_BACKWARD | {"dlse": False}),
    "d256-wide-everything": backward(256, wide=True, **BACKWARD_EVERYTHING),
    "d192-dv128-wide": backward(192, 128, wide=True, packed=True, right=True),
    "pair-wide-everything": pair(wide=True, **BACKWARD_EVERYTHING),
    "pair-causal-grouped": pair(right=True, dlse=True, grouped=True),
    "pair-d192-dv128": pair(192),
    "pair-d192-dv128-packed-causal-float16": pair(192, packed=True, right=True, dtype="float16"),
    "pair-d192-dv128-everything": pair(192, **BACKWARD_EVERYTHING),
    "pair-d192": pair(192, 192),
    "pair-d256": pair(256, 256),
    "pair-d256-packed-causal-float16": pair(256, 256, packed=True, right=True, dtype="float16"),
    "pair-d256-everything": pair(256, 256, **BACKWARD_EVERYTHING),
    "pair-d192-wide-everything": pair(192, 192, wide=True, **BACKWARD_EVERYTHING),
    "d64-row-of-a-bias": backward(64, bias=True, uniform_bias=True, float32_bias=True, dlse=True),
    "d128-block-mask-dbias": backward(128, block_mask=True, bias=True, dbias=True, dlse=True, grouped=True),
    "d128-dbias": backward(128, bias=True, dbias=True, dlse=True),
    "d128-bias-everything": backward(128, bias=True, **BACKWARD_EVERYTHING),
    "d128-float32-bias-everything": backward(128, bias=True, float32_bias=True, **BACKWARD_EVERYTHING),
    "d128-bias-mask-everything": backward(128, bias=True, mask=True, **MASKED_BACKWARD),
    "d256-dbias-float16": backward(256, bias=True, dbias=True, dlse=True, dtype="float16"),
}
BACKWARD_MASKS = {name: MASKS[name] for name in WITHOUT_TENSORS} | {
    "causal-grouped": {"right": True, "grouped": True},
    "packed-left": {"packed": True, "left": True, "seqused_k": True},
    "softcap": {"softcap": True},
    "everything": BACKWARD_EVERYTHING,
    "everything-ungrouped": BACKWARD_EVERYTHING | {"grouped": False},
    "no-zero-padding": BACKWARD_EVERYTHING | {"zero_padding": False},
    "wide": BACKWARD_EVERYTHING | {"wide": True},
}
BACKWARD_LISTS = {
    "block-mask": {"block_mask": True},
    "block-mask-grouped": {"block_mask": True, "grouped": True},
    "intervals": LISTED_BACKWARD,
    "mask": {"mask": True},
    "mask-everything": {"mask": True, **MASKED_BACKWARD},
}
BACKWARD_BIASES = {
    "bias": {"bias": True, **BACKWARD_EVERYTHING},
    "dbias": {"bias": True, "dbias": True, **BACKWARD_EVERYTHING, "softcap": False},
    "float32-bias": {"bias": True, "float32_bias": True, **BACKWARD_EVERYTHING, "softcap": False},
    "float32-bias-softcap": {"bias": True, "float32_bias": True, "softcap": True, "right": True},
    "row-of-a-bias": {"bias": True, "uniform_bias": True, "packed": True, "grouped": True},
    "dbias-mask": {"bias": True, "dbias": True, "mask": True, **MASKED_BACKWARD, "softcap": False},
    "bias-block-mask": {"bias": True, "block_mask": True, "grouped": True},
    "float32-bias-everything": {"bias": True, "float32_bias": True, **BACKWARD_EVERYTHING},
    "bias-mask-everything": {"bias": True, "mask": True, **MASKED_BACKWARD},
}
BIAS_GRADIENTS = {
    "full": {},
    "everything": EVERYTHING,
    "split": {"packed": True, "right": True, "split": True},
    "float32": {"float32_bias": True, "softcap": True},
    "strided": {"strided_bias": True, "left": True},
    "mask": {"mask": True, **MASKED},
    "block-mask": {"block_mask": True},
}


FEW_BIAS_GRADIENTS = {
    "d64-float32-strided": bias_gradient(64, float32_bias=True, strided_bias=True),
    "d64-split": bias_gradient(64, split=True),
    "d128-mask-everything": bias_gradient(128, mask=True, **MASKED),
    "d192-dv128-block-mask-float16": bias_gradient(192, 128, block_mask=True, dtype="float16"),
    "d256-everything": bias_gradient(256, float32_bias=True, **EVERYTHING),
}
_SIZES = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
ALL_BIAS_GRADIENTS = {
    f"d{d}-dv{d_v}-{name}": bias_gradient(d, d_v, **BIAS_GRADIENTS[name])
    for (d, d_v), name in itertools.product(_SIZES, BIAS_GRADIENTS)
}
ALL_BACKWARD = {
    f"d{d}-dv{d_v}-{name}": backward(d, d_v, **mask)
    for (d, d_v), (name, mask) in itertools.product(_SIZES, (BACKWARD_MASKS | BACKWARD_LISTS | BACKWARD_BIASES).items())
} | {
    f"pair-d{d}-dv{d_v}-{mask}": pair(d, d_v, **BACKWARD_MASKS[mask])
    for (d, d_v), mask in itertools.product(_SIZES[1:], BACKWARD_MASKS)
}
# Configurations whose kernels are compared with those of another target or dtype. All of them have all features that
# the kernels of a size know, in one configuration or another.
FEW_OF_BOTH_TARGETS = {
    "backward-d64": backward(64),
    "backward-d256": backward(256),
    "backward-pair-d192": pair(192, 192),
    "bias-gradient": bias_gradient(64),
}
FEW_OF_BOTH_DTYPES = {"forward": chosen(128), "backward": backward(128)}
_NAMES = ["everything", "wide", "mask-everything", "float32-bias-everything", "block-mask", "mask"]
ALL_OF_BOTH_TARGETS = {
    f"{kind}-{name}": c
    for kind, cases in (("backward", ALL_BACKWARD), ("bias-gradient", ALL_BIAS_GRADIENTS))
    for name, c in cases.items()
    if re.fullmatch(rf"(pair-)?d\d+-dv\d+-({'|'.join(_NAMES)})", name)
}
ALL_OF_BOTH_DTYPES = ALL_OF_BOTH_TARGETS | {
    f"forward-{name}": c for name, c in ALL.items() if re.fullmatch(rf".*-(everything|intervals|bias)-{B200}", name)
}
# Among the few, those that interpreted calls compile anyway, in the place of others of the same sizes or features.
SHARED = ("d192-mask-grouped",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compiling all configurations takes an hour, so it has to be asked for; a plain run compiles two."""
    for name, few, all_of, quick in (
        ("compiled", FEW, ALL, ("d128-causal",)),
        ("compiled_backward", FEW_BACKWARD, ALL_BACKWARD, ("pair-d256",)),
        ("compiled_bias_gradient", FEW_BIAS_GRADIENTS, ALL_BIAS_GRADIENTS, ()),
        ("of_both_targets", FEW_OF_BOTH_TARGETS, ALL_OF_BOTH_TARGETS, ()),
        ("of_both_dtypes", FEW_OF_BOTH_DTYPES, ALL_OF_BOTH_DTYPES, ()),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, tiers.compiled(metafunc.config, few | all_of, *quick, few=few, shared=SHARED))


def test_compiled_forward(compiled: ForwardConfig, tmp_path: Path) -> None:
    """No spills; products, weights, loads and stores as they should be; tensor memory is allocated and freed."""
    c, pair = compiled, compiled.ctas_a_tile == 2
    (sass,) = machine_code(c, tmp_path)["ForwardPair" if pair else "Forward"]
    ptx = code_for(c).ptx
    assert not lint(ptx)
    assert len(translate(ptx).emulated) == 1, "the emulation knows all that is in it"
    names = ("UTCHMMA", "HGMMA", "UTCBAR", "LDTM", "STTM", "USETMAXREG")
    count = {name: len(re.findall(rf"\b{name}\b", sass)) for name in names}
    # Loops for each part: of four steps of scores, and of two each of most keys' output and of the others', which are
    # issued at two places.
    assert count["UTCHMMA"] == 4 * 3 * c.q_parts
    assert len(re.findall(r"\bUTCHMMA\.2CTA\b", sass)) == (count["UTCHMMA"] if pair else 0)
    assert len(re.findall(r"\bUTCBAR\.2CTA\.MULTICAST\b", sass)) == (count["UTCBAR"] if pair else 0)
    assert count["HGMMA"] == 0
    assert count["USETMAXREG"] == 3 + (c.q_parts == 1)
    # Nothing is added up in memory but how many tiles are taken, by each CTA of a pair for all its roles. The largest
    # logits are raised by a maximum or a minimum.
    assert not re.search(r"(?<!\.)\b(LDL|STL|ATOM)\b", sass)
    assert len(re.findall(r"(?<!\.)\b(?:RED|REDG)\b", sass)) == 2 * c.features.max_logits
    assert len(re.findall(r"\bATOMG\b", sass)) == c.ctas_a_tile
    # Scores are read for P in advance, for a maximum, and for P by that, and, 32 columns at a time, to be capped
    # and hidden, and to have a bias added. For the largest logit they are hidden and read ahead of that, too.
    # O is read to be rescaled, and to be stored.
    changes = 1 + c.features.softcap + c.features.bias
    searches = c.features.max_logits and c.features.caps_or_biases
    pieces = c.tile_n // 32
    assert count["LDTM"] == pieces * (3 + changes + 2 * searches) + c.tile_dv // 32 + c.tile_dv // 16
    # Weights are stored at two places, in pieces of at most 32 columns, the last 16 apart, and zeros at a third, but
    # under a mask.
    P, zeros = -(-(c.tile_n // 2 - 16) // 32) + 1, 0 if c.features.listed else c.tile_n // 64
    assert count["STTM"] == 2 * P + zeros + pieces * (changes + searches) + c.tile_dv // 32
    # Pairs of weights at two places, fused, so that bits never depend on the place; four more of a polynomial. Pairs of
    # scores and a bias.
    polynomials = c.tile_n // 2 // c.polynomial_every if c.polynomial_every else 0
    assert len(re.findall(r"\bFFMA2\b", sass)) == (2 + c.features.bias) * c.tile_n // 2 + 8 * polynomials
    assert len(re.findall(r"\bMUFU\.EX2\b", sass)) >= 2 * (c.tile_n - 2 * polynomials)
    if c.features.bias and not searches:  # up to 64 words of a row are read before its scores are waited for
        words = min(64, c.tile_n // (1 if c.features.float32_bias else 2))
        load, num = ("LDG.E ", 1) if c.features.strided_bias else ("LDG.E.128 ", words // 4)
        begins = sass.index(load)
        ahead = sass[begins : sass.index("SYNCS.PHASECHK", begins)]
        assert ahead.count(load) >= num
        assert "LDTM" not in ahead
    # Under a mask the compiler may write some blocks of a pass apart.
    loads = ((c.q_parts + 1) * c.tile_d + c.columns_shared) // 64
    assert loads <= len(re.findall(r"\bUTMALDG", sass)) <= loads * (3 if c.features.listed else 1)
    assert len(re.findall(r"\bUTMASTG", sass)) == (0 if c.features.wide else c.tile_dv // 64)
    assert len(re.findall(r"\btcgen05\.alloc\b", ptx)) == len(re.findall(r"\btcgen05\.dealloc\b", ptx)) == 1
    assert len(re.findall(r"\btcgen05\.relinquish_alloc_permit\b", ptx)) == 1
    assert f".target {c.target}" in ptx
    for kind in ("ld", "st"):
        for block in assembly(ptx, f"tcgen05.{kind}"):
            assert block[-1] == f"tcgen05.wait::{kind}.sync.aligned;", (
                "registers or columns are used before they are there"
            )


def test_compiled_backward(compiled_backward: BackwardConfig, tmp_path: Path) -> None:
    """No spills but for a few; five products, loads, stores and additions as they should be; tensor memory is freed."""
    c = compiled_backward
    # Bytes: a bias, read ahead, and what a softcap keeps for later are some registers too many, beside a mask, or in
    # float32, at d = 128.
    many = c.features.bias and c.features.softcap and (c.features.mask or c.features.float32_bias)
    spilled = 40 if many and c.tile_d == c.tile_dv == 128 else 0
    kernels = machine_code(c, tmp_path, spilled)
    check_before_and_after(kernels, zeroes=False, num_after=0)
    pair = c.ctas_a_tile == 2
    names_of_one, names_of_two = ("BackwardCta", "BackwardPair"), ("BackwardTwoPass", "BackwardPairTwoPass")
    (sass,) = kernels[(names_of_one if c.num_passes == 1 else names_of_two)[pair]]
    ptx = code_for(c).ptx
    assert not lint(ptx)
    assert len(translate(ptx).emulated) == 1, "the emulation knows all that is in it"
    names = ("UTCHMMA", "HGMMA", "UTCBAR", "LDTM", "STTM", "USETMAXREG")
    count = {name: len(re.findall(rf"\b{name}\b", sass)) for name in names}
    # Loops of four steps. One pass: S, dP and dV once, dK and dQ behind a step and behind a tile. Two: S in each.
    assert count["UTCHMMA"] == 4 * (3 + 2 * (1 + c.parts_dQ) if c.num_passes == 1 else 5 + c.parts_dQ)
    assert len(re.findall(r"\bUTCHMMA\.2CTA\b", sass)) == (count["UTCHMMA"] if pair else 0)
    assert count["HGMMA"] == 0
    # What fills and what empties a stage; behind a tile dV and dK. A pair's producers are signalled apart; of two
    # passes that of K by the last dQ, and that of Q by each S.
    commits = 2 + (3 + 2 * (1 + c.parts_dQ) if c.num_passes == 1 else 3 + 4 + c.parts_dQ)
    assert count["UTCBAR"] == commits + (4 - c.num_passes if pair else 0)
    assert len(re.findall(r"\bUTCBAR\.2CTA\.MULTICAST\b", sass)) == (count["UTCBAR"] if pair else 0)
    assert count["USETMAXREG"] == 3
    # A thread has half of S and dP, 32 at a time. Scores are changed where they are to be capped, or to have a bias
    # added (which behind a softcap is added later), and hidden.
    queries = c.tile_m // COMPUTE_WARPGROUPS
    blocks = queries // 32
    changes = blocks * c.num_passes * (1 + (c.features.softcap or c.features.bias))
    # Of dV and of dK, the last of an odd number for whose piece it is.
    pieces = sum(-(-num // COMPUTE_WARPGROUPS) for num in (c.pieces_dV, c.pieces_dK))
    assert count["LDTM"] == blocks * (c.num_passes + 1) + changes + 2 * pieces + c.parts_dQ * c.columns_dQ // 32
    assert count["STTM"] == 2 * blocks + changes + (c.tile_d // 64 if c.holds_keys else 0)
    assert len(re.findall(r"\bMUFU\.EX2\b", sass)) == c.num_passes * c.tile_m // COMPUTE_WARPGROUPS
    # Of each 64 columns; Q and dO of a pair by rows and by columns, and K of both CTAs by columns. Half of 192 columns
    # are 3 times 32. Two passes of a pair have loads of Q of their own, and K is that of a CTA; two passes of a CTA
    # have loads of Q and dO of their own.
    loads = re.findall(r"\bcp\.async\.bulk\.tensor\.\dd\.shared::(?:cta|cluster)\.global\S*", ptx)
    halves = sum(n // 64 if n % 128 else n // 128 for n in (c.tile_d, c.tile_dv)) + 2 * c.columns_of_keys // 64
    halves += c.tile_d // 64 if c.holds_keys else 0
    again = halves if pair else (c.num_passes - 1) * (c.tile_d + c.tile_dv) // 64
    assert len(loads) == 2 * (c.tile_d + c.tile_dv) // 64 + again
    of_both = len(loads) - (c.tile_d // 64 if c.holds_keys else 0) if pair else 0
    assert sum(load.endswith(".cta_group::2") for load in loads) == of_both
    assert len(re.findall(r"\bUTMALDG", sass)) >= len(loads)  # the assembler may have a pair's first step apart
    assert len(re.findall(r"\bUTMASTG", sass)) == (0 if c.features.wide else pieces)
    assert len(re.findall(r"\bUBLKRED\.G\.S\.ADD\.F32", sass)) == c.pieces_dQ
    sums = pieces * 64 if c.features.grouped else 0  # of keys: from registers, four at a time
    assert len(re.findall(r"\bREDG\.E\.ADD\.F32x4", sass)) == sums // 4
    assert len(re.findall(r"\btcgen05\.alloc\b", ptx)) == len(re.findall(r"\btcgen05\.dealloc\b", ptx)) == 1
    assert f".target {c.target}" in ptx
    # Of a bias of 16 bits an element a score, or one for all of a thread's, and its gradient.
    elements = c.num_passes * (1 if c.features.uniform_bias else queries) if c.features.bias else 0
    if not c.features.float32_bias:
        assert len(re.findall(r"\bLDG\.E\.[SU]16\b", sass)) == elements
    assert len(re.findall(r"\bSTG\.E\.U16\b", sass)) == queries * c.features.dbias


def test_compiled_bias_gradient(compiled_bias_gradient: BiasGradientConfig, tmp_path: Path) -> None:
    """No spills but for a few; two products; nothing is added in memory; tensor memory is allocated and freed."""
    c = compiled_bias_gradient
    # Bytes: the kernel that makes a mask's tiles, at d = 256.
    spilled = 16 if c.tile_d == 256 and c.features.mask else 0
    sass, *adding_up = machine_code(c, tmp_path, spilled)["BiasGradient"]
    if "UTCHMMA" not in sass:
        (sass,), adding_up = adding_up, [sass]
    ptx = code_for(c).ptx
    assert not lint(ptx)
    assert len(translate(ptx).emulated) == 1, "the emulation knows all that is in it"
    assert len(adding_up) == c.split
    names = ("UTCHMMA", "UTCBAR", "LDTM", "STTM", "USETMAXREG")
    count = {name: len(re.findall(rf"\b{name}\b", sass)) for name in names}
    assert count["UTCHMMA"] == 2 * 4  # loops of four steps, of S and dP
    assert count["UTCBAR"] == 4  # each is there, and its operands are read
    assert count["USETMAXREG"] == 3
    # The bias, S to add that, to be hidden by edges and for P, and dP; the bias is stored in a loop.
    blocks, more = c.keys // 32, c.features.softcap + c.features.listed
    assert count["LDTM"] == blocks * (5 + more)
    assert count["STTM"] == 1 + blocks * (2 + more)
    assert len(re.findall(r"\bMUFU\.EX2\b", sass)) == c.keys
    assert len(re.findall(r"\bUTMALDG", sass)) == 2 * (c.tile_d + c.tile_dv) // 64
    assert not re.search(r"\b(RED|REDG|ATOM|ATOMG)\b", sass)
    assert f".target {c.target}" in ptx


def assembly(ptx: str, instruction: str) -> Iterator[list[str]]:
    """The inline assembly that has an instruction, which stands nowhere else."""
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL)
    found = [block for block in blocks if f"{instruction}." in block]
    assert sum(block.count(f"{instruction}.") for block in found) == ptx.count(f"{instruction}.")
    for block in found:
        yield [line.strip() for line in block.strip().splitlines()]


@pytest.mark.parametrize("queries", [0, LONG])
@pytest.mark.parametrize("d", range(8, 264, 8))
def test_sizes(d: int, queries: int) -> None:
    """Within shared memory, tensor memory and registers; wide enough; rings of a power of 2."""
    for d_v in range(8, 264, 8):
        check_sizes(chosen(d, d_v, queries=queries), d, d_v)


def check_sizes(c: ForwardConfig, d: int, d_v: int) -> None:
    if c.ctas_a_tile == 2:
        assert (c.tile_d, c.tile_dv) in ((192, 128), (256, 128), (256, 256))
        assert c.columns_shared % O_COLUMNS == 0
    assert c.tile_d >= d
    assert c.tile_dv >= d_v
    assert forward_schedule(c).num_bytes <= SHARED_MEMORY
    assert c.first_O(c.q_parts - 1) + c.tile_dv <= TENSOR_COLUMNS
    r = c.registers
    assert r.softmax + (r.softmax if c.q_parts == 2 else r.none) + r.epilogue + r.others <= 512
    assert all(24 <= x <= 256 and x % 8 == 0 for x in r)
    assert all(stages & stages - 1 == 0 for stages in (c.k_stages, c.v_stages, c.q_parts))
    assert c.blocks_ahead * c.q_parts == 2


@pytest.mark.parametrize("keys", [0, LONG])
@pytest.mark.parametrize("d", range(8, max(HEAD_DIMS) + 8, 8))
def test_backward_sizes(d: int, keys: int) -> None:
    """Within shared memory, tensor memory, whose parts do not overlap, and registers; rings of a power of 2."""
    for d_v in range(8, max(HEAD_DIMS) + 8, 8):
        c = backward(d, d_v, keys=keys)
        pair = keys > 0 and c.tile_d > 64
        assert c.ctas_a_tile == (2 if pair else 1)
        assert backward(d, d_v, keys=keys, block_mask=True).ctas_a_tile == 1
        assert max(d, d_v) <= c.tile_d
        assert d_v <= c.tile_dv
        assert backward_schedule(c).num_bytes <= SHARED_MEMORY
        sums = [(c.first_dV, c.tile_dv), (c.first_dK, c.tile_d)]  # in one place, if there are two passes
        parts = [(c.first_S, c.tile_m), (c.first_dP, c.tile_m), *(sums if c.num_passes == 1 else sums[1:])]
        parts += [(c.first_K, c.tile_d // 2)] if c.holds_keys else []
        parts += [(c.first_dQ(part), c.columns_dQ) for part in range(int(c.dQ_over_dP), c.parts_dQ)]
        if c.dQ_over_S:  # of one pass between two quarters, which hold P; else scores are read by then
            first, columns = parts.pop()
            P = c.queries // 2 if c.num_passes == 1 else 0
            assert first == c.first_S + P
            assert columns == c.tile_m - 2 * P
            assert c.num_passes == 2 or c.P_stride == P + columns
        parts.sort()
        assert all(first + columns <= behind for (first, columns), (behind, _) in itertools.pairwise(parts))
        assert sum(parts[-1]) <= TENSOR_COLUMNS
        if c.num_passes == 2:
            assert sums[0] == sums[1]
            assert pair or not c.dQ_over_dP
        if c.dQ_over_dP:  # which its first part does not reach beyond
            assert c.first_dQ(0) == c.first_dP
            assert c.columns_dQ <= c.tile_m
        # Rows of all products are lanes, or a part of dQ's are, which together are all of its columns.
        if c.transposes_dQ:
            starts = [c.first_row_dQ(part) for part in range(c.parts_dQ * c.ctas_a_tile)]
            assert starts[0] == 0
            assert starts[-1] + PART_ROWS == c.tile_d
            assert all(b - a <= PART_ROWS for a, b in itertools.pairwise(starts))
        else:
            assert c.tile_m == PART_ROWS
        assert c.registers.drain + COMPUTE_WARPGROUPS * c.registers.compute + c.registers.others <= 512
        assert all(24 <= x <= 256 and x % 8 == 0 for x in c.registers)
        assert all(stages & stages - 1 == 0 for stages in (c.kv_stages, c.q_stages, c.do_stages, c.parts_dQ))


@pytest.mark.parametrize("d_v", [192, 128])
def test_pairs_share_values_by_swizzled_rows(d_v: int) -> None:
    """No CTA can have half of 192 columns of v, and fewer than 128 are no pair's."""
    assert chosen(256, d_v, queries=LONG).ctas_a_tile == (2 if d_v == 128 else 1)
    assert chosen(192, d_v, queries=LONG).ctas_a_tile == (2 if d_v == 128 else 1)


@pytest.mark.parametrize("feature", ["mask", "block_mask", "bias"])
def test_pairs_know_no_masks(feature: str) -> None:
    assert chosen(256, queries=LONG).ctas_a_tile == 2
    assert chosen(256, queries=LONG, **{feature: True}) == chosen(256, **{feature: True})


def test_pairs_are_planned_for_long_sequences() -> None:
    """By how many queries a sequence has, on average."""
    spec = spec_of(head_dim=256)
    for length, sequences, ctas in ((4096, 0, 2), (128, 0, 1), (4096, 4, 2), (4096, 32, 1)):
        rows = (2, length) if sequences == 0 else (length,)
        shapes = Shapes((*rows, 4, 256), (*rows, 4, 256), sequences, length)
        planned = plan_forward(ARCHITECTURES["sm100"], spec, shapes, 148)
        assert planned.config.ctas_a_tile == ctas
        assert planned.config.tile_m == 128 * ctas
    q = torch.zeros(1, 4096, 2, 256, dtype=torch.bfloat16, device="meta")
    explained = explain(q, q, q, gpu="sm100", backend="sm100").forward
    assert explained is not None
    assert explained.cluster == 2


def test_pairs_are_planned_for_wide_windows() -> None:
    """By how many keys a query attends to between the bounds; a window of one bound is wide."""
    shapes = Shapes((2, 4096, 4, 128), (2, 4096, 4, 128), 0, 4096)
    for left, right, ctas in ((300, 0, 1), (383, 383, 1), (384, 383, 2), (767, 0, 2), (None, 0, 2), (0, None, 2)):
        spec = spec_of(window_left=left, window_right=right)
        planned = plan_backward(ARCHITECTURES["sm100"], spec, shapes, 148)
        assert planned.config.ctas_a_tile == ctas, (left, right)
        forward = plan_forward(ARCHITECTURES["sm100"], spec._replace(head_dim=192), shapes, 148)
        assert forward.config.ctas_a_tile == ctas, (left, right)


@pytest.mark.parametrize("d", range(8, max(HEAD_DIMS) + 8, 8))
def test_bias_gradient_sizes(d: int) -> None:
    """Within shared memory, tensor memory and registers; rings of a power of 2; blocks of the backward pass."""
    for d_v in range(8, max(HEAD_DIMS) + 8, 8):
        c, main = bias_gradient(d, d_v), backward(d, d_v, bias=True, keys=LONG)
        assert c.stats_m == main.tile_m
        assert main.ctas_a_tile == 1
        assert d <= c.tile_d
        assert d_v <= c.tile_dv
        assert bias_gradient_schedule(c).num_bytes <= SHARED_MEMORY
        firsts = [*map(c.first_S, range(c.score_stages)), c.first_dP, c.first_bias, TENSOR_COLUMNS]
        assert all(b - a >= c.tile_n for a, b in itertools.pairwise(firsts))
        assert COMPUTE_WARPGROUPS * c.registers.compute + 2 * c.registers.others <= 512
        assert all(24 <= x <= 256 and x % 8 == 0 for x in c.registers)
        assert all(stages & stages - 1 == 0 for stages in (c.stages, c.score_stages))


def test_targets_differ_in_the_forward_pass_alone(of_both_targets: Any) -> None:
    """Other kernels are the same PTX: what tests find out about one target holds for the other."""
    of_b200, of_b300 = (
        code_for(dataclasses.replace(of_both_targets, target=target)).ptx for target in TARGETS.values()
    )
    assert of_b200.count(f".target {B200}") == 1
    assert of_b300 == of_b200.replace(f".target {B200}", f".target {B300}")


def test_dtypes_differ_in_conversions_alone(of_both_dtypes: Any) -> None:
    """Instructions are alike, in one order, but for those that convert a number or make a constant."""
    of_bfloat16, of_float16 = (
        [
            re.sub(r"\bbf16", "f16", x.opcode)
            for function in tree.parse(code_for(dataclasses.replace(of_both_dtypes, dtype=dtype)).ptx).functions
            for x in function.instructions
            if x.operation not in ("mov", "cvt", "shl", "and")
        ]
        for dtype in ("bfloat16", "float16")
    )
    assert of_bfloat16 == of_float16


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
    given.passes, given.features = ["bias_gradient"], ["bias"]
    assert {c.target for c in command.configurations(given)} == set(TARGETS.values())


def test_warming_refuses_passes_that_there_are_none_of(monkeypatch: pytest.MonkeyPatch) -> None:
    sm100 = ARCHITECTURES["sm100"]
    lacking = sm100._replace(passes={"forward": sm100.passes["forward"]})
    monkeypatch.setitem(command._ARCHITECTURES, "sm100", lacking)
    given = command.parser().parse_args(["warm", "--architecture", "sm100", "--passes", "bias_gradient"])
    with pytest.raises(ValueError, match="--passes: expected some of forward for sm100, got bias_gradient"):
        command.configurations(given)


def test_warming_is_for_all_lengths() -> None:
    """Where long sequences get other kernels."""
    for name, d, mask in (("backward", "128", "causal"), ("forward", "256", "causal"), ("backward", "256", "window")):
        arguments = ["warm", "--architecture", "sm100", "--masks", mask, "--passes", name, "--layouts", "dense"]
        arguments += ["--dtypes", "float16", "--head-dims", "64", d]
        found = command.configurations(command.parser().parse_args(arguments))
        assert sorted(c.ctas_a_tile for c in found if c.tile_d == int(d) and c.target == B200) == [1, 2]
        assert {c.ctas_a_tile for c in found if c.tile_d < 128} == {1}


def test_warming_of_a_bias_compiles_its_gradient() -> None:
    arguments = ["warm", "--architecture", "sm100", "--masks", "full", "--layouts", "dense", "--head-dims", "256"]
    for feature, more in (("block_mask", set()), ("bias", {"bias_gradient"})):
        given = command.parser().parse_args([*arguments, "--features", feature])
        assert {c.pass_name for c in command.configurations(given)} == {"forward", "backward"} | more


def test_heads_of_a_group_never_share_a_tile() -> None:
    few = DENSE._replace(max_seqlen_q=1)
    planned = plan_forward(ARCHITECTURES["sm100"], spec_of(nheads_k=1), few, 148)
    assert planned.config == plan_forward(ARCHITECTURES["sm100"], spec_of(nheads_k=1), DENSE, 148).config
    assert planned.numbers.heads_in_cache > 0


def test_only_those_who_ask_get_it() -> None:
    """It has not run on such a GPU yet."""
    names = list(BACKENDS)
    assert names.index("portable") < names.index("sm100")
    assert list(supposing("sm100")) == ["portable", "sm100"]
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"got 'sm100', which cannot: tensors on cpu$"):
        flash_attn_func(q, q, q, backend="sm100")


def test_gradients_are_planned() -> None:
    q, v = (torch.zeros(1, 8, 2, d, dtype=torch.bfloat16, device="meta") for d in (256, 200))
    assert explain(q, q, v, gpu="sm100", backend="sm100").backward is not None
    mask = torch.ones(8, 8, dtype=torch.bool, device="meta")
    assert explain(q, q, v, mask=mask, gpu="sm100", backend="sm100").backward is not None
    assert explain(q, q, v, bias=mask.to(q.dtype), gpu="sm100", backend="sm100").backward is not None
