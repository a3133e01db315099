"""Which forward kernel serves a configuration."""

from flash_attn_cute.kernels.sm90.forward import ForwardSm90
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward_half_blocks import ForwardHalfBlocksSm90


def forward_kernel(config: ForwardConfig) -> ForwardSm90:
    """The forward kernel class of a configuration: steps of half blocks, or of whole ones."""
    return (ForwardHalfBlocksSm90 if config.features.half_blocks else ForwardSm90)(config)
