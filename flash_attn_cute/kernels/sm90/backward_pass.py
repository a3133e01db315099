"""A backward pass on Hopper: all of its kernels, launched one after the other by one call of compiled code.

The host would take as long again to call each by itself.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_attn_cute.kernels.auxiliary.postprocess import Postprocess, PostprocessArguments
from flash_attn_cute.kernels.auxiliary.preprocess import Preprocess, PreprocessArguments
from flash_attn_cute.kernels.sm90.backward import BackwardSm90
from flash_attn_cute.kernels.sm90.backward_wide import BackwardWideSm90
from flash_attn_cute.kernels.sm90.config import BackwardConfig, BackwardPassConfig, BackwardWideConfig
from flash_attn_cute.kernels.sm90.key_tiles import BackwardArguments


class BackwardPassArguments(NamedTuple):
    """The launch arguments: those of the main kernel, and what only the kernels before and after it need."""

    mO: cute.Tensor
    mLSE: cute.Tensor
    mdLSE: cute.Tensor | None
    mdQ: cute.Tensor
    main: BackwardArguments


class BackwardPassSm90:
    """The kernels of one configuration."""

    def __init__(self, config: BackwardPassConfig):
        c = config.main
        self.preprocess = Preprocess(c.tile_m, c.tile_d, c.packed)
        self.main = BackwardSm90(c) if isinstance(c, BackwardConfig) else BackwardWideSm90(c)
        self.postprocess = Postprocess(c.tile_m, c.tile_d, c.columns_dQ, c.packed, c.zero_padding)
        self.postprocess_keys = None
        if c.grouped and isinstance(c, BackwardWideConfig):  # tiles leave dK and dV to it
            self.postprocess_keys = Postprocess(c.tile_n, c.tile_d, c.tile_d, c.packed, c.zero_padding)

    @cute.jit
    def __call__(self, arguments: BackwardPassArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernels."""
        a, m = arguments, arguments.main
        sums = m.mdQaccum if const_expr(m.mTurnsQ is None) else None
        before = PreprocessArguments(
            a.mO, m.mdO, a.mLSE, a.mdLSE, m.mStats, sums, m.mTurnsQ, m.mTurnsK, m.mCuSeqlensQ, m.mSeqUsedQ
        )
        self.preprocess(before, stream)
        self.main(m, stream)
        after = PostprocessArguments(a.mdQ, m.mdQaccum, m.mCuSeqlensQ, m.mSeqUsedQ, m.softmax_scale, m.mTurnsQ)
        self.postprocess(after, stream)
        if const_expr(self.postprocess_keys is not None):
            for i, (mdX, scale) in enumerate(((m.mdK, m.softmax_scale), (m.mdV, Float32(1.0)))):
                sums = m.mdKVaccum[i, None, None, None]
                after = PostprocessArguments(mdX, sums, m.mCuSeqlensK, m.mSeqUsedK, scale, m.mTurnsK)
                self.postprocess_keys(after, stream)
