"""Attention forward on Blackwell by pairs of CTAs, above d = 128: a tile is the work of a cluster of two.

The tensor cores of a pair compute products together (``cta_group::2``), of 256 queries each. A CTA holds 128 of their
rows in its own tensor memory, and of K and V only its half in shared memory: what it multiplies of the other half comes
from the other CTA. So a block is read once for twice as many queries, and takes half the room: blocks of 128 keys have
two stages of K and of V where those of one CTA would not. (Pairs forward are FlashAttention-4's.)

A CTA has the roles of ``forward``, each with the same warps, and but for what follows does what is said there. It has
as many queries of the pair's tile as a tile of ``forward`` has, the second CTA those behind the leader's. All roles but
producer and mma work on them as if they were the CTA's own tile, except that the mainloop goes over all blocks that
some query of the pair attends to:
    warp 12   mma: the leader's (rank 0) issues the products of both. The second CTA's only owns tensor memory.
    warp 13   producer: the leader's chooses tiles, and publishes them to both CTAs. Each loads for its own CTA.

Products, by which halves a CTA r has (rows are ``left``'s and the sum's, columns ``right``'s):
                  sum, in tensor memory      left                             right, in shared memory
    S = Q K'      128 queries x 128 keys     Q: 128 queries x d, shared       K: keys r x d
    O += P V      128 queries x d_v          P: 128 queries, tensor memory    V: 128 keys x columns r
One descriptor serves both CTAs: the same operand lies at the same place in both.

Shared memory, in KB:  Q       K, V        O out    sum, and less than 3 of barriers and sums
    d = 256            64      2 x 64      32       224
    (192, 128)         2 x 48  2 x 40      32       208

Rings, as in ``forward``. Barriers of a side that is marked * count in the leader alone, for both CTAs: TMA of both
brings its bytes to the leader's barrier, and warps of both arrive there. All others are a CTA's own; commits arrive in
both.

    ring      stages  a step is      full by                             empty by
    tiles     2       a tile         1, producer; in the second CTA 48   4 a part*, softmax; 4*, epilogue; 1*,
                                     bytes                               producer; of the leader also 1, mma
    q         parts   a part of Q    1 + bytes*, TMA of both             1, commit of the tile's last scores
    k         2       a block        1 + bytes*, TMA of both             1, commit of its scores (last part)
    v         2       a block        1 + bytes*, TMA of both             1, commit of its output (last part)
    scores    2       a unit         1, commit of S                      8*, softmax: S is read, P is stored
    p         2       a unit         8*, softmax: P is stored but for    none
                                     its last keys, O rescaled
    outputs   parts   a part of O    1, commit of its last output        8*, epilogue: O is read
    stats     parts   a part         4, softmax: sum and reference       4, epilogue: they are read
    added     1       a unit         1, commit of O; only of one part    none

The CTAs meet before tensor memory is allocated, which both do, and before it is freed at the end: until then one
arrives at the other's barriers. The last commit is that of the last V: producers wait for it, each in its CTA.

What orders accesses across both CTAs, beyond what ``forward`` lists:
    P, rescaled O in tensor memory -> tensor cores   as in ``forward``; the arrival at the leader's has cluster scope
    what a tile is -> the second CTA                 st.shared, fence.proxy.async, bulk copy, mbarrier -> wait
"""

from typing import Any

import cutlass.cute as cute

from flash_attn_cute.kernels.sm100.config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward import ForwardSm100, Mmas
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
        return PairShared.at(self.config, self.dtype, storage, rank)

    @cute.jit
    def mma(self, mmas: Mmas, shared: PairShared) -> None:  # type: ignore[override]
        """A warp of each CTA, of which only the leader's issues products."""
        if shared.is_leader:
            self.multiply(mmas, shared)
