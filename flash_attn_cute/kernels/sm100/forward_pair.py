"""Attention forward on Blackwell by pairs of CTAs, above d = 128: a tile is the work of a cluster of two.

The tensor cores of a pair compute products together (``cta_group::2``), of 256 queries each. A CTA holds 128 of their
rows in its own tensor memory, and of K and V only its half in shared memory: what it multiplies of the other half comes
from the other CTA. So a block is read once for twice as many queries, and takes half the room: blocks of 128 keys have
two stages of K and of V where those of one CTA would not. (Pairs forward are FlashAttention-4's.)

Roles (a CTA of 512 threads; the pair takes one tile after the other. A CTA has one or two parts of 128 queries of it,
the second CTA those behind the leader's, and the mainloop goes over all blocks that some query of the pair attends to):
    warps 0 .. 3, 4 .. 7   softmax, a warpgroup a part (the second one idles where there is one part). A thread has a
                           row: S from tensor memory to registers, P back, O rescaled when that is due.
    warps 8 .. 11          epilogue: O divided by the sums, from tensor memory through shared memory to out, or at once
                           if that is float32; lse; zeros into the padding. A thread has a row of each part.
    warp 12                mma: owns its CTA's tensor memory. The leader's (rank 0) issues the products of both.
    warp 13                producer: the leader's chooses tiles, and publishes them to both CTAs. Each loads for its own
                           CTA: Q once a tile, K and V block by block.
    warps 14, 15           nothing.
Registers a thread: ``ForwardConfig.registers``.

Products, by which halves a CTA r has (rows are ``left``'s and the sum's, columns ``right``'s):
                  sum, in tensor memory      left                             right, in shared memory
    S = Q K'      128 queries x 128 keys     Q: 128 queries x d, shared       K: keys r x d
    O += P V      128 queries x d_v          P: 128 queries, tensor memory    V: 128 keys x columns r
One descriptor serves both CTAs: the same operand lies at the same place in both.

Shared memory, in KB:  Q       K, V        O out    sum, and less than 3 of barriers and sums
    d = 256            64      2 x 64      32       224
    (192, 128)         2 x 48  2 x 40      32       208

Tensor memory (512 columns): two blocks of S of up to 128 columns, P (16 bits) in the place of the first half of its S,
and O of each part behind. A *unit* is a block of keys for one part, and units are counted over all tiles of the pair:
unit u of two parts is block u // 2 of part u % 2. Its scores are in S of u % 2.

Pipelines are ``Ring``s, each of a full and an empty barrier a stage, whose steps go on counting from tile to tile. A
warp arrives once, behind ``__syncwarp``. Barriers of a side that is marked * count in the leader alone, for both CTAs:
TMA of both brings its bytes to the leader's barrier, and warps of both arrive there. All others are a CTA's own;
commits arrive in both.

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
    stats     parts   a part         4, softmax: row_sum and row_max     4, epilogue: they are read
    added     1       a unit         1, commit of O; only of one part    none

Steps of q, outputs and stats count only tiles that have blocks. For a tile that attends to no key nothing is loaded or
multiplied, and the epilogue writes zeros by itself.

The leader's mma warp issues O(u) = P(u) V, in two parts as P comes, and then S(u + 2) = Q K', for one unit after the
other and on into the next tile:

    tensor cores   S0 S1 | O0 S2 | O1 S3 | O2 S4 ...          (unit numbers)
    softmax 0            P0 from S0     | P2 from S2 ...
    softmax 1                 P1 from S1     | P3 from S3 ...

Products are done in the order in which they were issued, and a commit arrives when all before it are done. Hence:
  - S(u + 2) may take the place of P(u), which O(u) reads ahead of it.
  - With two parts full scores of unit u show softmax that O of unit u - 2, the part's last, is complete, and O may be
    rescaled. With one part O(u - 1) is behind S(u), and softmax waits at ``added`` before it rescales.
  - O of a tile's first block overwrites. Before it the mma warp waits for outputs to be empty.

The CTAs meet before tensor memory is allocated, which both do, and before it is freed at the end: until then one
arrives at the other's barriers. The last commit is that of the last V: producers wait for it, each in its CTA.

What is read or overwritten by another proxy, thread or CTA, and what orders it (arrivals at the leader's barriers have
cluster scope):
    S, O, tensor cores -> threads     commit -> wait, tcgen05.fence::after_thread_sync, tcgen05.ld, wait::ld
    P, rescaled O -> tensor cores     tcgen05.st, wait::st, fence::before_thread_sync, arrival -> wait, fence::after
    S read, O read -> overwritten     tcgen05.ld, wait::ld, fence::before, arrival -> wait, fence::after
    Q, K, V, TMA -> tensor cores      mbarrier; read -> overwritten: commit -> wait, TMA
    O in shared memory -> TMA         st.shared, fence.proxy.async, named barrier 1, TMA; read -> overwritten: bulk wait
    what a tile is -> the second CTA  st.shared, fence.proxy.async, bulk copy, mbarrier -> wait

Windows and sequence ends are applied only in blocks that an edge crosses for the part (``Blocks``). Tiles of packed
sequences load and store through ragged views (``common.tma``): rows behind a sequence's end read as zeros, and are not
written.
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
