"""Specifications and shapes of calls that are planned without tensors."""

from typing import Any

import torch

from flash_attn_cute.backends.cute.plan import Shapes
from flash_attn_cute.problem.spec import AttentionSpec


def spec_of(**changes: Any) -> AttentionSpec:
    spec = AttentionSpec(
        dtype=torch.bfloat16,
        nheads=8,
        nheads_k=2,
        head_dim=128,
        head_dim_v=128,
        packed=False,
        has_seqused_q=False,
        has_seqused_k=False,
        has_sink=False,
        has_mask=False,
        has_bias=False,
        has_block_mask=False,
        softmax_scale=1.0,
        window_left=None,
        window_right=None,
        softcap=0.0,
        deterministic=False,
        zero_padding=True,
    )
    return spec._replace(**changes)


DENSE = Shapes((2, 300, 8, 128), (2, 400, 2, 128), num_sequences=0, max_seqlen_q=300)
PACKED = Shapes((600, 8, 128), (800, 2, 128), num_sequences=3, max_seqlen_q=300)
