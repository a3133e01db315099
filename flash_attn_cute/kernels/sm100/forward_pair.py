"""Attention forward on Blackwell by pairs of CTAs, above d = 128: a tile is the work of a cluster of two.

The tensor cores of a pair compute products together (``cta_group::2``), of 256 queries each. A CTA holds 128 of their
rows in its own tensor memory, and of K and V only its half in shared memory: what it multiplies of the other half comes
from the other CTA. So a block is read once for twice as many queries, and takes half the room: blocks of 128 keys have
two stages of K and of V where those of one CTA would not. (Pairs forward are FlashAttention-4's.)

``forward`` describes the roles and the order of products, which are those of single CTAs, and ``forward_schedule`` has
the table. ``python -m flash_attn_cute.kernels describe sm100 forward --d 256 --rows 8192`` prints it.

A CTA has one or two parts of 128 queries of a tile, the second CTA those behind the leader's. The mainloop goes over
all blocks that some query of the pair attends to. The leader's mma warp issues the products of both CTAs, and its
producer chooses tiles and publishes them to both. Each producer loads for its own CTA.

Products, by which halves a CTA r has (rows are ``left``'s and the sum's, columns ``right``'s):
                  sum, in tensor memory      left                             right, in shared memory
    S = Q K'      128 queries x 128 keys     Q: 128 queries x d, shared       K: keys r x d
    O += P V      128 queries x d_v          P: 128 queries, tensor memory    V: 128 keys x columns r
One descriptor serves both CTAs: the same operand lies at the same place in both.

Commits arrive in any order. A CTA of the pair lives until all have arrived there: its producer waits for those of the
last Q, K and V, and its softmax warps for those of the last O.
"""

from typing import Any

import cutlass.cute as cute

from flash_attn_cute.kernels.common.main_kernels import ForwardMmas
from flash_attn_cute.kernels.sm100.forward import ForwardSm100
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward_pair_shared import PairShared
from flash_attn_cute.kernels.sm100.forward_pair_transfers import PairProducer
from flash_attn_cute.kernels.sm100.mma import commit_to_both


class ForwardPairSm100(ForwardSm100):
    """The forward kernel of one configuration."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        self.producer = PairProducer(config)
        self.commit = commit_to_both

    def _shared(self, storage: Any) -> PairShared:
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return PairShared.of(self.memory, storage, rank=rank, **self.memory.tensors(storage, "tiles_sent"))

    @cute.jit
    def mma(self, mmas: ForwardMmas, shared: PairShared) -> None:
        """A warp of each CTA, of which only the leader's issues products."""
        if shared.is_leader:
            self.multiply(mmas, shared)
