"""Layouts of tiles in shared memory for TMA and the tensor cores, and TMA pipelines."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Constexpr, Int32, pipeline
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from flash_attn_cute.kernels.schedule import Pipeline


def swizzled(dtype: type, columns: int, shape: tuple[int, ...]) -> cute.ComposedLayout:
    """(rows, columns, ...), each row contiguous, in the widest swizzled atoms that ``columns`` is a multiple of."""
    kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, tuple(range(len(shape))))


def transposed(x: cute.Tensor) -> cute.Tensor:
    """The tile with its first two modes exchanged."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, *range(2, cute.rank(x))]))


def one_of(is_first: Boolean, first: cute.Tensor, second: cute.Tensor) -> cute.Tensor:
    """The first of two tiles of one layout, or the second."""
    apart = (second.iterator.toint() - first.iterator.toint()) // (first.element_type.width // 8)
    apart = cute.assume(apart, divby=512)  # tiles of 16 bits begin at multiples of 1 KB
    return cute.make_tensor(first.iterator + cutlass.select_(is_first, Int32(0), apart), first.layout)


@cute.jit
def write(
    rounded: cute.Tensor, mma: cute.TiledMma, sX: cute.Tensor, thread: Int32, transposes: Constexpr = False
) -> None:
    """Writes a warpgroup's rounded accumulator to its tile in shared memory.

    A fence makes it visible to TMA and WGMMA. ``transposes``: whether the tile is a transposed view of contiguous rows.
    """
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposes, 4), sX.element_type)
    tiled_copy = cute.make_tiled_copy_C(atom, mma)
    to_shared = tiled_copy.get_slice(thread)
    cute.copy(tiled_copy, to_shared.retile(rounded), to_shared.partition_D(sX))


@cute.jit
def read_c(mma: cute.TiledMma, sX: cute.Tensor, rX: cute.Tensor, thread: Int32, transposes: Constexpr = False) -> None:
    """Reads a tile into registers that are laid out as an accumulator's.

    ``transposes``: whether it is a transposed view of contiguous rows.
    """
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposes, 4), sX.element_type)
    tiled_copy = cute.make_tiled_copy_C(atom, mma)
    from_shared = tiled_copy.get_slice(thread)
    cute.copy(tiled_copy, from_shared.partition_S(sX), from_shared.retile(rX))


@cute.jit
def read_a(mma: cute.TiledMma, sX: cute.Tensor, rX: cute.Tensor, thread: Int32) -> None:
    """Reads a product's A operand from its tile in shared memory into registers."""
    tiled_copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), sX.element_type), mma)
    from_shared = tiled_copy.get_slice(thread)
    cute.copy(tiled_copy, from_shared.partition_S(sX), from_shared.retile(rX))


def tma_pipeline(described: Pipeline, barriers: cute.Pointer) -> pipeline.PipelineTmaAsync:
    """The pipeline of a description, from a warp that loads by TMA to warps that each release a stage once."""
    return pipeline.PipelineTmaAsync.create(
        num_stages=described.stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, described.full_count),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, described.empty_count),
        tx_count=described.num_bytes,
        barrier_storage=barriers,
        defer_sync=True,
    )
