"""Main backward kernels, on the host: what each is made of, and how it is launched."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.key_tiles import num_key_tiles
from flash_attn_cute.kernels.common.rows import rows_first
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.schedule import Schedule


class BackwardKernel:
    """The kernel of one configuration. Subclasses have products, TMA tiles and the device's side, ``kernel``."""

    def __init__(self, config: Any, schedule: Schedule, swizzled: Callable[..., cute.ComposedLayout]):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.schedule = schedule
        self.memory = SharedMemory(schedule, self.dtype, swizzled)

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches as many CTAs, or clusters, as SMs have room for or, if the kernel is not persistent, one a tile."""
        c, ctas = self.config, self.config.ctas_a_tile
        mdK, mdV = (rows_first(x, c.features.packed) for x in (a.mdK, a.mdV))
        self.Storage = self.memory.struct()
        mmas, tma = self.mmas(), self.tma(a, mdK, mdV)
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        clusters = num_key_tiles(c, a)
        if const_expr(c.persistent):
            clusters = cutlass.min(clusters, c.ctas_an_sm * a.numbers.num_sms // ctas)
        self.kernel(mmas, tma, mdK, mdV, a, ws, scales).launch(
            grid=[ctas * clusters, 1, 1],
            block=[self.schedule.threads, 1, 1],
            cluster=[ctas, 1, 1] if const_expr(ctas > 1) else None,
            stream=stream,
            min_blocks_per_mp=c.ctas_an_sm,
            preferred_smem_carveout=100 if const_expr(c.ctas_an_sm > 1) else None,  # or the compiler asks a GPU
        )

    def mmas(self) -> Any:
        """Products, called by their results."""
        raise NotImplementedError

    def tma(self, a: BackwardArguments, mdK: cute.Tensor, mdV: cute.Tensor) -> Any:
        """TMA tiles of the tensors that the kernel loads and stores."""
        raise NotImplementedError
