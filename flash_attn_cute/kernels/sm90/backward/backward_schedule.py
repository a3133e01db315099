"""The schedule of Hopper's backward kernels: that of the one which serves a configuration. Needs no cutlass."""

from flash_attn_cute.kernels.schedule import Schedule
from flash_attn_cute.kernels.sm90.backward.backward_config import (
    BackwardConfig,
    BackwardCtaConfig,
    BackwardHalfBlocksConfig,
)
from flash_attn_cute.kernels.sm90.backward.cluster_schedule import cluster_schedule
from flash_attn_cute.kernels.sm90.backward.cta_schedule import cta_schedule
from flash_attn_cute.kernels.sm90.backward.half_blocks_schedule import half_blocks_schedule


def backward_schedule(config: BackwardConfig) -> Schedule:
    """Schedule of the main kernel of a configuration: up to d = 128 that of a CTA, else of a cluster."""
    if isinstance(config, BackwardHalfBlocksConfig):
        return half_blocks_schedule(config)
    return cta_schedule(config) if isinstance(config, BackwardCtaConfig) else cluster_schedule(config)
