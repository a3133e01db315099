"""A backward pass on Hopper: all of its kernels, launched one after the other by one call of compiled code.

The host would take as long again to call each by itself, and to allocate each part of the workspace.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.ds_cells import Cells, of_chunk
from flash_attn_cute.kernels.common.fixed_point import KeyRanges
from flash_attn_cute.kernels.common.key_lists import KeyTables
from flash_attn_cute.kernels.common.preprocess import Preprocess
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardClusterConfig, BackwardConfig
from flash_attn_cute.kernels.sm90.backward.gradient_q import GradientQSm90
from flash_attn_cute.kernels.sm90.backward.postprocess import Postprocess, PostprocessArguments
from flash_attn_cute.kernels.sm90.backward.workspace import permuted


class BackwardPassSm90:
    """The kernels of one configuration."""

    def __init__(self, config: BackwardConfig, main: Any):
        self.config = c = config
        self.main = main
        self.preprocess = Preprocess(c, permuted)
        self.tables = KeyTables(c)
        self.ranges = KeyRanges(c) if c.fixed_point else None
        self.cells, self.gradient_q = (Cells(c), GradientQSm90(c)) if c.stores_dS else (None, None)
        self.postprocess, self.postprocess_keys = None, None
        if isinstance(c, BackwardClusterConfig):
            # It leaves dQ, and of grouped heads dK and dV, to kernels behind it.
            self.postprocess = Postprocess(c.features, c.tile_m, c.tile_d, c.columns_dQ)
            if c.features.grouped:
                self.postprocess_keys = [Postprocess(c.features, c.tile_n, d, d) for d in (c.tile_d, c.tile_dv)]

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernels of the pass."""
        a, w = arguments, self.tables.begin(arguments, stream)
        if const_expr(self.ranges is not None):
            self.ranges(a, w, stream)
        if const_expr(self.config.stores_dS):
            self.cells(a, w, stream)
        self.preprocess(a, w, stream)
        self.tables.finish(a, w, stream)
        if const_expr(self.config.stores_dS):
            for chunk in cutlass.range(a.numbers.num_chunks, unroll=1):
                self.main(a, of_chunk(w, chunk), stream)
                self.gradient_q(a, of_chunk(w, chunk), stream)
        else:
            self.main(a, w, stream)
        if const_expr(self.postprocess is not None):
            scale, rows = a.numbers.softmax_scale, (a.mCuSeqlensQ, a.mSeqUsedQ)
            self.postprocess(PostprocessArguments(a.mdQ, w.mdQaccum, *rows, scale, w.mSemaphoresQ), stream)
        if const_expr(self.postprocess_keys is not None):
            for i, (mdX, scale) in enumerate(((a.mdK, a.numbers.softmax_scale), (a.mdV, Float32(1.0)))):
                rows = a.mCuSeqlensK, a.mSeqUsedK
                given = PostprocessArguments(mdX, self._sums(w, i), *rows, scale, w.mSemaphoresK)
                self.postprocess_keys[i](given, stream)

    def _sums(self, w: Workspace, which: int) -> cute.Tensor:
        """Sums of dK (0) or dV (1), (heads_k, tiles, numbers), in a part that is sized for the wider of them."""
        sums, size = w.mdKVaccum[which, None, None, None], self.config.tile_n * self.postprocess_keys[which].tile_d
        (heads, tiles, _), strides = sums.shape, sums.stride
        return cute.make_tensor(sums.iterator, cute.make_layout((heads, tiles, size), stride=strides))
