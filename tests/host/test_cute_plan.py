"""Launches of calls, planned from shapes alone: no GPU, no compiler."""

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch

from flash_attn_cute.backends.cute.plan import (
    _CELLS,
    ScoreLayout,
    Shapes,
    _splits,
    features_of,
    most_listed,
    plan_backward,
    plan_forward,
    rounded_up,
)
from flash_attn_cute.kernels.backward import CELL_NUMBERS, PassSizes
from flash_attn_cute.kernels.features import Case, Features, words
from flash_attn_cute.kernels.registry import ARCHITECTURES, pass_of
from flash_attn_cute.kernels.sm90.backward.backward_config import (
    BackwardCtaConfig,
    BackwardHalfBlocksConfig,
    BackwardStoredDSConfig,
)
from flash_attn_cute.kernels.sm90.config import HEAD_DIMS
from flash_attn_cute.kernels.sm90.forward_schedule import forward_schedule
from flash_attn_cute.problem.block_tables import ANY_NUMBER
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from flash_attn_cute.sparsity.dq_order.contention_model import machine_of
from tests.lib.configurations import by_words, sm90_backward, sm90_bias_gradient, sm90_forward
from tests.lib.specs import DENSE, PACKED, spec_of

SM90 = ARCHITECTURES["sm90"]


@pytest.mark.parametrize("word", words())
def test_features_are_printed_and_parsed(word: str) -> None:
    """By the same words, each of which changes one flag."""
    features = Features.parse([word])
    assert Features.format(dataclasses.asdict(features)) == word
    changed = [f.name for f in dataclasses.fields(Features) if getattr(features, f.name) != f.default]
    assert changed == [word.removeprefix("no_")]


def test_unknown_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"features: expected some of packed, .*, got softcup"):
        Features.parse(["softcap", "softcup"])


def test_a_pass_forgets_what_it_does_not_read() -> None:
    everything = Features(**dict.fromkeys((f.name for f in dataclasses.fields(Features)), True))
    forward, backward = (everything.of_pass(direction) for direction in ("forward", "backward"))
    names = "half_columns stored_ds dbias dbias_of_scores dbias_of_keys dlse grouped deterministic"
    only_backward = dict.fromkeys(names.split(), False)
    assert forward == dataclasses.replace(everything, **only_backward)
    only_forward = {"sink": False, "uniform_mask": False, "max_logits": False, "half_blocks": False}
    assert backward == dataclasses.replace(everything, **only_forward)


def test_cases() -> None:
    case = Case("left softcap", without="packed")
    assert case.fits(Features(left=True, softcap=True, right=True))
    assert not case.fits(Features(left=True))
    assert not case.fits(Features(left=True, softcap=True, packed=True))
    with pytest.raises(AttributeError):
        Case("lefft").fits(Features())


def test_a_bias_by_tma() -> None:
    """Hopper's forward kernels load it by TMA, but not where a tile's rows are heads in turn; Blackwell's never do."""
    words = "bias tiled_bias paired_bias"
    for d in HEAD_DIMS:
        tiled, grouped = (sm90_forward(d, words, group=group) for group in (1, 4))
        assert (tiled.features.tiled_bias, tiled.bias_pitch) == (True, 0)
        assert not grouped.features.tiled_bias
        assert grouped.bias_pitch > 0
        assert forward_schedule(tiled).num_bytes <= 227 * 1024
        assert forward_schedule(tiled).pipeline("bias").num_bytes == 2 * 64 * tiled.tile_n
    for name in ("forward", "bias_gradient"):
        configure = by_words(ARCHITECTURES["sm100"].passes[name].configure)
        assert configure(128, words) == configure(128, f"{words} -tiled_bias")


def test_features_of_a_call() -> None:
    assert features_of(spec_of(nheads_k=8), DENSE) == Features()
    asked = spec_of(
        has_seqused_q=True,
        has_sink=True,
        window_left=3,
        window_right=0,
        softcap=1.0,
        deterministic=True,
        zero_padding=False,
    )
    words = "packed seqused_q left right softcap sink dlse grouped deterministic no_zero_padding"
    assert features_of(asked, PACKED._replace(has_dlse=True)) == Features.parse(words.split())


def test_few_queries_share_a_tile() -> None:
    """Up to 64 queries of a sequence, the heads of a group do; lengths beyond that change no configuration."""
    configs = [plan_forward(SM90, spec_of(), DENSE._replace(max_seqlen_q=n), 132).config for n in (64, 65, 300)]
    assert [config.group for config in configs] == [4, 1, 1]
    assert plan_forward(SM90, spec_of(nheads=6), DENSE._replace(max_seqlen_q=1), 132).config.group == 1  # 3 do not fit


@pytest.mark.parametrize(
    ("q_shape", "nheads_k", "deterministic", "expected"),
    [
        ((9000, 32, 128), 32, False, (5, 3, 1)),
        ((9000, 32, 128), 32, True, (5, 5, 1)),
        ((3, 3000, 32, 128), 32, False, (5, 16, 1)),
        ((3, 3000, 32, 128), 32, True, (8, 11, 1)),
        # All of the first heads of groups together, then all of the second ones.
        ((9000, 24, 128), 8, False, (5, 0, 1)),
        ((9000, 32, 128), 8, False, (2, 1, 2)),
        ((9000, 32, 128), 8, True, (2, 3, 2)),
        ((3, 3000, 32, 128), 8, False, (2, 21, 2)),
        ((3, 3000, 32, 128), 8, True, (2, 23, 2)),
        ((1, 3000, 8, 128), 2, True, (2, 1, 2)),
        ((9000, 32, 256), 32, False, (2, 13, 1)),
        ((9000, 32, 256), 32, True, (2, 15, 1)),
        ((3, 3000, 32, 256), 8, False, (2, 45, 1)),
    ],
    ids=str,
)
def test_backward_sections(
    q_shape: tuple[int, ...], nheads_k: int, deterministic: bool, expected: tuple[int, int, int]
) -> None:
    """The cache has room for five heads of this length at a time, or for two of d = 256, or if a tile sums over two.

    In order as many of a dense batch run together as make it two and a half steps from tile to tile: eight. In no order
    those of the last section are more.
    """
    q = torch.empty(q_shape, dtype=torch.bfloat16, device="meta")
    k = q[..., :nheads_k, :]
    packed = len(q_shape) == 3
    cu = torch.empty(4, dtype=torch.int32, device="meta") if packed else None
    inputs = AttentionInputs(q, k, k, cu, cu, None, None, None, None, None, 3000, 3000)
    spec = AttentionSpec.of(inputs, Options(None, None, 0, 0.0, deterministic, True))
    shapes = Shapes(q.shape, k.shape, num_sequences=3 if packed else 0, max_seqlen_q=3000)
    numbers = plan_backward(SM90, spec, shapes, num_sms=132).numbers
    assert (numbers.heads_in_cache, numbers.sections, numbers.heads_a_tile) == expected


# Whether it is deterministic, and zeroes its sums of dQ; queries of a block.
ORDERED, ADDED = (True, False, 64), (False, True, 64)


@pytest.mark.parametrize(
    ("words", "keys", "expected"),
    [
        ("right", 512, ORDERED),
        ("right", 513, ADDED),
        ("right", 0, ADDED),
        ("right deterministic", 8192, ORDERED),
        ("left", 8192, ORDERED),
        ("bias", 8192, ORDERED),
        ("bias tiled_bias", 8192, ORDERED),
        ("bias dbias", 8192, ORDERED),
        ("bias tiled_bias dbias", 8192, ADDED),
        ("bias tiled_bias dbias_of_scores", 8192, ADDED),
        ("bias tiled_bias dbias", 512, ORDERED),
        ("bias tiled_bias dbias right", 8192, ADDED),
        ("bias tiled_bias dbias deterministic", 8192, ORDERED),
        ("bias uniform_bias dbias_of_keys", 8192, ORDERED),
        ("block_mask", 8192, (False, False, 64)),
        ("", 8191, ADDED),
        ("", 8192, (False, True, 80)),
        ("deterministic", 8192, ORDERED),
        ("grouped", 8191, ADDED),
        ("grouped", 8192, (False, True, 80)),
        ("grouped deterministic", 4095, ORDERED),
        ("grouped deterministic", 4096, (True, False, 80)),
        ("grouped deterministic right", 8192, ORDERED),
        ("grouped right", 8192, ADDED),
        ("packed", 8192, ADDED),
    ],
    ids=str,
)
def test_order_and_blocks_of_a_backward_pass(words: str, keys: int, expected: tuple[bool, bool, int]) -> None:
    """No call gets an order that costs time without asking for it."""
    config = sm90_backward(128, words, keys=keys)
    assert isinstance(config, BackwardCtaConfig)
    assert (config.features.deterministic, config.zeroes_sums, config.tile_m) == expected


@pytest.mark.parametrize(
    ("words", "keys", "halves_dV"),
    [
        ("", 512, True),
        ("right", 8192, False),
        ("grouped", 8192, False),
        ("packed", 8192, False),
        ("deterministic", 8192, True),
    ],
    ids=str,
)
def test_halves_of_dV_in_a_backward_pass(words: str, keys: int, halves_dV: bool) -> None:
    """Full masks at d = 64 alone; at d = 128 none."""
    config, wide = (sm90_backward(d, words, keys=keys) for d in (64, 128))
    assert isinstance(config, BackwardCtaConfig)
    assert isinstance(wide, BackwardCtaConfig)
    assert (config.halves_dV, wide.halves_dV) == (halves_dV, False)


@pytest.mark.parametrize("seqlen", [1, 64, 500, 2048, 4096, 8192, 16384, 32768, 131072])
def test_the_model_of_launch_orders_has_as_many_heads_in_flight(seqlen: int) -> None:
    """Also under a block mask whose passes are ordered; other masks' sums, in fixed point, need no order."""
    shapes = Shapes((64, seqlen, 16, 128), (64, seqlen, 16, 128), num_sequences=0, max_seqlen_q=seqlen)
    for is_masked in (True, False):
        spec = spec_of(nheads=16, nheads_k=16, deterministic=True, has_block_mask=is_masked, low_contention=is_masked)
        planned = plan_backward(SM90, spec, shapes, 132).numbers
        assert machine_of(seqlen).section == min(planned.heads_in_cache, 132)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shapes", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("nheads", [2, 4, 8])
def test_backward_workspace(nheads: int, shapes: Shapes, head_dim: int) -> None:
    """It begins with lse and delta and has room for all parts, for sums of keys if a tile leaves some to others."""
    spec = spec_of(nheads=nheads, head_dim=head_dim, head_dim_v=head_dim, packed=shapes.packed, deterministic=True)
    shapes = shapes._replace(q=(*shapes.q[:-2], nheads, head_dim), k=(*shapes.k[:-2], 2, head_dim))
    planned = plan_backward(SM90, spec, shapes, 132)
    blocks_q, blocks_k = planned.numbers.num_m_blocks, planned.numbers.num_n_blocks
    parts = planned.config.parts(PassSizes(planned.numbers, shapes.q[0], nheads, 2))
    assert next(iter(parts.items())) == ("mStats", (2, nheads, blocks_q, planned.config.tile_m))
    used = {name: 4 * math.prod(shape) for name, shape in parts.items()}
    assert ("mdKVaccum" in used) == (nheads > 2)
    if planned.numbers.heads_a_tile * 2 == nheads:
        used.pop("mdKVaccum", None)
    assert sum(used.values()) <= planned.workspace_size < sum(used.values()) + 128 * len(used)
    # Every sequence has blocks of its own.
    for blocks, rows, lengths in (
        (blocks_q, planned.config.tile_m, (1, 1, 598) if shapes.packed else (300, 300)),
        (blocks_k, planned.config.tile_n, (1, 1, 798) if shapes.packed else (400, 400)),
    ):
        assert blocks >= sum(-(-length // rows) for length in lengths)


@pytest.mark.parametrize(
    ("name", "head_dim", "kind"),
    [
        ("sm90", 128, BackwardStoredDSConfig),
        ("sm90", 64, BackwardHalfBlocksConfig),
        ("sm90", 192, None),
        ("sm100", 128, None),
    ],
)
def test_who_stores_dS(name: str, head_dim: int, kind: type | None) -> None:
    """Kernels of blocks of 64 keys; None: those that there are without such a mask."""
    options = {"nheads_k": 8, "head_dim": head_dim, "head_dim_v": head_dim, "has_block_mask": True}
    architecture = ARCHITECTURES[name].on(next(iter(ARCHITECTURES[name].targets))) if name == "sm100" else SM90
    shapes = DENSE._replace(k=(2, 400, 8, 128))
    spec = spec_of(**options, half_blocks=True, most_halves=35)
    listed = most_listed(architecture, spec, 2, (1, 1, 400, 400), made_of_64=True)
    assert listed == (0 if kind is None else ANY_NUMBER)
    of_halves, without = (
        plan_backward(architecture, spec, shapes._replace(scores=ScoreLayout(half_entries=n)), 132).config
        for n in (35, 0)
    )
    assert type(of_halves) is (kind or type(without))
    assert (of_halves == without) == (kind is None)


@pytest.mark.parametrize(
    ("options", "sizes", "listed"),
    [
        ({}, (1, 8, 4096, 4096), 3276),  # four tenths of all blocks
        ({}, (1, 8, 4096, 4000), 3276),
        ({"deterministic": False}, (1, 8, 4096, 4096), 0),
        ({"low_contention": True}, (1, 8, 4096, 4096), 0),
        ({"head_dim": 64, "head_dim_v": 64}, (1, 8, 4096, 4096), 0),
        ({"head_dim": 192, "head_dim_v": 192}, (1, 8, 4096, 4096), 0),
        ({"has_bias": True}, (1, 8, 4096, 4096), 0),
        ({"packed": True}, (1, 8, 4096, 4096), 0),
        ({"window_right": 0}, (1, 8, 4096, 4096), 0),
        ({"half_blocks": True}, (1, 8, 4096, 4096), 0),  # of blocks of 64 queries and 128 keys
        ({"has_block_mask": False, "selection_block": 64}, (1, 8, 4096, 4096), 0),
        ({}, (1, 1, 2**16, 2**16), 47662),  # dS of a list has no room: half a chunk
        ({"nheads_k": 4}, (1, 1, 2**16, 2**16), 23831),  # of two heads a tile
        ({}, (2, 8, 2**16, 2**16), 95325),  # or all of it in a chunk
    ],
)
def test_deterministic_passes_store_dS_of_larger_blocks(
    options: dict[str, Any], sizes: tuple[int, int, int, int], listed: int
) -> None:
    """Where dQ would be summed in fixed point, up to so many blocks of 128; those have room."""
    given: dict[str, Any] = {"nheads_k": 8, "head_dim": 128, "head_dim_v": 128, "has_block_mask": True}
    most_halves = -(-sizes[2] // 64) * -(-sizes[3] // 64)
    spec = spec_of(nheads=8, most_halves=most_halves, **given | {"deterministic": True} | options)
    assert most_listed(SM90, spec, 2, sizes, made_of_64=False) == listed
    if listed:
        layout = ScoreLayout(block_lists=sizes[:2], half_entries=rounded_up(4 * listed))
        heads = spec.nheads_k
        shapes = Shapes((2, sizes[2], 8, 128), (2, sizes[3], heads, 128), 0, max_seqlen_q=sizes[2], scores=layout)
        assert type(plan_backward(SM90, spec, shapes, 132).config) is BackwardStoredDSConfig
        assert type(plan_backward(SM90, spec, shapes._replace(scores=ScoreLayout()), 132).config) is BackwardCtaConfig


@pytest.mark.parametrize("others", ["", "softcap", "grouped"])
def test_passes_that_store_dS_are_deterministic(others: str) -> None:
    """Asked for or not, by one kernel, but for dK and dV of grouped heads."""
    asked, default = (
        sm90_backward(128, f"block_mask half_columns stored_ds {words}")
        for words in (f"deterministic {others}", others)
    )
    assert isinstance(asked, BackwardStoredDSConfig)
    assert asked.features.deterministic
    assert (asked == default) == (others != "grouped")


def test_places_in_dS_take_32_bits() -> None:
    """Kernels multiply the number of a cell by the numbers in one (of 4 bytes) in 32 bits."""
    assert _CELLS * CELL_NUMBERS < 2**31


@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_heads_have_room(seed: int) -> None:
    """Whatever heads see, cells numbered as ``ds_cells`` does are within the workspace, which is bounded."""
    draw = random.Random(seed)
    batch, nheads_k, group = draw.choice([1, 2, 3]), draw.choice([1, 4, 16]), draw.choice([1, 2, 8])
    blocks = draw.choice([64, 128, 256, 300])
    nheads, of_head = nheads_k * group, draw.randint(1, blocks * blocks)
    seen = [draw.choice([0, of_head, draw.randint(0, of_head)]) for _ in range(batch * nheads)]
    exact = draw.choice([True, False])
    entries = max(1, sum(seen) if exact else len(seen) * of_head)
    layout = ScoreLayout(block_lists=(batch, nheads), half_entries=entries)
    q, k = ((batch, 64 * blocks, heads, 128) for heads in (nheads, nheads_k))
    shapes = Shapes(q, k, num_sequences=0, max_seqlen_q=64 * blocks, scores=layout)
    spec = spec_of(nheads=nheads, nheads_k=nheads_k, has_block_mask=True, half_blocks=True, most_halves=of_head)
    planned = plan_backward(SM90, spec, shapes, 132)
    n, together = planned.numbers, 2 if group > 1 else 1
    if not isinstance(planned.config, BackwardStoredDSConfig):
        assert entries > 3 << 17
        assert 2 * together * of_head > 3 << 17
        return
    cells = planned.config.parts(PassSizes(n, batch, nheads, nheads_k))["mdS"][0]
    assert cells <= 3 << 17
    of_tiles = [sum(seen[i : i + together]) for i in range(0, len(seen), together)]
    starts = [0, *itertools.accumulate(of_tiles)]
    for i, num in enumerate(of_tiles):
        first = starts[i // n.heads_in_cache * n.heads_in_cache]
        chunk = min(first // n.cells_a_chunk, n.num_chunks - 1)
        assert 0 <= starts[i] - chunk * n.cells_a_chunk <= cells - num
    if n.num_chunks > 1:  # tiles of a chunk follow each other
        assert n.sections == len(of_tiles) // n.heads_in_cache


@pytest.mark.parametrize(
    "flags",
    ["mask", "bias", "mask bias", "mask bias float32_bias", "bias strided_bias", "bias uniform_bias float32_bias"],
)
def test_mask_and_bias_fit_shared_memory(flags: str) -> None:
    """Every pair of head dimensions fits; a launch that asks for more than a CTA can have fails when it is made."""
    for d, d_v in itertools.product(HEAD_DIMS, repeat=2):
        for others in ("", "right", "left softcap packed"):
            given: tuple[tuple[int, int], str] = (d, d_v), f"{flags} {others}"
            forward = sm90_forward(*given)
            assert forward.tile_n % 16 == 0
            configs: list[Any] = [forward, sm90_backward(*given)]
            if "bias" in flags:
                configs.append(sm90_bias_gradient(*given))
            for config in configs:
                assert pass_of(config).schedule(config).num_bytes <= 227 * 1024, config


@pytest.mark.parametrize(
    ("owners", "pieces", "splits"),
    [
        (64, 512, 2),
        (16, 512, 8),
        (20, 64, 13),
        (64, 3, 1),
        (128, 512, 1),
        (1024, 512, 1),
        (1, 64, 16),  # a single tile, shared by all: so that each has no fewer pieces than there are sums
        (1, 4096, 61),
        (1, 65536, 129),
    ],
)
def test_ctas_that_share_a_tile_of_a_gradient(owners: int, pieces: int, splits: int) -> None:
    """The CTAs fill the SMs, of which each gets two at most."""
    assert _splits(owners, pieces, 132) == splits
