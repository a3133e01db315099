"""Things that are kept between calls, made and called, for ``tests/host/test_kept.py``."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.distributed import Sharding, context_manager, context_parallel, context_parallel_attn_varlen_func
from flash_attn_cute.runtime import kept

ROWS = 384  # three blocks
Sources = dict[str, Tensor]
Results = list[Tensor]


class Thing(NamedTuple):
    """Something that is kept, what it is made of, and calls that read it."""

    name: str
    sources: Callable[[], Sources]  # on the CPU
    make: Callable[..., Any]
    written: str = "copied"  # what becomes of sources that are written to before the first call, or "refused"

    def on(self, device: str) -> tuple[Any, Sources]:
        """A new one, and its sources."""
        sources = {name: x.to(device) for name, x in self.sources().items()}
        return self.make(**sources), sources

    def call(self, made: Any, x: Results) -> Tensor:
        """Attention that reads it; deterministic, as turns are kept, too."""
        q, k, v = x
        if isinstance(made, BlockMask):
            return flash_attn_func(q, k, v, block_mask=made, deterministic=True)
        if isinstance(made, Sharding):
            return context_parallel_attn_varlen_func(q[0], k[0], v[0], made, causal=True, deterministic=True)[None]
        with context_parallel(None, buffers=[q.detach().clone()], buffer_seq_dims=[1]):
            return flash_attn_func(q, k, v, causal=True, deterministic=True)


def third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask_mod that can be pickled, and looks nothing up."""
    return (q - k) % 3 != 1


def looked_up(places: Tensor) -> BlockMask:
    """A function that looks a tensor up."""
    mask = BlockMask.from_function(lambda b, h, q, k: places[q] >= places[k], ROWS, ROWS, device=places.device)
    return BlockMask.causal(ROWS, ROWS) & mask


def from_flex(places: Tensor) -> BlockMask:
    """Makes a mask from FlexAttention's lists of blocks."""
    flex = create_block_mask(third, 1, 1, ROWS, ROWS, device=str(places.device))
    flex.kv_num_blocks = places.view(1, 1, -1)
    return BlockMask.from_flex(flex)


def ids(step: int, *, padding: int = 0) -> Sources:
    """Documents of so many rows, and padding behind them."""
    found = torch.arange(ROWS, device="cpu") // step
    found[ROWS - padding :] = -1
    return {"ids": found}


def visible() -> Sources:
    """Blocks that every query sees some of."""
    return {"visible": torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], device="cpu").bool()}


def ordered(order: Tensor) -> BlockMask:
    """Launched in an order of its own."""
    return BlockMask.from_blocks(torch.ones(3, 3, dtype=torch.bool, device=order.device)).with_order(order)


THINGS = [
    Thing("documents", lambda: ids(50), BlockMask.documents),
    Thing("offsets", lambda: ids(200), BlockMask.documents),
    Thing("padding", lambda: ids(50, padding=40), BlockMask.documents),
    Thing(
        "prefix",
        lambda: {"length": torch.tensor([77], device="cpu")},
        lambda length: BlockMask.prefix_lm(ROWS, ROWS, length),
    ),
    Thing("blocks", visible, BlockMask.from_blocks, "refused"),
    Thing(
        "dense",
        lambda: {"mask": (torch.arange(ROWS * ROWS, device="cpu") * 7919 % 11 < 4).view(ROWS, ROWS)},
        BlockMask.from_dense,
        "refused",
    ),
    Thing(
        "indices",
        lambda: {
            "indices": torch.tensor([[[[0, 1], [1, 2], [2, 0]]]], dtype=torch.int32, device="cpu"),
            "counts": torch.tensor([[[2, 1, 2]]], dtype=torch.int32, device="cpu"),
        },
        lambda indices, counts: BlockMask.from_indices(indices, counts, seqlen_k=ROWS),
        "refused",
    ),
    Thing(
        "selection",
        lambda: {"indices": (torch.arange(2 * ROWS, dtype=torch.int32, device="cpu") * 7 % 5 - 1).view(1, 1, ROWS, 2)},
        lambda indices: BlockMask.from_selection(indices, block=100, seqlen_k=ROWS),
        "refused",
    ),
    Thing("function", lambda: {"places": torch.arange(ROWS, device="cpu") * 7 % 64}, looked_up, "refused"),
    Thing("flex", lambda: {"places": torch.full((3,), 2, dtype=torch.int32, device="cpu")}, from_flex),
    Thing("auto", visible, lambda visible: BlockMask.from_blocks(visible).with_order("auto"), "refused"),
    Thing("permutation", visible, lambda visible: BlockMask.from_blocks(visible).with_order("permutation"), "refused"),
    Thing("order", lambda: {"order": torch.tensor([2, 0, 1], device="cpu")}, ordered),
    Thing(
        "sharding",
        lambda: {"offsets": torch.tensor([0, 100, ROWS], device="cpu")},
        lambda offsets: Sharding.balanced(offsets, 1, causal=True),
    ),
    Thing("context_parallel", dict, lambda: None),
]
BY_NAME = {thing.name: thing for thing in THINGS}
MASKS = {thing.name for thing in THINGS if thing.name not in ("sharding", "context_parallel")}


def inputs(device: str, *, grad: bool = True) -> Results:
    """q, k and v, the same every time."""
    generator = torch.Generator("cpu").manual_seed(1)
    dtype, d = (torch.bfloat16, 64) if device.startswith("cuda") else (torch.float32, 8)
    made = (torch.randn(1, ROWS, 2, d, generator=generator, device="cpu").to(device, dtype) for _ in range(3))
    return [x.requires_grad_(grad) for x in made]


def results(thing: Thing, made: Any, device: str, x: Results | None = None) -> Results:
    """Out and the gradients of q, k and v, new ones if none are given."""
    x = inputs(device) if x is None else x
    out = thing.call(made, x)
    return [out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))]


@functools.cache
def expected(name: str, device: str) -> Results:
    """Results of a new thing, in no mode and on the default stream."""
    thing = BY_NAME[name]
    found = results(thing, thing.on(device)[0], device)
    context_manager._balanced.cache_clear()
    return found


def check(thing: Thing, found: Results, device: str) -> None:
    """Equal bits, as everything is deterministic."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected(thing.name, device), strict=True):
        assert torch.equal(one.cpu(), other.cpu()), f"{thing.name}: {name} differs"


def check_made(thing: Thing, made: Any, device: str) -> None:
    """Its results are those of a new thing."""
    check(thing, results(thing, made, device), device)


def tensors_kept(made: Any) -> list[Tensor]:
    """All that a mask, its nodes, or a sharding keep."""
    if isinstance(made, Sharding):
        stores = [made.plans]
    else:
        stores, nodes = [made._rows, made._tables, made._offsets], [made._node]
        for node in nodes:  # which grows
            stores.append(node._kept)
            nodes += [each for name in ("a", "b") if (each := getattr(node, name, None)) is not None]
    return [x for store in stores for each in store.values() for x in kept.tensors_of(each.value)]
