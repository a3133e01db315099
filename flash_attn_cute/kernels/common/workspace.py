"""Parts of one allocation, which kernels use between them: the host is spared an allocation for each."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from flash_attn_cute.kernels.arguments import PART_ALIGN


def carved(mWorkspace: cute.Tensor, parts: dict[str, tuple[Int32 | int, ...]], dtype: Any) -> dict[str, cute.Tensor]:
    """The parts of a workspace, as ``arguments.workspace_bytes`` counts them, each a compact tensor.

    Args:
        mWorkspace: bytes.
        parts: shapes, in the order in which they lie there. A first and a last size may be constants.
        dtype: of all parts, or a function from a name to that part's; 4 bytes each.
    """
    tensors, place = {}, mWorkspace.iterator.toint()
    for name, shape in parts.items():
        tensors[name], place = _part(dtype if isinstance(dtype, type) else dtype(name), place, shape)
    return tensors


def _part(dtype: type, place: Int64, shape: tuple[Int32 | int, ...]) -> tuple[cute.Tensor, Int64]:
    """A compact part of the workspace, and where the next one begins. Its first and last size may be constants."""
    row = shape[-1] if isinstance(shape[-1], int) else 1  # all strides but the last are multiples of it
    strides: list[Int64 | int] = [1]
    for size in shape[:0:-1]:
        static = isinstance(size, int) and isinstance(strides[0], int)
        strides.insert(0, size * strides[0] if static else cute.assume(Int64(size) * strides[0], divby=row))
    part = cute.make_tensor(
        cute.make_ptr(dtype, place, cute.AddressSpace.gmem, assumed_align=PART_ALIGN),
        cute.make_layout(shape, stride=tuple(strides)),
    )
    num_bytes = Int64(shape[0]) * strides[0] * 4
    return part, place + (num_bytes + PART_ALIGN - 1) // PART_ALIGN * PART_ALIGN
