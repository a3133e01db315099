"""Everything that outlives a call, in every way in which calls come to it."""

import copy
import gc
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_cute import BlockMask, flash_attn_func, plan
from flash_attn_cute.distributed import Sharding, context_parallel_attn_func
from flash_attn_cute.distributed.context import _balanced

S = 384
Results = list[Tensor]


def blocks_of(device: str) -> Tensor:
    return torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool, device=device)


def far(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) % 3 != 1


class Sees:
    """A ``mask_mod`` that looks a tensor up, and can be pickled."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether a query sees a key."""
        return self.table[q] >= k


def flex_mask(device: str) -> BlockMask:
    table = torch.arange(S, device=device)
    return BlockMask.from_flex(create_block_mask(Sees(table), None, None, S, S, device=device))


# Each makes one thing of which something is kept, and the tensor that it is made of, if that is large.
MASKS: dict[str, Callable[[str], tuple[BlockMask, Tensor | None]]] = {
    "causal": lambda device: (BlockMask.causal(S, S).with_order("spt"), None),
    "offsets": lambda device: (BlockMask.documents(torch.arange(S, device=device) // 192), None),
    "documents": lambda device: (BlockMask.documents(torch.arange(S, device=device) // 100), None),
    "prefix": lambda device: (BlockMask.prefix_lm(S, S, torch.tensor([100], device=device)), None),
    "order": lambda device: (
        BlockMask.from_blocks(blocks_of(device)).with_order(torch.tensor([1, 0, 2], dtype=torch.int32, device=device)),
        None,
    ),
    "searched": lambda device: (BlockMask.from_blocks(blocks_of(device)).with_order("permutation"), None),
    "blocks": lambda device: _with_source(BlockMask.from_blocks, blocks_of(device)),
    "indices": lambda device: _with_source(
        partial(BlockMask.from_indices, seqlen_k=S), torch.tensor([[[[0, 2], [0, 1], [1, 2]]]], device=device)
    ),
    "dense": lambda device: _with_source(
        BlockMask.from_dense, torch.ones(S, S, dtype=torch.bool, device=device).tril()
    ),
    "function": lambda device: _with_source(
        lambda table: BlockMask.from_function(Sees(table), S, S, device=device), torch.arange(S, device=device)
    ),
    "flex": lambda device: (flex_mask(device), None),
}
SHARDINGS: dict[str, Callable[[], Sharding]] = {
    "sharding": lambda: Sharding.balanced([0, S], 1, causal=True),
    "context_parallel": lambda: _balanced(S, 1),
}
OWNERS = (*MASKS, *SHARDINGS)


def _with_source(make: Callable[[Tensor], BlockMask], source: Tensor) -> tuple[BlockMask, Tensor]:
    return make(source), source


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    """A group of one rank; and one thread, as those of OpenMP do not live on in forked children."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    _balanced.cache_clear()


def new(name: str, device: str = "cpu") -> Any:
    """An owner of which nothing is kept yet."""
    return MASKS[name](device)[0] if name in MASKS else SHARDINGS[name]()


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(1, S, 2, 64, generator=draw, device="cpu").to(device, dtype) for _ in range(3)]


def forward(owner: Any, qkv: list[Tensor]) -> Tensor:
    if isinstance(owner, BlockMask):
        result: Tensor = flash_attn_func(*qkv, block_mask=owner, deterministic=True)
        return result
    q, k, v = qkv
    return context_parallel_attn_func(q, k, v, owner, causal=True)


def both(owner: Any, qkv: list[Tensor] | None = None) -> Results:
    """Out and all gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv or inputs()]
    out = forward(owner, leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def equal(a: Results, b: Results) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def under(mode: Callable[[], Any]) -> Callable[[Any], Any]:
    """The first call in a mode."""

    def first(owner: Any) -> Any:
        qkv = inputs()
        with mode():
            forward(owner, qkv)
        return owner

    return first


def fakes(owner: Any) -> Any:
    mode = FakeTensorMode()
    qkv: list[Tensor] = [mode.from_tensor(x) for x in inputs()]
    if isinstance(owner, Sharding):
        with mode:
            return Sharding.balanced([0, S], 1, causal=True)
    with mode:
        assert forward(owner, qkv).shape == qkv[0].shape
    return owner


def threads(owner: Any) -> Any:
    """Four at once, the first calls of all."""
    start, seen = threading.Barrier(4), []

    def call() -> None:
        start.wait()
        seen.append(both(owner))

    running = [threading.Thread(target=call) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(equal(seen[0], each) for each in seen[1:])
    assert len(seen) == 4
    return owner


def compiled(owner: Any) -> Any:
    """Built before, as programs want it."""
    if isinstance(owner, BlockMask):
        owner.build("cpu")
    torch._dynamo.reset()
    program = torch.compile(forward, backend="eager", fullgraph=True)
    qkv = inputs()
    torch.testing.assert_close(program(owner, qkv), forward(new_like(owner), qkv))
    return owner


def new_like(owner: Any) -> Any:
    return copy.copy(owner)


def saved(owner: Any) -> Any:
    file = io.BytesIO()
    torch.save(owner, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def _in_child(owner: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send([x.numpy() for x in both(owner)])


def forked(owner: Any) -> Any:
    """In a child that was forked while another thread was making something of the owner's."""
    both(owner)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(owner, theirs))
    child.start()
    assert ours.poll(60), "the child hangs"
    assert equal([torch.from_numpy(x) for x in ours.recv()], both(owner))
    child.join()
    return owner


class OneOwner(torch.utils.data.Dataset[Any]):
    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.owner


def from_worker(owner: Any) -> Any:
    both(owner)
    loader = torch.utils.data.DataLoader(
        OneOwner(owner), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    (received,) = loader
    return received


WAYS: dict[str, Callable[[Any], Any]] = {
    "thread": threads,
    "inference_mode first": under(torch.inference_mode),
    "no_grad first": under(torch.no_grad),
    "autocast first": under(partial(torch.autocast, "cpu", torch.bfloat16)),
    "FakeTensorMode first": fakes,
    "default device": under(partial(torch.device, "meta")),
    "torch.compile": compiled,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda owner: pickle.loads(pickle.dumps(owner)),
    "torch.save, torch.load": saved,
    "fork": forked,
    "DataLoader worker": from_worker,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.filterwarnings("ignore")
def test_kept(name: str, way: str) -> None:
    """Whatever comes first, an owner then trains as a new one does."""
    expected = both(new(name))
    assert equal(both(WAYS[way](new(name))), expected)


CHECKED = ("blocks", "indices", "dense", "function")
COPIED: dict[str, Callable[[], tuple[BlockMask, Tensor]]] = {
    "ids": lambda: _with_source(BlockMask.documents, torch.arange(S) // 100),
    "ids of offsets": lambda: _with_source(BlockMask.documents, torch.arange(S) // 192),
    "cu_seqlens": lambda: _with_source(
        lambda x: BlockMask.documents(cu_seqlens=x, seqlen_q=S), torch.tensor([0, 100, S])
    ),
    "length": lambda: _with_source(partial(BlockMask.prefix_lm, S, S), torch.tensor([100])),
    "order": lambda: _with_source(
        lambda x: BlockMask.from_blocks(blocks_of("cpu")).with_order(x), torch.tensor([1, 0, 2], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("use", ["call", "to", "pickle"])
def test_sources_written_to_before_the_first_use(name: str, use: str) -> None:
    mask, source = MASKS[name]("cpu")
    assert source is not None
    source.fill_(0)
    uses = {"call": lambda: both(mask), "to": lambda: mask.to("meta"), "pickle": lambda: pickle.dumps(mask)}
    refusal = "cannot be moved" if (name, use) == ("function", "to") else "has been written to since"
    with pytest.raises(ValueError, match=refusal):
        uses[use]()


@pytest.mark.parametrize("name", CHECKED)
def test_sources_written_to_after_the_first_use(name: str) -> None:
    """Whether the first pass has been a forward one or a backward one."""
    expected = both(new(name))
    for first in (both, lambda mask: forward(mask, inputs())):
        mask, source = MASKS[name]("cpu")
        assert source is not None
        first(mask)
        source.fill_(0)
        assert equal(both(mask), expected)


@pytest.mark.parametrize("name", COPIED)
def test_sources_that_are_copied(name: str) -> None:
    expected = both(COPIED[name]()[0])
    mask, source = COPIED[name]()
    source.zero_()
    assert equal(both(mask), expected)


def test_inference_tensors_are_copied() -> None:
    with torch.inference_mode():
        mask, source = MASKS["dense"]("cpu")
        assert source is not None
        source.zero_()
    assert equal(both(mask), both(new("dense")))


def test_failures_leave_nothing() -> None:
    def fails(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise ZeroDivisionError

    mask = BlockMask.from_function(fails, S, S)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            both(mask)


def test_copies_have_no_tables() -> None:
    mask = BlockMask.from_dense(torch.rand(S, S) < 0.5)
    before = len(pickle.dumps(mask))
    mask.build(tables=True)
    assert len(pickle.dumps(mask)) == before
    assert len(pickle.dumps(BlockMask.from_dense(torch.ones(9 * S, S, dtype=torch.bool)[:S]))) == before


def test_masks_go_with_their_last_reference() -> None:
    """Nothing waits for the garbage collector, which comes late and does not know how large tables are."""
    gc.disable()
    try:
        mask = new("documents")
        both(mask)
        ids = id(mask)
        alive = torch.utils.weak.WeakIdRef(mask._node)
        del mask
        assert alive() is None, ids
    finally:
        gc.enable()


def test_moved() -> None:
    for name in MASKS:
        mask = new(name)
        assert mask.to("cpu") is mask
        if name in ("function", "flex"):
            with pytest.raises(ValueError, match="device: expected cpu, as a mask_mod may look tensors up"):
                mask.to("meta")
        elif mask.device is not None:
            moved = mask.to("meta")
            assert moved.device == torch.device("meta")
            assert moved.sizes == mask.sizes


def test_plans_of_calls_hold_no_tensors() -> None:
    both(new("dense"))
    seen = [*plan._kept.items()]
    assert seen
    waiting: list[Any] = [seen]
    while waiting:
        x = waiting.pop()
        assert not isinstance(x, Tensor)
        waiting += x if isinstance(x, (list, tuple)) else x.values() if isinstance(x, dict) else []


def test_other_looks_of_one_address() -> None:
    """Plans are found by shape, stride and dtype."""
    mask = new("documents")
    halves = torch.randn(1, S, 4, 128).bfloat16()
    memory = halves.view(torch.float32)
    for x in (memory[:, :, :2], memory[:, :, ::2], halves[:, :, :2, :64]):
        own = x.clone()
        assert torch.equal(forward(mask, [x, x, x]), forward(new("documents"), [own, own, own]))
