"""Sizes and fields that the configurations of all Blackwell kernels have. Needs no cutlass."""

from dataclasses import dataclass
from typing import ClassVar

from flash_attn_cute.kernels.features import Features, PassName
from flash_attn_cute.kernels.schedule import Order

# That tiles are made for: multiples of the 64 columns that a swizzled row of shared memory holds. TMA fills the columns
# that a call lacks with zeros.
HEAD_DIMS = (64, 128, 192, 256)
DTYPES = ("float16", "bfloat16")
TARGETS = {(10, 0): "sm_100a", (10, 3): "sm_103a"}  # what GPUs of a compute capability run
PART_ROWS = 128  # of a product: the lanes of tensor memory
WARPS = 16  # of a CTA
MMA_WARP, PRODUCER_WARP = 12, 13
CTAS = 2  # of a pair, whose products are computed together
SECOND = 1  # the rank of that which is not the leader
TENSOR_COLUMNS = 512  # of tensor memory, 32 bits each
SCORE_COLUMNS = 128  # of tensor memory that a product of scores takes
COMPUTE_WARPGROUPS = 2  # of a backward kernel, with half of a block's queries each
SHARED_MEMORY = 227 * 1024  # bytes of a CTA
O_COLUMNS = 64  # of a piece of a result in shared memory
TILE_STAGES = 2  # tiles that the producer may have published
ENTRY_STAGES = 8  # published entries of lists: more than there are blocks in flight

# Of pairs' schedules (``Schedule.orders``).
TILES_IN_ORDER = Order(
    "tiles -> second CTA",
    "st.shared, proxy fence, bulk copy, mbarrier -> wait; read -> overwritten: proxy fence, arrival -> wait",
)


@dataclass(frozen=True)
class Sm100Config:
    """Fields that every configuration has."""

    architecture: ClassVar[str] = "sm100"
    pass_name: ClassVar[PassName]
    reorders_bits: ClassVar[bool] = False  # of a block mask

    target: str  # one of ``TARGETS``
    dtype: str  # one of ``DTYPES``
    tile_d: int  # one of ``HEAD_DIMS``
    features: Features


def tile_columns(head_dim: int) -> int:
    """Columns of the narrowest tile that a head dimension fits."""
    return next(columns for columns in HEAD_DIMS if columns >= head_dim)
