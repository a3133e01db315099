"""A backward pass on Hopper: all of its kernels, launched one after the other by one call of compiled code.

The host would take as long again to call each by itself, and to allocate each part of the workspace.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.auxiliary.postprocess import Postprocess, PostprocessArguments
from flash_attn_cute.kernels.auxiliary.preprocess import Preprocess, PreprocessArguments
from flash_attn_cute.kernels.sm90.backward import BackwardSm90
from flash_attn_cute.kernels.sm90.backward_wide import BackwardWideSm90
from flash_attn_cute.kernels.sm90.config import PART_ALIGN, BackwardConfig, BackwardPassConfig
from flash_attn_cute.kernels.sm90.key_tiles import BackwardArguments


class BackwardPassArguments(NamedTuple):
    """The launch arguments, in their order: tensors as in the forward kernel, and the workspace."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor
    mdLSE: cute.Tensor | None
    mdQ: cute.Tensor
    mdK: cute.Tensor
    mdV: cute.Tensor
    mWorkspace: cute.Tensor  # (``BackwardPassConfig.workspace_size``,), anything
    mCuSeqlensQ: cute.Tensor | None
    mCuSeqlensK: cute.Tensor | None
    mSeqUsedQ: cute.Tensor | None
    mSeqUsedK: cute.Tensor | None
    blocks: Int32  # of queries a head, in the workspace
    blocks_k: Int32  # tiles of keys
    softmax_scale: Float32  # from here on as in ``BackwardArguments``
    softcap: Float32
    window_left: Int32
    window_right: Int32
    heads_in_cache: Int32
    sections: Int32
    heads_a_tile: Int32
    mNextTile: cute.Tensor
    num_ctas: Int32


class BackwardPassSm90:
    """The kernels of one configuration."""

    def __init__(self, config: BackwardPassConfig):
        self.config, c = config, config.main
        self.preprocess = Preprocess(c.tile_m, c.tile_d, c.packed)
        self.main: BackwardSm90 | BackwardWideSm90
        if isinstance(c, BackwardConfig):
            self.main, self.postprocess, self.postprocess_keys = BackwardSm90(c), None, None
        else:  # which leaves dQ, and of grouped heads dK and dV, to kernels behind it
            self.main = BackwardWideSm90(c)
            self.postprocess = Postprocess(c.tile_m, c.tile_d, c.columns_dQ, c.packed, c.zero_padding)
            keys = Postprocess(c.tile_n, c.tile_d, c.tile_d, c.packed, c.zero_padding)
            self.postprocess_keys = keys if c.grouped else None

    @cute.jit
    def __call__(self, arguments: BackwardPassArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernels."""
        m = self._main_arguments(arguments)
        sums = m.mdQaccum if const_expr(m.mTurnsQ is None) else None
        before = PreprocessArguments(
            *(arguments.mO, m.mdO, arguments.mLSE, arguments.mdLSE),
            *(m.mStats, sums, m.mTurnsQ, m.mTurnsK, m.mCuSeqlensQ, m.mSeqUsedQ),
        )
        self.preprocess(before, stream)
        self.main(m, stream)
        if const_expr(self.postprocess is not None):
            after = PostprocessArguments(m.mdQ, m.mdQaccum, m.mCuSeqlensQ, m.mSeqUsedQ, m.softmax_scale, m.mTurnsQ)
            self.postprocess(after, stream)
        if const_expr(self.postprocess_keys is not None):
            for i, (mdX, scale) in enumerate(((m.mdK, m.softmax_scale), (m.mdV, Float32(1.0)))):
                sums = m.mdKVaccum[i, None, None, None]
                after = PostprocessArguments(mdX, sums, m.mCuSeqlensK, m.mSeqUsedK, scale, m.mTurnsK)
                self.postprocess_keys(after, stream)

    def _main_arguments(self, a: BackwardPassArguments) -> BackwardArguments:
        """Those of the main kernel: the same, and the parts of the workspace."""
        parts: dict[str, cute.Tensor | None] = dict.fromkeys(_WORKSPACE)
        place = a.mWorkspace.iterator.toint()
        for name, shape in self.config.parts(a.mQ.shape[-2], a.blocks, a.mK.shape[-2], a.blocks_k).items():
            parts[name], place = _part(Int32 if name.startswith("mTurns") else Float32, place, shape)
        given = {name: getattr(a, name) for name in BackwardArguments._fields if name not in parts}
        return BackwardArguments(**given, **parts)


_WORKSPACE = "mStats", "mdQaccum", "mdKVaccum", "mTurnsQ", "mTurnsK"


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
