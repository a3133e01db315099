"""Configurations of kernels that tests compile: features together, and those of Blackwell kernels by few words."""

import dataclasses
from typing import Any

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.backward.backward_config import backward_config as sm90_backward
from flash_attn_cute.kernels.sm90.backward.bias_gradient_config import bias_gradient_config as sm90_bias_gradient
from flash_attn_cute.kernels.sm90.column_sums_config import column_sums_config
from flash_attn_cute.kernels.sm90.forward_config import forward_config as sm90_forward
from flash_attn_cute.kernels.sm90.selection_config import selection_backward_config, selection_config
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig, backward_config
from flash_attn_cute.kernels.sm100.backward.bias_gradient_config import BiasGradientConfig, bias_gradient_config
from flash_attn_cute.kernels.sm100.config import TARGETS
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward_config import forward_config as config

EVERYTHING = dict.fromkeys(("packed", "seqused_q", "seqused_k", "left", "right", "softcap", "sink"), True)
MASKED = EVERYTHING | {"left": False, "right": False}  # what is made of a mask has the window in it
SELECTION_EVERYTHING = {name: True for name in EVERYTHING if name != "sink"} | {"dlse": True}  # backward
BACKWARD_EVERYTHING = EVERYTHING | {"dlse": True, "grouped": True, "deterministic": True}

B200, B300 = TARGETS.values()
LONG = 8192  # rows of a sequence, that gets pairs of CTAs, where there are any


def chosen(d: int, d_v: int | None = None, **options: Any) -> ForwardConfig:
    given = {name: options.pop(name) for name in ("queries", "target") if name in options}
    return config(options.pop("dtype", "bfloat16"), d, d_v or d, Features(**options), **given)


def forward_paired(c: ForwardConfig) -> ForwardConfig:
    """A configuration's twin for pairs of CTAs, also of features with which none are chosen."""
    chosen = config(c.dtype, c.tile_d, c.tile_dv, Features(), queries=LONG, target=c.target)
    assert chosen.ctas_a_tile == 2
    return dataclasses.replace(chosen, features=c.features)


def forward_pair(d: int, d_v: int, **options: Any) -> ForwardConfig:
    return forward_paired(chosen(d, d_v, **options))


def backward(d: int, d_v: int | None = None, **options: Any) -> BackwardConfig:
    given = {name: options.pop(name) for name in ("keys", "target") if name in options}
    return backward_config(options.pop("dtype", "bfloat16"), d, d_v or d, Features(**options), **given)


def paired(c: BackwardConfig) -> BackwardConfig:
    """A configuration's twin for pairs of CTAs, also of features with which none are chosen."""
    chosen = backward(c.tile_d, c.tile_dv, keys=LONG)
    assert chosen.ctas_a_tile == 2
    return dataclasses.replace(chosen, features=c.features, dtype=c.dtype, target=c.target)


def pair(d: int = 128, d_v: int = 128, **options: Any) -> BackwardConfig:
    return paired(backward(d, d_v, **options))


def bias_gradient(d: int, d_v: int | None = None, **options: Any) -> BiasGradientConfig:
    given = {name: options.pop(name) for name in ("split", "target") if name in options}
    return bias_gradient_config(options.pop("dtype", "bfloat16"), d, d_v or d, Features(bias=True, **options), **given)


# Configurations, one for each way in which the schedule of a main kernel (``kernels.schedule``) differs. Most are among
# those whose machine code CI looks at, or that it interprets, too.
DESCRIBED: dict[str, Any] = {
    "sm90-forward": sm90_forward("float16", 128, 128, Features()),
    "sm90-forward-causal": sm90_forward("bfloat16", 128, 128, Features(right=True)),
    "sm90-forward-bias": sm90_forward(
        "bfloat16", 64, 64, Features(bias=True, paired_bias=True, right=True, max_logits=True)
    ),
    "sm90-forward-tiled-bias": sm90_forward("bfloat16", 64, 64, Features(bias=True, tiled_bias=True)),
    "sm90-forward-tiled-bias-causal": sm90_forward(
        "bfloat16", 128, 128, Features(bias=True, paired_bias=True, tiled_bias=True, right=True, softcap=True)
    ),
    "sm90-forward-bias-row": sm90_forward(
        "bfloat16", 128, 128, Features(bias=True, uniform_bias=True, float32_bias=True)
    ),
    "sm90-forward-bias-block-mask": sm90_forward(
        "bfloat16", 256, 256, Features(bias=True, block_mask=True, float32_bias=True, softcap=True)
    ),
    "sm90-forward-half-blocks": sm90_forward("bfloat16", 128, 128, Features(block_mask=True, half_blocks=True)),
    "sm90-forward-group": sm90_forward("bfloat16", 128, 128, Features(**EVERYTHING), group=8),
    "sm90-backward": sm90_backward("bfloat16", 128, 128, Features()),
    "sm90-backward-tiled-bias": sm90_backward("bfloat16", 128, 128, Features(bias=True, tiled_bias=True, dbias=True)),
    "sm90-backward-bias": sm90_backward(
        "bfloat16", 64, 64, Features(bias=True, dbias=True, dlse=True, deterministic=True)
    ),
    "sm90-backward-one-k": sm90_backward("bfloat16", 128, 128, Features(bias=True, grouped=True)),
    "sm90-backward-transposed": sm90_backward("bfloat16", 128, 128, Features(grouped=True, dlse=True), keys=LONG),
    "sm90-backward-halves-dV": sm90_backward("bfloat16", 64, 64, Features(dlse=True), keys=LONG),
    "sm90-backward-ordered": sm90_backward("bfloat16", 128, 128, Features(**BACKWARD_EVERYTHING)),
    "sm90-backward-fixed-point": sm90_backward("bfloat16", 64, 64, Features(block_mask=True, deterministic=True)),
    "sm90-backward-half-blocks": sm90_backward("bfloat16", 128, 128, Features(block_mask=True, half_columns=True)),
    "sm90-backward-half-blocks-fixed-point": sm90_backward(
        "bfloat16", 64, 64, Features(block_mask=True, half_columns=True, deterministic=True)
    ),
    "sm90-backward-stored-ds": sm90_backward(
        "bfloat16", 128, 128, Features(block_mask=True, half_columns=True, stored_ds=True)
    ),
    "sm90-backward-stored-ds-wide": sm90_backward(
        "bfloat16", 128, 128, Features(block_mask=True, half_columns=True, stored_ds=True, wide=True, dlse=True)
    ),
    "sm90-backward-cluster": sm90_backward("bfloat16", 256, 256, Features()),
    "sm90-backward-cluster-ordered": sm90_backward(
        "bfloat16", 192, 128, Features(packed=True, seqused_q=True, seqused_k=True, dlse=True, deterministic=True)
    ),
    "sm90-bias-gradient": sm90_bias_gradient(
        "bfloat16", 64, 64, Features(bias=True, mask=True, packed=True, seqused_q=True, seqused_k=True)
    ),
    "sm90-bias-gradient-strided": sm90_bias_gradient("float16", 256, 256, Features(bias=True, strided_bias=True)),
    "sm90-selection": selection_config("bfloat16", 128, 128, Features(right=True), group=16),
    "sm90-selection-two-warpgroups": selection_config("bfloat16", 128, 128, Features(), group=2, block=128),
    "sm90-selection-key-bits": selection_config("bfloat16", 128, 128, Features(right=True), group=16, block=16),
    "sm90-selection-wide": selection_config("bfloat16", 256, 256, Features(right=True), group=16),
    "sm90-selection-backward": selection_backward_config("bfloat16", 128, 128, Features(right=True), group=16),
    "sm90-selection-backward-wide": selection_backward_config(
        "float16", 256, 256, Features(**SELECTION_EVERYTHING), group=16
    ),
    "sm90-column-sums": column_sums_config("bfloat16", 128, 128, Features(right=True)),
    "sm90-column-sums-wide": column_sums_config("bfloat16", 256, 256, Features(right=True)),
    "sm100-forward": chosen(128),
    "sm100-forward-one-part": chosen(256, target=B300, **EVERYTHING),
    "sm100-forward-O-in-Q": chosen(192, 128, packed=True, right=True),
    "sm100-forward-block-mask": chosen(128, block_mask=True),
    "sm100-forward-pair": forward_pair(192, 128, dtype="float16", **EVERYTHING),
    "sm100-forward-pair-one-part": forward_pair(256, 256),
    "sm100-backward": backward(64, packed=True, right=True),
    "sm100-backward-block-mask-bias": backward(128, block_mask=True, bias=True, dbias=True, dlse=True, grouped=True),
    "sm100-backward-d192-dv128": backward(192, 128),
    "sm100-backward-two-pass": backward(256, **BACKWARD_EVERYTHING),
    "sm100-backward-pair": pair(right=True, dlse=True, grouped=True),
    "sm100-backward-pair-d192-dv128": pair(192),
    "sm100-backward-pair-two-pass-d192": pair(192, 192),
    "sm100-backward-pair-two-pass": pair(256, 256, **BACKWARD_EVERYTHING),
    "sm100-bias-gradient": bias_gradient(128, mask=True, **MASKED),
    "sm100-bias-gradient-one-stage": bias_gradient(256, float32_bias=True, **EVERYTHING),
}
