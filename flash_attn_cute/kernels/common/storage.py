"""Shared memory of a kernel, as its schedule describes it (``kernels.schedule``)."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from flash_attn_cute.kernels.common.ring import LedRing, Ring
from flash_attn_cute.kernels.common.tma import RowTiles, make_row_tiles
from flash_attn_cute.kernels.schedule import BARRIER_BYTES, Buffer, Schedule

_DTYPES = {"int32": Int32, "float32": Float32, "uint8": Uint8}


@dataclass(frozen=True)
class SharedMemory:
    """The barriers and buffers of a schedule."""

    schedule: Schedule
    dtype: type  # of operands
    # The architecture's layout of a tile, from a dtype, the columns that its swizzled atoms divide, and a shape.
    swizzled: Callable[[type, int, tuple[int, ...]], cute.ComposedLayout]

    def allocate(self) -> Any:
        """Allocates a CTA's shared memory, on the device: mbarriers of all pipelines, then all buffers by name."""
        members: dict[str, Any] = {"barriers": cute.struct.MemRange[Int64, len(self.schedule.arrive_counts)]}
        for buffer in self.schedule.shared:
            array = cute.struct.MemRange[_DTYPES.get(buffer.dtype, self.dtype), buffer.elements]
            members[buffer.name] = cute.struct.Align[array, buffer.align]
        storage = cute.struct(type("Storage", (), {"__annotations__": members}))
        return cutlass.memory.SmemAllocator().allocate(storage)

    def ring(self, storage: Any, name: str) -> Ring:
        pipeline = self.schedule.pipeline(name)
        kind = LedRing if any(arrivals.ctas for arrivals in pipeline.full + pipeline.empty) else Ring
        first = self.schedule.barriers[f"{name}.full"].start // BARRIER_BYTES
        return kind(storage.barriers.data_ptr() + first, pipeline.stages, pipeline.num_bytes)

    def rings(self, storage: Any) -> Any:
        """A named tuple of the rings of all pipelines; None for those that the configuration does without."""
        rings = {x.name: self.ring(storage, x.name) if x.stages else None for x in self.schedule.pipelines}
        return namedtuple("Rings", rings)(**rings)

    def init(self, storage: Any, *names: str) -> None:
        """Initialises the mbarriers of pipelines, or of all, by one thread, before any role starts."""
        for pipeline in self.schedule.pipelines:
            if not names or pipeline.name in names:
                empty = pipeline.empty_count if pipeline.has_empty else None
                self.ring(storage, pipeline.name).init(full=pipeline.full_count, empty=empty)

    def tensors(self, storage: Any, *names: str) -> dict[str, cute.Tensor | None]:
        """Buffers by name; None for those that the configuration does without."""
        return {name: self._tensor(storage, self.schedule.buffer(name)) for name in names}

    def row_tiles(self, operation: Any, name: str, mX: cute.Tensor, ragged: bool, rows: int | None = None) -> RowTiles:
        """TMA tiles of mX (s, d, heads, batch): the first two modes of a swizzled buffer, or so many rows of it."""
        buffer = self.schedule.buffer(name)
        shape = (rows or buffer.shape[0], buffer.shape[1])
        return make_row_tiles(operation, mX, self.swizzled(self.dtype, buffer.swizzle, shape), shape, ragged)

    def _tensor(self, storage: Any, buffer: Buffer) -> cute.Tensor | None:
        if 0 in buffer.shape:
            return None
        place = getattr(storage, buffer.place_of or buffer.name)
        if not buffer.swizzle:
            return place.get_tensor(cute.make_layout(buffer.shape))
        layout = self.swizzled(self.dtype, buffer.swizzle, buffer.shape[:-1] if buffer.apart else buffer.shape)
        if buffer.apart:
            outer = cute.append(layout.outer, cute.make_layout(buffer.shape[-1], stride=buffer.apart))
            layout = cute.make_composed_layout(layout.inner, layout.offset, outer)
        tensor = place.get_tensor(layout.outer, swizzle=layout.inner)
        return cute.make_tensor(tensor.iterator + buffer.offset, layout.outer) if buffer.offset else tensor
