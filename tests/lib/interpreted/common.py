"""Global memory, arguments and launches of interpreted kernels, whatever the pass."""

import dataclasses
import itertools
import random
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_attn_cute.kernels.sm100.config import SHARED_MEMORY, TARGETS
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Options
from tests.lib import ptx
from tests.lib.oracle import Call

B200, B300 = TARGETS  # their compute capabilities
FULL, EMPTY = -1, -2  # as in ``common.block_lists``


def sequences_of(a: Any) -> list[tuple[int, int, int, int]]:
    """First rows of sequences of q and of k, counted over the batch, and the number of rows of each."""
    if a.mCuSeqlensQ is None:
        num_q, num_k = a.mQ.shape[1], a.mK.shape[1]
        return [(b * num_q, b * num_k, num_q, num_k) for b in range(a.mQ.shape[0])]
    used_q = a.mCuSeqlensQ.diff() if a.mSeqUsedQ is None else a.mSeqUsedQ
    used_k = a.mCuSeqlensK.diff() if a.mSeqUsedK is None else a.mSeqUsedK
    places = a.mCuSeqlensQ[:-1], a.mCuSeqlensK[:-1], used_q, used_k
    return list(zip(*(x.tolist() for x in places), strict=True))


def cut_mask(a: Any, n: Any, queries: int, keys: int, *, rows_are_keys: bool = False) -> tuple[Tensor, Tensor]:
    """Codes of a mask's tiles of so many queries and keys, and their elements: see ``common.mask_tiles``.

    (row of tiles, block of keys), and (row, block, queries, keys). A query that there is not hides nothing of a tile
    whose rows are queries.
    """
    blocks, packed = max(1, -(-a.mMask.shape[3] // keys)), a.mCuSeqlensQ is not None
    codes = torch.full((n.lists_batch * n.lists_heads * n.lists_tiles, blocks), EMPTY, dtype=torch.int32)
    tiles = torch.zeros(*codes.shape, queries, keys, dtype=torch.bool)
    for s, (start, _, num_q, num_k) in enumerate(sequences_of(a) if packed else sequences_of(a)[: n.lists_batch]):
        entry, first_row = divmod(start, n.rows_a_slot) if packed else (s, 0)
        num_k = min(num_k, a.mMask.shape[3])
        first = start // queries + s if packed else 0
        i, j = torch.arange(num_q)[:, None] + num_k - num_q, torch.arange(num_k)
        window = (j >= i - n.window_left) & (j <= i + n.window_right)
        for head, row in itertools.product(range(n.lists_heads), range(min(-(-num_q // queries), n.lists_tiles))):
            number = ((entry if n.lists_batch > 1 else 0) * n.lists_heads + head) * n.lists_tiles + first + row
            shown = window & (a.mMask[entry, head, first_row : first_row + num_q, :num_k] != 0)
            for block, part in enumerate(shown[row * queries :][:queries].split(keys, 1)):
                tiles[number, block, : part.shape[0], : part.shape[1]] = part
                is_whole = part.all() and part.shape[1] == keys and (part.shape[0] == queries or not rows_are_keys)
                codes[number, block] = EMPTY if not part.any() else FULL if is_whole else number * blocks + block
    return codes, tiles


class Memory:
    """Global memory, filled with NaN, and tensors in it."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []
        self.size = 0

    def put(self, x: Tensor) -> int:
        """Where its bytes are from now on."""
        place, self.size = self.size, (self.size + x.numel() * x.element_size()) // 256 * 256 + 512
        self.parts.append((place, x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()))
        return place

    def put_last(self, x: Tensor) -> int:
        """Puts a tensor last: memory ends with the 16 bytes of its last element, as nothing is to be read behind."""
        place = self.put(x)
        self.size = place + -(-x.numel() * x.element_size() // 16) * 16
        return place

    def bytes(self) -> Any:
        """All bytes of the memory."""
        memory = np.full(self.size, 0xFF, np.uint8)
        for place, content in self.parts:
            memory[place : place + len(content)] = np.frombuffer(content, np.uint8)
        return memory


def tensor_argument(place: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A tensor as kernels get it: its address, sizes and strides, but for one that is known to be 1."""
    sizes = struct.pack(f"<{len(shape)}i", *shape)
    sizes += bytes(-len(sizes) % 8 if strides else 0)
    return struct.pack("<Q", ptx.address_of(place)) + sizes + struct.pack(f"<{len(strides)}q", *strides)


def spread(x: Tensor) -> Tensor:
    """The memory behind a tensor, as far as its strides reach."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((reach if x.numel() else 0,), (1,))


def as_given(call: Call, *, backward: bool = False) -> tuple[AttentionInputs, AttentionSpec]:
    """A call as backends are given it, with what a backward pass takes; autograd knows nothing of its q, k and v."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "learnable_sink", "mask", "bias")
    fields: dict[str, Any] = {name: getattr(call, name) for name in names}
    fields |= {name: getattr(call, name).detach() for name in ("q", "k", "v")}
    if call.block_mask is not None:
        fields["block_mask"] = call.block_mask.tables(torch.device("cpu"), backward=backward)
    inputs = AttentionInputs(**fields, max_seqlen_q=call.q.shape[-3], max_seqlen_k=call.k.shape[-3])
    left, right = call.window_size
    options = Options(
        softmax_scale=call.softmax_scale,
        window_left=left,
        window_right=0 if call.causal else right,
        softcap=call.softcap,
        deterministic=False,
        zero_padding=True,
    )
    return inputs, AttentionSpec.of(inputs, options)


@dataclasses.dataclass(frozen=True)
class Executed:
    """Kernels, executed by the interpreter, that the backend launches in the place of a compiled pass."""

    plan: Any
    draw: random.Random
    changed: ptx.Program | None  # instead of the configuration's main kernel
    lagging: ptx.Lagging | None

    def arguments(self, given: dict[str, Tensor], places: dict[str, int]) -> list[bytes]:
        """Arguments of the pass as each of its kernels gets them."""
        config, params = self.plan.config, []
        strided = {"mMask", "mContributors"}  # the last stride of others is known to be 1
        if config.pass_name == "backward" or config.features.strided_bias:
            strided.add("mBias")
        for name, x in given.items():
            if name in ("mWorkspace", "mSums", "mTables", "mBits"):
                params.append(struct.pack("<Qq", ptx.address_of(places[name]), len(x)))
            else:
                strides = x.stride() if name in strided else x.stride()[:-1]
                params.append(tensor_argument(places[name], x.shape, strides))
        return params + [
            struct.pack("<f" if isinstance(x, float) else "<i", x) for x in self.plan.numbers if x is not None
        ]

    def run(
        self,
        code: ptx.Program,
        params: list[bytes],
        memory: Any,
        tensors: dict[int, ptx.Rows],
        ctas: int,
        ctas_a_cluster: int = 1,
    ) -> None:
        """Executes a kernel, which changes memory."""
        params = [param + bytes(size - len(param)) for param, size in zip(params, code.param_sizes, strict=True)]
        ptx.run(code, params, memory, tensors, ctas, self.draw, SHARED_MEMORY, self.lagging, ctas_a_cluster)


def tensors_of(a: Any) -> dict[str, Tensor]:
    """Tensors among the arguments, in their order."""
    found: dict[str, Tensor] = {}
    for name, x in a._asdict().items():
        some = x._asdict() if name == "blocks" else {name: x}
        found |= {key: each for key, each in some.items() if isinstance(each, Tensor)}
    return found


def table_argument(name: str, place: int, x: Tensor) -> bytes:
    """A table of a mask: all but how many rows there are is known to who compiles, unless that is any number."""
    return tensor_argument(place, *((x.shape, x.shape[1:]) if name in ("codes", "order") else (x.shape[:1], ())))


def at(memory: Any, place: int, x: Tensor) -> Tensor:
    """Contents of memory in the place of a tensor."""
    found = torch.from_numpy(memory[place : place + x.numel() * x.element_size()].copy())
    return found.view(x.dtype).view(x.shape)


EVERYTHING: dict[str, Any] = {"softcap": 5.0, "sink": True, "window_size": (100, 3), "seqused": True}
