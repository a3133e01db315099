"""The schedule of Hopper's backward kernels: that of the one which serves a configuration. Needs no cutlass."""

from flash_attn_cute.kernels.schedule import Schedule
from flash_attn_cute.kernels.sm90.backward.cluster_schedule import cluster_schedule
from flash_attn_cute.kernels.sm90.backward.cta_schedule import cta_schedule
from flash_attn_cute.kernels.sm90.config import BackwardConfig, BackwardCtaConfig


def backward_schedule(config: BackwardConfig) -> Schedule:
    """Schedule of the main kernel of a configuration: a CTA's up to d = 128, else a cluster's."""
    return cta_schedule(config) if isinstance(config, BackwardCtaConfig) else cluster_schedule(config)
