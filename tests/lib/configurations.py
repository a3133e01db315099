"""Configurations of kernels that tests compile, by few words: sizes and features."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90 import column_sums_config, forward_config, selection_config
from flash_attn_cute.kernels.sm90.backward import backward_config, bias_gradient_config
from flash_attn_cute.kernels.sm100 import forward_config as sm100_forward_config
from flash_attn_cute.kernels.sm100.backward import backward_config as sm100_backward_config
from flash_attn_cute.kernels.sm100.backward import bias_gradient_config as sm100_bias_gradient_config
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.config import TARGETS
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig

Config = TypeVar("Config")
Size = int | tuple[int, int]

EVERYTHING = "packed seqused_q seqused_k left right softcap sink"
MASKED = f"{EVERYTHING} -left -right"  # what is made of a mask has the window in it
SELECTION_EVERYTHING = f"{EVERYTHING} -sink dlse"  # backward
BACKWARD_EVERYTHING = f"{EVERYTHING} dlse grouped deterministic"

B200, B300 = TARGETS.values()
LONG = 8192  # rows of a sequence, that gets pairs of CTAs, where there are any


def features(words: str) -> Features:
    """Features by their names; ``-name`` takes back an earlier one."""
    chosen: list[str] = []
    for word in words.split():
        chosen = [x for x in chosen if x != word[1:]] if word.startswith("-") else [*chosen, word]
    return Features.parse(chosen)


def by_words(make: Callable[..., Config], always: str = "") -> Callable[..., Config]:
    """The maker of configurations ``make``, with a head dimension (d, or d and d_v) and features as words."""

    def made(size: Size, words: str = "", *, dtype: str = "bfloat16", **others: Any) -> Config:
        d, d_v = size if isinstance(size, tuple) else (size, size)
        return make(dtype, d, d_v, features(f"{always} {words}"), **others)

    return made


sm90_forward = by_words(forward_config.forward_config)
sm90_backward = by_words(backward_config.backward_config)
sm90_bias_gradient = by_words(bias_gradient_config.bias_gradient_config, "bias")
sm90_selection = by_words(selection_config.selection_config)
sm90_selection_backward = by_words(selection_config.selection_backward_config)
sm90_column_sums = by_words(column_sums_config.column_sums_config)
chosen = by_words(sm100_forward_config.forward_config)
backward = by_words(sm100_backward_config.backward_config)
bias_gradient = by_words(sm100_bias_gradient_config.bias_gradient_config, "bias")


def forward_paired(c: ForwardConfig) -> ForwardConfig:
    """A configuration's twin for pairs of CTAs, also of features with which none are chosen."""
    pair = chosen((c.tile_d, c.tile_dv), dtype=c.dtype, queries=LONG, target=c.target)
    assert pair.ctas_a_tile == 2
    return dataclasses.replace(pair, features=c.features)


def paired(c: BackwardConfig) -> BackwardConfig:
    """A configuration's twin for pairs of CTAs, also of features with which none are chosen."""
    pair = backward((c.tile_d, c.tile_dv), keys=LONG)
    assert pair.ctas_a_tile == 2
    return dataclasses.replace(pair, features=c.features, dtype=c.dtype, target=c.target)


def forward_pair(size: Size, words: str = "", **others: Any) -> ForwardConfig:
    return forward_paired(chosen(size, words, **others))


def pair(size: Size, words: str = "", **others: Any) -> BackwardConfig:
    return paired(backward(size, words, **others))


# Configurations, one for each way in which the schedule of a main kernel (``kernels.schedule``) differs. Most are among
# those whose machine code CI looks at, or that it interprets, too.
DESCRIBED: dict[str, Any] = {
    "sm90-forward": sm90_forward(128, dtype="float16"),
    "sm90-forward-causal": sm90_forward(128, "right"),
    "sm90-forward-bias": sm90_forward(64, "bias paired_bias right max_logits"),
    "sm90-forward-tiled-bias": sm90_forward(64, "bias tiled_bias"),
    "sm90-forward-tiled-bias-causal": sm90_forward(128, "bias paired_bias tiled_bias right softcap"),
    "sm90-forward-bias-row": sm90_forward(128, "bias uniform_bias float32_bias"),
    "sm90-forward-bias-block-mask": sm90_forward(256, "bias block_mask float32_bias softcap"),
    "sm90-forward-half-blocks": sm90_forward(128, "block_mask half_blocks"),
    "sm90-forward-group": sm90_forward(128, EVERYTHING, group=8),
    "sm90-backward": sm90_backward(128),
    "sm90-backward-tiled-bias": sm90_backward(128, "bias tiled_bias dbias"),
    "sm90-backward-bias": sm90_backward(64, "bias dbias dlse deterministic"),
    "sm90-backward-one-k": sm90_backward(128, "bias grouped"),
    "sm90-backward-transposed": sm90_backward(128, "grouped dlse", keys=LONG),
    "sm90-backward-halves-dV": sm90_backward(64, "dlse", keys=LONG),
    "sm90-backward-ordered": sm90_backward(128, BACKWARD_EVERYTHING),
    "sm90-backward-fixed-point": sm90_backward(64, "block_mask deterministic"),
    "sm90-backward-half-blocks": sm90_backward(128, "block_mask half_columns"),
    "sm90-backward-half-blocks-fixed-point": sm90_backward(64, "block_mask half_columns deterministic"),
    "sm90-backward-stored-ds": sm90_backward(128, "block_mask half_columns stored_ds"),
    "sm90-backward-stored-ds-wide": sm90_backward(128, "block_mask half_columns stored_ds wide dlse"),
    "sm90-backward-cluster": sm90_backward(256),
    "sm90-backward-cluster-ordered": sm90_backward((192, 128), "packed seqused_q seqused_k dlse deterministic"),
    "sm90-bias-gradient": sm90_bias_gradient(64, "mask packed seqused_q seqused_k"),
    "sm90-bias-gradient-strided": sm90_bias_gradient(256, "strided_bias", dtype="float16"),
    "sm90-selection": sm90_selection(128, "right", group=16),
    "sm90-selection-two-warpgroups": sm90_selection(128, group=2, block=128),
    "sm90-selection-key-bits": sm90_selection(128, "right", group=16, block=16),
    "sm90-selection-wide": sm90_selection(256, "right", group=16),
    "sm90-selection-backward": sm90_selection_backward(128, "right", group=16),
    "sm90-selection-backward-wide": sm90_selection_backward(256, SELECTION_EVERYTHING, dtype="float16", group=16),
    "sm90-column-sums": sm90_column_sums(128, "right"),
    "sm90-column-sums-wide": sm90_column_sums(256, "right"),
    "sm100-forward": chosen(128),
    "sm100-forward-one-part": chosen(256, EVERYTHING, target=B300),
    "sm100-forward-O-in-Q": chosen((192, 128), "packed right"),
    "sm100-forward-block-mask": chosen(128, "block_mask"),
    "sm100-forward-pair": forward_pair((192, 128), EVERYTHING, dtype="float16"),
    "sm100-forward-pair-one-part": forward_pair(256),
    "sm100-backward": backward(64, "packed right"),
    "sm100-backward-block-mask-bias": backward(128, "block_mask bias dbias dlse grouped"),
    "sm100-backward-d192-dv128": backward((192, 128)),
    "sm100-backward-two-pass": backward(256, BACKWARD_EVERYTHING),
    "sm100-backward-pair": pair(128, "right dlse grouped"),
    "sm100-backward-pair-d192-dv128": pair((192, 128)),
    "sm100-backward-pair-two-pass-d192": pair(192),
    "sm100-backward-pair-two-pass": pair(256, BACKWARD_EVERYTHING),
    "sm100-bias-gradient": bias_gradient(128, f"mask {MASKED}"),
    "sm100-bias-gradient-one-stage": bias_gradient(256, f"float32_bias {EVERYTHING}"),
}
