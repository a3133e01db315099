"""Products on Hopper's tensor cores."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup


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
