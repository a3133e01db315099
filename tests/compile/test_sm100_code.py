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

from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.bias_gradient_config import BiasGradientConfig
from flash_attn_cute.kernels.sm100.config import (
    COMPUTE_WARPGROUPS,
    HEAD_DIMS,
    TARGETS,
)
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from lab.emulator.translate import translate
from lab.lint import lint
from lab.ptx import tree
from tests.lib import tiers
from tests.lib.compiled import check_before_and_after, code_for, count, machine_code
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

# Of packed sequences and windows a block mask's kernels see intervals of a dense batch.
LISTED = "block_mask intervals softcap sink"
FEW = {
    "d64-packed-causal": chosen(64, "right packed"),
    "d128": chosen(128),
    "d128-causal": chosen(128, "right"),
    "d128-b300": chosen(128, target=B300),
    "d192": chosen(192),
    "d192-dv128-packed-causal": chosen((192, 128), "packed right"),
    "d256-everything-b300": chosen(256, EVERYTHING, target=B300),
    "d128-block-mask": chosen(128, "block_mask"),
    "d64-block-mask-intervals": chosen(64, LISTED),
    "d128-mask-everything": chosen(128, f"mask {MASKED}"),
    "d128-bias": chosen(128, "bias right"),
    "d192-dv128-wide": chosen((192, 128), "wide packed"),
    "d128-block-mask-float32-bias-b300": chosen(128, "block_mask bias float32_bias", target=B300),
    "d128-strided-bias": chosen(128, "bias strided_bias"),
    "d64-max-logits": chosen(64, "max_logits"),
    "d64-max-logits-everything": chosen(64, f"max_logits {EVERYTHING}"),
    "d128-max-logits-bias": chosen(128, "bias right max_logits"),
    "d64-residual": chosen(64, "residual"),
    **{f"d{d}-residual": chosen(d, "right residual") for d in (128, 192, 256)},
    "pair-d256-residual": forward_pair(256, "residual"),
    "pair-d192-dv128-max-logits": forward_pair((192, 128), "packed right max_logits"),
    "pair-d256": forward_pair(256),
    "pair-d256-dv128": forward_pair((256, 128)),
    "pair-d192-dv128-everything-float16": forward_pair((192, 128), EVERYTHING, dtype="float16"),
    "d64-everything-b300": chosen(64, EVERYTHING, target=B300),
    "pair-d192-dv128-packed-b300": forward_pair((192, 128), "packed", target=B300),
}
MASKS = {
    "full": "",
    "causal": "right",
    "packed-causal": "packed right",
    "everything": EVERYTHING,
    "block-mask": "block_mask",
    "intervals": LISTED,
    "mask": f"mask {MASKED}",
    "bias": f"bias {EVERYTHING}",
    "bias-mask": f"bias mask {MASKED}",
    "float32-bias": "bias float32_bias block_mask softcap",
    "strided-bias": f"bias strided_bias {EVERYTHING}",
}
WITHOUT_TENSORS = [name for name, mask in MASKS.items() if not {"mask", "bias", "block_mask"} & {*mask.split()}]
# A B300 computes no exponentials by polynomials, whatever the mask.
OF_B300 = ["full", "everything", "intervals"]
ALL = {
    f"d{d}-dv{d_v}-{mask}-{target}": chosen((d, d_v), MASKS[mask], target=target)
    for d, d_v in itertools.product(HEAD_DIMS, HEAD_DIMS)
    if d >= d_v
    for target, masks in ((B200, MASKS), (B300, OF_B300))
    for mask in masks
} | {
    f"pair-d{d}-dv{d_v}-{mask}-{target}": forward_pair((d, d_v), MASKS[mask], target=target)
    for d, d_v in ((256, 256), (256, 128), (192, 128))
    for target, masks in ((B200, WITHOUT_TENSORS), (B300, ["full", "everything"]))
    for mask in masks
}


LISTED_BACKWARD = f"{LISTED} dlse grouped"
MASKED_BACKWARD = f"{BACKWARD_EVERYTHING} -left -right"
# Many are those of calls that tests/blackwell interprets, so that they are compiled once.
FEW_BACKWARD = {
    "d192": backward(192),
    "d256-packed-causal": backward(256, "packed right"),
    "d256-everything": backward(256, BACKWARD_EVERYTHING),
    "d192-dv128": backward((192, 128)),
    "d192-dv128-everything": backward((192, 128), BACKWARD_EVERYTHING),
    "d64-packed-causal": backward(64, "packed right"),
    "d64-everything-ungrouped": backward(64, f"{BACKWARD_EVERYTHING} -grouped"),
    "d128": backward(128),
    "d128-float16": backward(128, dtype="float16"),
    "d128-everything": backward(128, BACKWARD_EVERYTHING),
    "d128-block-mask": backward(128, "block_mask", keys=LONG),
    "d64-intervals": backward(64, "block_mask intervals softcap"),
    "d192-dv128-intervals": backward((192, 128), "block_mask intervals"),
    "d128-mask-everything": backward(128, f"mask {MASKED_BACKWARD}"),
    "d192-mask-grouped": backward(192, "packed seqused_q seqused_k mask grouped"),
    "d256-intervals": backward(256, f"{LISTED_BACKWARD} -dlse"),
    "d256-wide-everything": backward(256, f"wide {BACKWARD_EVERYTHING}"),
    "d192-dv128-wide": backward((192, 128), "wide packed right"),
    "pair-wide-everything": pair(128, f"wide {BACKWARD_EVERYTHING}"),
    "pair-causal-grouped": pair(128, "right dlse grouped"),
    "pair-d192-dv128": pair((192, 128)),
    "pair-d192-dv128-packed-causal-float16": pair((192, 128), "packed right", dtype="float16"),
    "pair-d192-dv128-everything": pair((192, 128), BACKWARD_EVERYTHING),
    "pair-d192": pair(192),
    "pair-d256": pair(256),
    "pair-d256-packed-causal-float16": pair(256, "packed right", dtype="float16"),
    "pair-d256-everything": pair(256, BACKWARD_EVERYTHING),
    "pair-d192-wide-everything": pair(192, f"wide {BACKWARD_EVERYTHING}"),
    "d64-row-of-a-bias": backward(64, "bias uniform_bias float32_bias dlse"),
    "d128-block-mask-dbias": backward(128, "block_mask bias dbias dlse grouped"),
    "d128-dbias": backward(128, "bias dbias dlse"),
    "d128-bias-everything": backward(128, f"bias {BACKWARD_EVERYTHING}"),
    "d128-float32-bias-everything": backward(128, f"bias float32_bias {BACKWARD_EVERYTHING}"),
    "d128-bias-mask-everything": backward(128, f"bias mask {MASKED_BACKWARD}"),
    "d256-dbias-float16": backward(256, "bias dbias dlse", dtype="float16"),
}
BACKWARD_MASKS = {name: MASKS[name] for name in WITHOUT_TENSORS} | {
    "causal-grouped": "right grouped",
    "packed-left": "packed left seqused_k",
    "softcap": "softcap",
    "everything": BACKWARD_EVERYTHING,
    "everything-ungrouped": f"{BACKWARD_EVERYTHING} -grouped",
    "no-zero-padding": f"{BACKWARD_EVERYTHING} no_zero_padding",
    "wide": f"{BACKWARD_EVERYTHING} wide",
}
BACKWARD_LISTS = {
    "block-mask": "block_mask",
    "block-mask-grouped": "block_mask grouped",
    "intervals": LISTED_BACKWARD,
    "mask": "mask",
    "mask-everything": f"mask {MASKED_BACKWARD}",
}
BACKWARD_BIASES = {
    "bias": f"bias {BACKWARD_EVERYTHING}",
    "dbias": f"bias dbias {BACKWARD_EVERYTHING} -softcap",
    "float32-bias": f"bias float32_bias {BACKWARD_EVERYTHING} -softcap",
    "float32-bias-softcap": "bias float32_bias softcap right",
    "row-of-a-bias": "bias uniform_bias packed grouped",
    "dbias-mask": f"bias dbias mask {MASKED_BACKWARD} -softcap",
    "bias-block-mask": "bias block_mask grouped",
    "float32-bias-everything": f"bias float32_bias {BACKWARD_EVERYTHING}",
    "bias-mask-everything": f"bias mask {MASKED_BACKWARD}",
}
BIAS_GRADIENTS = {
    "full": "",
    "everything": EVERYTHING,
    "split": "packed right",
    "float32": "float32_bias softcap",
    "strided": "strided_bias left",
    "mask": f"mask {MASKED}",
    "block-mask": "block_mask",
}
FEW_BIAS_GRADIENTS = {
    "d64-float32-strided": bias_gradient(64, "float32_bias strided_bias"),
    "d64-split": bias_gradient(64, split=True),
    "d128-mask-everything": bias_gradient(128, f"mask {MASKED}"),
    "d192-dv128-block-mask-float16": bias_gradient((192, 128), "block_mask", dtype="float16"),
    "d256-everything": bias_gradient(256, f"float32_bias {EVERYTHING}"),
}
_SIZES = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
ALL_BIAS_GRADIENTS = {
    f"d{d}-dv{d_v}-{name}": bias_gradient((d, d_v), words, split=name == "split")
    for (d, d_v), (name, words) in itertools.product(_SIZES, BIAS_GRADIENTS.items())
}
ALL_BACKWARD = {
    f"d{d}-dv{d_v}-{name}": backward((d, d_v), words)
    for (d, d_v), (name, words) in itertools.product(
        _SIZES, (BACKWARD_MASKS | BACKWARD_LISTS | BACKWARD_BIASES).items()
    )
} | {
    f"pair-d{d}-dv{d_v}-{mask}": pair((d, d_v), BACKWARD_MASKS[mask])
    for (d, d_v), mask in itertools.product(_SIZES[1:], BACKWARD_MASKS)
}
# Configurations whose kernels are compared with those of another target or dtype. All of them have all features that
# the kernels of a size know, in one configuration or another.
FEW_OF_BOTH_TARGETS = {
    "backward-d64": backward(64),
    "backward-d256": backward(256),
    "backward-pair-d192": pair(192),
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


def check_ptx(ptx: str, target: str) -> None:
    """No rule of the lint is broken, the emulation knows all that is in it, and it is for the right GPU."""
    assert not lint(ptx)
    assert len(translate(ptx).emulated) == 1
    assert f".target {target}" in ptx


def test_compiled_forward(compiled: ForwardConfig, tmp_path: Path) -> None:
    """No spills; products, weights, loads and stores as they should be; tensor memory is allocated and freed."""
    c, pair = compiled, compiled.ctas_a_tile == 2
    (sass,) = machine_code(c, tmp_path)["ForwardPair" if pair else "Forward"]
    ptx = code_for(c).ptx
    check_ptx(ptx, c.target)
    # Loops for each part: of four steps of scores, and of two each of most keys' output and of the others', which are
    # issued at two places.
    assert count(sass, "UTCHMMA") == 4 * 3 * c.q_parts
    assert count(sass, "UTCHMMA.2CTA") == (count(sass, "UTCHMMA") if pair else 0)
    assert count(sass, "UTCBAR.2CTA.MULTICAST") == (count(sass, "UTCBAR") if pair else 0)
    assert count(sass, "HGMMA") == 0
    assert count(sass, "USETMAXREG") == 3 + (c.q_parts == 1)
    # Nothing is added up in memory but how many tiles are taken, by each CTA of a pair for all its roles. The largest
    # logits are raised by a maximum or a minimum.
    assert not re.search(r"(?<!\.)\b(LDL|STL|ATOM)\b", sass)
    assert len(re.findall(r"(?<!\.)\b(?:RED|REDG)\b", sass)) == 2 * c.features.max_logits
    assert count(sass, "ATOMG") == c.ctas_a_tile
    # Scores are read for P in advance, for a maximum, and for P by that, and, 32 columns at a time, to be capped
    # and hidden, and to have a bias added. For the largest logit they are hidden and read ahead of that, too.
    # O is read to be rescaled, and to be stored.
    changes = 1 + c.features.softcap + c.features.bias
    searches = c.features.max_logits and c.features.caps_or_biases
    pieces = c.tile_n // 32
    assert count(sass, "LDTM") == pieces * (3 + changes + 2 * searches) + c.tile_dv // 32 + c.tile_dv // 16
    # Weights are stored at two places, in pieces of at most 32 columns, the last 16 apart, and zeros at a third, but
    # under a mask.
    P, zeros = -(-(c.tile_n // 2 - 16) // 32) + 1, 0 if c.features.listed else c.tile_n // 64
    assert count(sass, "STTM") == 2 * P + zeros + pieces * (changes + searches) + c.tile_dv // 32
    # Pairs of weights at two places, fused, so that bits never depend on the place; four more of a polynomial. Pairs of
    # scores and a bias.
    polynomials = c.tile_n // 2 // c.polynomial_every if c.polynomial_every else 0
    assert count(sass, "FFMA2") == (2 + c.features.bias) * c.tile_n // 2 + 8 * polynomials
    assert count(sass, "MUFU.EX2") >= 2 * (c.tile_n - 2 * polynomials)
    if c.features.bias and not searches:  # up to 64 words of a row are read before its scores are waited for
        words = min(64, c.tile_n // (1 if c.features.float32_bias else 2))
        load, num = ("LDG.E ", 1) if c.features.strided_bias else ("LDG.E.128 ", words // 4)
        begins = sass.index(load)
        ahead = sass[begins : sass.index("SYNCS.PHASECHK", begins)]
        assert ahead.count(load) >= num
        assert "LDTM" not in ahead
    # Under a mask the compiler may write some blocks of a pass apart.
    loads = ((c.q_parts + 1) * c.tile_d + c.tile_dv // c.ctas_a_tile) // 64
    assert loads <= count(sass, "UTMALDG") <= loads * (3 if c.features.listed else 1)
    assert count(sass, "UTMASTG") == (0 if c.features.wide else c.tile_dv // 64)
    assert count(ptx, "tcgen05.alloc") == count(ptx, "tcgen05.dealloc") == 1
    assert count(ptx, "tcgen05.relinquish_alloc_permit") == 1
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
    check_ptx(ptx, c.target)
    # Loops of four steps. One pass: S, dP and dV once, dK and dQ behind a step and behind a tile. Two: S in each.
    assert count(sass, "UTCHMMA") == 4 * (3 + 2 * (1 + c.parts_dQ) if c.num_passes == 1 else 5 + c.parts_dQ)
    assert count(sass, "UTCHMMA.2CTA") == (count(sass, "UTCHMMA") if pair else 0)
    assert count(sass, "HGMMA") == 0
    # What fills and what empties a stage; behind a tile dV and dK. A pair's producers are signalled apart; of two
    # passes that of K by the last dQ, and that of Q by each S.
    commits = 2 + (3 + 2 * (1 + c.parts_dQ) if c.num_passes == 1 else 3 + 4 + c.parts_dQ)
    assert count(sass, "UTCBAR") == commits + (4 - c.num_passes if pair else 0)
    assert count(sass, "UTCBAR.2CTA.MULTICAST") == (count(sass, "UTCBAR") if pair else 0)
    assert count(sass, "USETMAXREG") == 3
    # A thread has half of S and dP, 32 at a time. Scores are changed where they are to be capped, or to have a bias
    # added (which behind a softcap is added later), and hidden.
    queries = c.tile_m // COMPUTE_WARPGROUPS
    blocks = queries // 32
    changes = blocks * c.num_passes * (1 + (c.features.softcap or c.features.bias))
    # Of dV and of dK, the last of an odd number for whose piece it is.
    pieces = sum(-(-columns // (64 * COMPUTE_WARPGROUPS)) for columns in (c.tile_dv, c.tile_d))
    assert count(sass, "LDTM") == blocks * (c.num_passes + 1) + changes + 2 * pieces + c.parts_dQ * c.columns_dQ // 32
    assert count(sass, "STTM") == 2 * blocks + changes + (c.tile_d // 64 if c.holds_keys else 0)
    assert count(sass, "MUFU.EX2") == c.num_passes * c.tile_m // COMPUTE_WARPGROUPS
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
    assert count(sass, "UTMALDG") >= len(loads)  # the assembler may have a pair's first step apart
    assert count(sass, "UTMASTG") == (0 if c.features.wide else pieces)
    assert count(sass, "UBLKRED.G.S.ADD.F32") == c.pieces_dQ
    sums = pieces * 64 if c.features.grouped else 0  # of keys: from registers, four at a time
    assert count(sass, "REDG.E.ADD.F32x4") == sums // 4
    assert count(ptx, "tcgen05.alloc") == count(ptx, "tcgen05.dealloc") == 1
    # Of a bias of 16 bits an element a score, or one for all of a thread's, and its gradient.
    elements = c.num_passes * (1 if c.features.uniform_bias else queries) if c.features.bias else 0
    if not c.features.float32_bias:
        assert count(sass, "LDG.E.[SU]16") == elements
    assert count(sass, "STG.E.U16") == queries * c.features.dbias


def test_compiled_bias_gradient(compiled_bias_gradient: BiasGradientConfig, tmp_path: Path) -> None:
    """No spills but for a few; two products; nothing is added in memory; tensor memory is allocated and freed."""
    c = compiled_bias_gradient
    # Bytes: the kernel that makes a mask's tiles, at d = 256.
    spilled = 16 if c.tile_d == 256 and c.features.mask else 0
    sass, *adding_up = machine_code(c, tmp_path, spilled)["BiasGradient"]
    if "UTCHMMA" not in sass:
        (sass,), adding_up = adding_up, [sass]
    ptx = code_for(c).ptx
    check_ptx(ptx, c.target)
    assert len(adding_up) == c.split
    assert count(sass, "UTCHMMA") == 2 * 4  # loops of four steps, of S and dP
    assert count(sass, "UTCBAR") == 4  # each is there, and its operands are read
    assert count(sass, "USETMAXREG") == 3
    # The bias, S to add that, to be hidden by edges and for P, and dP; the bias is stored in a loop.
    blocks, more = c.keys // 32, c.features.softcap + c.features.listed
    assert count(sass, "LDTM") == blocks * (5 + more)
    assert count(sass, "STTM") == 1 + blocks * (2 + more)
    assert count(sass, "MUFU.EX2") == c.keys
    assert count(sass, "UTMALDG") == 2 * (c.tile_d + c.tile_dv) // 64
    assert not re.search(r"\b(RED|REDG|ATOM|ATOMG)\b", sass)


def assembly(ptx: str, instruction: str) -> Iterator[list[str]]:
    """The inline assembly that has an instruction, which stands nowhere else."""
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL)
    found = [block for block in blocks if f"{instruction}." in block]
    assert sum(block.count(f"{instruction}.") for block in found) == ptx.count(f"{instruction}.")
    for block in found:
        yield [line.strip() for line in block.strip().splitlines()]


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
