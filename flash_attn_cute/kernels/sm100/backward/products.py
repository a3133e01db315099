"""Products of the backward kernels, of a CTA alone or of a pair, called by their results."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.cta_shared import Shared
from flash_attn_cute.kernels.sm100.config import COMPUTE_WARPGROUPS, CTAS, PART_ROWS
from flash_attn_cute.kernels.sm100.mma import gemm, in_tensor_memory, operand, swizzled, tiled_mma, transposed


class Mmas(NamedTuple):
    """Tiled products, called by their results."""

    S: cute.TiledMma
    dV: cute.TiledMma
    dK: cute.TiledMma
    dQ: cute.TiledMma
    dP: cute.TiledMma | None  # None: that of S

    @staticmethod
    def of(config: BackwardConfig) -> "Mmas":
        c, dtype, k_major, mn_major = config, DTYPES[config.dtype], OperandMajorMode.K, OperandMajorMode.MN
        shared, tensors, ctas = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM, c.ctas_a_tile
        # Queries and columns of dQ, or lanes for its columns, and queries.
        rows_dQ, columns_dQ = (ctas * PART_ROWS, c.tile_m) if c.transposes_dQ else (c.tile_m, c.tile_d)
        dP = tiled_mma(dtype, k_major, c.tile_m, shared, ctas=ctas)
        return Mmas(
            S=tiled_mma(dtype, k_major, c.tile_m, tensors, ctas=ctas) if c.holds_keys else dP,
            dV=tiled_mma(dtype, mn_major, c.tile_dv, tensors, ctas=ctas),
            dK=tiled_mma(dtype, mn_major, c.tile_d, tensors, ctas=ctas),
            dQ=tiled_mma(dtype, mn_major, columns_dQ, shared, ctas=ctas, major_a=mn_major, rows=rows_dQ),
            dP=dP if c.holds_keys else None,
        )


@dataclass(frozen=True)
class _Operand:
    """An operand of a product."""

    fragment: cute.Tensor  # (MMA, 1, MMA_K), and a stage, if there is a ring
    ring: Ring | None

    def at(self, step: Int32) -> cute.Tensor:
        """The operand of a step of the ring, or the only one."""
        return self.fragment if self.ring is None else self.fragment[None, None, None, self.ring.stage(step)]


@dataclass(frozen=True)
class Products:
    """All products, of both CTAs by the leader of a pair; in flight on return.

    An operand is ``<product>_<operand>``, and a product its result: S, P (for dP), V, K and Q (for dV, dK, dQ).
    """

    config: BackwardConfig
    a: BackwardArguments
    mmas: Mmas
    shared: Shared
    memory: cute.Pointer  # tensor memory
    S_K: _Operand
    S_Q: _Operand
    P_V: _Operand
    P_dO: _Operand
    V_dO: _Operand
    K_Q: _Operand
    Q_dS: _Operand
    Q_K: tuple[_Operand, ...]  # of the parts of dQ

    @classmethod
    def of(cls, config: BackwardConfig, a: BackwardArguments, mmas: Mmas, shared: Shared) -> "Products":
        """Products of all operands."""
        c, rings, pair, memory = config, shared.rings, config.ctas_a_tile == CTAS, shared.tensor_memory
        dP = mmas.dP or mmas.S
        sdO, do, sQ = shared.sdO, rings.do, shared.sQ
        q = rings.q if c.num_passes == 2 or not pair else rings.q_columns
        if pair:
            sdO, do, sQ = shared.sdO_columns, rings.do_columns, shared.sQ_columns
        S_K = _staged(mmas.S, "A", shared.sK, rings.k)
        if c.holds_keys:
            S_K = _Operand(in_tensor_memory(mmas.S, memory + c.first_K, c.tile_d), None)
        dS, K = _operands_of_dQ(c, shared)
        side_dS, side_K = ("B", "A") if c.transposes_dQ else ("A", "B")
        return cls(
            config=config,
            a=a,
            mmas=mmas,
            shared=shared,
            memory=memory,
            S_K=S_K,
            S_Q=_staged(mmas.S, "B", shared.sQ, rings.q),
            P_V=_staged(dP, "A", shared.sV, rings.v),
            P_dO=_staged(dP, "B", shared.sdO, rings.do),
            V_dO=_staged(mmas.dV, "B", transposed(sdO), do),
            K_Q=_staged(mmas.dK, "B", transposed(sQ), q),
            Q_dS=_staged(mmas.dQ, side_dS, dS, None),
            Q_K=tuple(_staged(mmas.dQ, side_K, part, rings.k) for part in K),
        )

    def start_S(self, tile_idx: Int32, step: Int32, first: Int32 | int) -> None:
        """S' = K Q', from a column on."""
        K, Q = self.S_K.at(tile_idx), self.S_Q.at(step)
        gemm(self.mmas.S, self.memory + first, K, Q, Boolean(False))

    def start_dP(self, tile_idx: Int32, step: Int32, first: Int32 | int) -> None:
        """DP' = V dO', from a column on."""
        mma, V, dO = self.mmas.dP or self.mmas.S, self.P_V.at(tile_idx), self.P_dO.at(step)
        gemm(mma, self.memory + first, V, dO, Boolean(False))

    def start_dV(self, step: Int32, first: Int32 | int, accumulates: Boolean) -> None:
        """DV += P' dO, with P from a column on, where S was."""
        c, mma, dO = self.config, self.mmas.dV, self.V_dO.at(step)
        gemm(mma, self.memory + c.first_dV, _halves(c, mma, self.memory + first, c.P_stride), dO, accumulates)

    def start_dK(self, step: Int32, first: Int32 | int, accumulates: Boolean) -> None:
        """DK += dS' Q, with dS from a column on, where dP was."""
        c, mma, Q = self.config, self.mmas.dK, self.K_Q.at(step)
        gemm(mma, self.memory + c.first_dK, _halves(c, mma, self.memory + first, c.queries), Q, accumulates)

    def start_dQ(self, tile_idx: Int32, first: Int32 | int, part: int = 0) -> None:
        """DQ = dS K, or a part of dQ' = K' dS, from a column on."""
        dS, K = self.Q_dS.at(tile_idx), self.Q_K[part].at(tile_idx)
        a, b = (K, dS) if self.config.transposes_dQ else (dS, K)
        gemm(self.mmas.dQ, self.memory + first, a, b, Boolean(False))


def _staged(mma: cute.TiledMma, side: str, sX: cute.Tensor, ring: Ring | None) -> _Operand:
    """An operand in shared memory, which has stages if it has more than two modes."""
    fragment = (mma.make_fragment_A if side == "A" else mma.make_fragment_B)(operand(sX))
    return _Operand(fragment, ring if cute.rank(sX) > 2 else None)


def _operands_of_dQ(config: BackwardConfig, shared: Shared) -> tuple[cute.Tensor, Iterable[cute.Tensor]]:
    """Parts of dS, (queries, keys), and of K, (columns, keys), for each part of dQ."""
    c = config
    if c.ctas_a_tile == CTAS:
        dS = transposed(cute.local_tile(shared.sdS, (PART_ROWS, c.queries_shared, CTAS), (0, 0, 0)))
        return cute.group_modes(dS, 1, 3), [transposed(shared.sK_columns)]
    if not c.transposes_dQ:
        return transposed(shared.sdS), [transposed(shared.sK)]
    layout = swizzled(DTYPES[c.dtype], PART_ROWS, (c.tile_n, PART_ROWS)).outer
    columns = (shared.sK.iterator + c.first_row_dQ(part) * c.tile_n for part in range(c.parts_dQ))
    return transposed(shared.sdS), (transposed(cute.make_tensor(x, layout)) for x in columns)


def _halves(config: BackwardConfig, mma: cute.TiledMma, first: cute.Pointer, pitch: int) -> cute.Tensor:
    """An operand of a column of 16 bits a query in tensor memory, of each warpgroup's queries one after the other.

    Those of the first warpgroup begin at ``first``, and the second's ``pitch`` columns of 32 bits behind.
    """
    whole = in_tensor_memory(mma, first, config.tile_m)
    (*shape, steps), (*stride, within) = whole.shape, whole.stride
    shape.append((steps // COMPUTE_WARPGROUPS, COMPUTE_WARPGROUPS))
    return cute.make_tensor(whole.iterator, cute.make_layout(tuple(shape), stride=(*stride, (within, 2 * pitch))))
