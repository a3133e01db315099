"""Context parallelism: attention over sequences whose rows are dealt over the ranks of a torch.distributed group."""

from flash_attn_cute.distributed.context_manager import context_parallel, context_parallel_unshard
from flash_attn_cute.distributed.public_functions import (
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    gather,
    rank_of,
)
from flash_attn_cute.distributed.sharding import Segment, Sharding

__all__ = [
    "Segment",
    "Sharding",
    "context_parallel",
    "context_parallel_attn_func",
    "context_parallel_attn_varlen_func",
    "context_parallel_unshard",
    "gather",
    "rank_of",
]
