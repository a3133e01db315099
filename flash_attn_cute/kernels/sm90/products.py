"""Products on Hopper's tensor cores."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup


def tiled_mma(
    dtype: type, major_a: OperandMajorMode, major_b: OperandMajorMode, columns: int, source_a: object
) -> cute.TiledMma:
    """Products of 64 rows by one warpgroup, summed in float32."""
    return sm90.make_trivial_tiled_mma(dtype, dtype, major_a, major_b, Float32, (1, 1, 1), (64, columns), source_a)


@cute.jit
def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    is_first: cutlass.Constexpr,
    is_last: cutlass.Constexpr = True,
) -> None:
    """Acc (+)= a b, in flight on return: as a group of its own, or up to the one that is the last."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not is_first)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    if const_expr(is_last):
        warpgroup.commit_group()
