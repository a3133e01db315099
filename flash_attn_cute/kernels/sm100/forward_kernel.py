"""Which forward kernel serves a configuration."""

from flash_attn_cute.kernels.sm100.forward import ForwardSm100
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward_pair import ForwardPairSm100


def forward_kernel(config: ForwardConfig) -> ForwardSm100:
    """The forward kernel class of a configuration: one CTA a tile, or a pair of CTAs."""
    kernels = {1: ForwardSm100, 2: ForwardPairSm100}
    return kernels[config.ctas_a_tile](config)
