"""State that outlives a call: each kept thing in each situation gives what a new one gives in none."""

import copy
import gc
import io
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.distributed import Sharding, context_manager
from flash_attn_cute.jit import cache
from flash_attn_cute.runtime import kept
from tests.lib.checks import needs_kernels
from tests.lib.kept_things import (
    BY_NAME,
    MASKS,
    ROWS,
    THINGS,
    Results,
    Thing,
    check,
    check_made,
    expected,
    inputs,
    results,
    tensors_kept,
)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = f"file://{tmp_path_factory.mktemp('rank')}/store"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """The sharding of context_parallel has no other owner than the process."""
    context_manager._balanced.cache_clear()


# Situations. Each is given a thing and a device.


def _first_within(mode: Callable[[], AbstractContextManager[Any]], thing: Thing, device: str) -> None:
    made, _ = thing.on(device)
    with mode():
        thing.call(made, inputs(device, grad=False))
    check_made(thing, made, device)


def inference_mode_first(thing: Thing, device: str) -> None:
    """An evaluation, and then training."""
    _first_within(torch.inference_mode, thing, device)


def made_in_inference_mode(thing: Thing, device: str) -> None:
    """Sources and all, and then training."""
    with torch.inference_mode():
        made, _ = thing.on(device)
    check_made(thing, made, device)
    with torch.inference_mode():
        other = copy.deepcopy(made)
    check_made(thing, other, device)
    for each in (made, other):
        assert not any(x.is_inference() for x in tensors_kept(each)), "training may save it for a backward pass"


def made_within_a_transform(thing: Thing, device: str) -> None:
    """Results of operators within torch.func.grad have wrappers, which end with it."""
    made: list[Any] = []

    def loss(x: Tensor) -> Tensor:
        made.append(thing.on(device)[0])
        return x.sum()

    torch.func.grad(loss)(torch.ones(1, device=device))
    check_made(thing, made[0], device)


def no_grad_first(thing: Thing, device: str) -> None:
    """Rows are made first, and columns later."""
    _first_within(torch.no_grad, thing, device)


def autocast_first(thing: Thing, device: str) -> None:
    """Another dtype of q, k and v."""
    _first_within(lambda: torch.autocast(device, torch.bfloat16), thing, device)


def fake_tensors_first(thing: Thing, device: str) -> None:
    """Shapes are worked out, and nothing fake is kept. Collectives are not faked: shardings are only made there."""
    if thing.name == "sharding":
        with FakeTensorMode():
            made = Sharding.balanced([0, 100, ROWS], 1, causal=True)
        check_made(thing, made, device)
        return
    made, _ = thing.on(device)
    with FakeTensorMode():
        q = torch.empty_like(inputs(device)[0])
        out = thing.call(made, [q, q, q])
    assert isinstance(out, FakeTensor)
    assert out.shape == q.shape
    assert not any(isinstance(x, FakeTensor) for x in tensors_kept(made))
    check_made(thing, made, device)


def traced_first(thing: Thing, device: str) -> None:
    """A program that make_fx records has tables as constants; nothing of its own is kept."""
    made, _ = thing.on(device)
    x = inputs(device)
    program = make_fx(lambda *x: thing.call(made, list(x)))(*x)
    check_made(thing, made, device)
    assert torch.equal(program(*x), expected(thing.name, device)[0])


def default_device(thing: Thing, device: str) -> None:
    """One on which nothing is stored, so that what is made there shows."""
    expected(thing.name, device)
    x = inputs(device)
    made, _ = thing.on(device)
    with torch.device("meta"):
        found = results(thing, made, device, x)
    check(thing, found, device)
    check_made(thing, made, device)


def threads(thing: Thing, device: str) -> None:
    """Several use it first at once, and on a GPU each on a stream of its own."""
    made, _ = thing.on(device)
    expected(thing.name, device)
    if device != "cpu":
        torch.cuda.synchronize()
    found: list[Results] = []

    def run() -> None:
        with nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream()):
            found.append(results(thing, made, device))

    every = [threading.Thread(target=run) for _ in range(3)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    assert len(found) == len(every)
    for each in found:
        check(thing, each, device)


def compiled(thing: Thing, device: str) -> None:
    """A program that is given what has been built."""
    made, _ = thing.on(device)
    if isinstance(made, BlockMask):
        made.build(device)
    torch.compiler.reset()
    program = torch.compile(
        lambda *x: thing.call(made, list(x)), backend="eager", fullgraph=isinstance(made, BlockMask)
    )
    x = inputs(device)
    for _ in range(2):
        out = program(*x)
        check(thing, [out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))], device)
    check_made(thing, made, device)


def copied(thing: Thing, device: str) -> None:
    """A copy shares the expression, has no tables, and is as good."""
    made, _ = thing.on(device)
    results(thing, made, device)
    other = copy.copy(made)
    assert not (other.plans if isinstance(other, Sharding) else other._rows or other._tables or other._offsets)
    check_made(thing, other, device)


def deeply_copied(thing: Thing, device: str) -> None:
    """It has the sources alone, and is as good."""
    _carried(thing, device, copy.deepcopy)


def pickled(thing: Thing, device: str) -> None:
    """A pickle has no tables, and is as good."""
    made, _ = thing.on(device)
    size = len(pickle.dumps(made))
    _carried(thing, device, lambda made: pickle.loads(pickle.dumps(made)))
    results(thing, made, device)
    assert len(pickle.dumps(made)) == pytest.approx(size, abs=_PICKLED)


def _carried(thing: Thing, device: str, carry: Callable[[Any], Any]) -> None:
    made, _ = thing.on(device)
    check_made(thing, made, device)
    other = carry(made)
    assert other is not made
    assert not tensors_kept(other)
    check_made(thing, other, device)
    check_made(thing, carry(other), device)


def loaded(thing: Thing, device: str) -> None:
    """A loaded thing has its tensors where map_location says."""
    made, _ = thing.on(device)
    results(thing, made, device)
    for where in {device, "cpu", "meta"}:
        file = io.BytesIO()
        torch.save(made, file)
        file.seek(0)
        other = torch.load(file, map_location=where, weights_only=False)
        if isinstance(made, BlockMask):
            assert other.device.type == torch.device(where).type
        assert not tensors_kept(other)
        if where != "meta":
            check_made(thing, other, where)


def moved(thing: Thing, device: str) -> None:
    """To another device, and back."""
    made, sources = thing.on(device)
    assert made.to(device) is made
    if thing.name in ("function", "flex"):
        with pytest.raises(ValueError, match=f"device: expected {device}.*, as a mask_mod may look tensors up"):
            made.to("meta")
        return
    results(thing, made, device)
    other = made.to("meta")
    assert other.device.type == "meta"
    assert not tensors_kept(other)
    if device != "cpu":
        on_host = made.to("cpu")
        check_made(thing, on_host, "cpu")
        check_made(thing, on_host.to(device), device)
    if thing.written == "refused":
        made, sources = thing.on(device)
        sources.popitem()[1].zero_()
        for use in (lambda: made.to("meta"), lambda: pickle.dumps(made)):
            with pytest.raises(ValueError, match="has been written to"):
                use()


class _Things(torch.utils.data.Dataset[Any]):
    """Gives what it is given, having used it."""

    def __init__(self, thing: Thing, made: Any) -> None:
        self.thing, self.made = thing, made

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> tuple[Any, Results]:
        return self.made, results(self.thing, self.made, "cpu")


def data_loader_worker(thing: Thing, device: str) -> None:
    """The worker reads what was made here, and sends it back."""
    made, _ = thing.on(device)
    check_made(thing, made, device)
    loader = DataLoader(_Things(thing, made), batch_size=None, num_workers=1, multiprocessing_context="fork")
    ((other, found),) = loader
    check(thing, found, device)
    check_made(thing, other, device)


def forked(thing: Thing, device: str) -> None:
    """A child uses what is in memory, makes what another thread was making, and leaves the GPU of its parent alone."""
    made, _ = thing.on(device)
    expected(thing.name, device)
    results(thing, made, device)
    if isinstance(made, BlockMask):
        made.build(device, tables=True)
    new, _ = thing.on(device)
    if device == "cpu" and isinstance(new, BlockMask):
        store: kept.Store = new._node._kept if new.selection_block else new._rows
        key = "selected" if new.selection_block else torch.device("cpu")
        store[key] = unfinished = kept._Unfinished(store, key)
        kept._unfinished.add(unfinished)
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)
            signal.alarm(60)  # ends what hangs
            if device == "cpu":
                check_made(thing, made, device)
                check_made(thing, new, device)
            else:
                if isinstance(made, BlockMask):
                    with pytest.raises(RuntimeError, match=r"before it was forked"):
                        made.selected() if made.selection_block else made.tables(torch.device(device, 0), backward=True)
                del made, new
                gc.collect()
            status = 0
        finally:
            os._exit(status)
    if device == "cpu" and isinstance(new, BlockMask):
        kept._unfinished.discard(unfinished)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def written_before_use(thing: Thing, device: str) -> None:
    """It is what it was, or says that it cannot be."""
    made, sources = thing.on(device)
    for x in sources.values():
        x.zero_()
    if thing.written == "copied":
        check_made(thing, made, device)
    else:
        name = "mask_mod" if thing.name == "function" else ""
        with pytest.raises(ValueError, match=rf"^{name}.*: expected what it was when the BlockMask was made of it"):
            results(thing, made, device)


def written_between_passes(thing: Thing, device: str) -> None:
    """Columns are of the rows that there are."""
    made, sources = thing.on(device)
    with torch.no_grad():
        thing.call(made, inputs(device, grad=False))
    for x in sources.values():
        x.zero_()
    check_made(thing, made, device)


def written_afterwards(thing: Thing, device: str) -> None:
    """Nothing reads them any more."""
    made, sources = thing.on(device)
    check_made(thing, made, device)
    for x in sources.values():
        x.zero_()
    check_made(thing, made, device)


def other_strides(thing: Thing, device: str) -> None:
    """Sources at one address, strided and not, of two dtypes, come to things of their own."""
    _, sources = thing.on(device)
    strided = {name: torch.stack((x, x.flip(-1)), -1)[..., 0] for name, x in sources.items()}
    made = thing.make(**strided)
    check_made(thing, made, device)
    if thing.name not in ("order", "sharding", "flex", "function"):  # whose numbers would not be valid
        same_address = {name: x.as_strided(x.shape, sources[name].stride()) for name, x in strided.items()}
        clones = {name: x.clone() for name, x in same_address.items()}
        found = results(thing, thing.make(**same_address), device)
        for one, other in zip(found, results(thing, thing.make(**clones), device), strict=True):
            assert torch.equal(one, other)
    check_made(thing, made, device)
    for dtype in (torch.int32, torch.int64):
        others = {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in sources.items()}
        check_made(thing, thing.make(**others), device)


def second_stream(thing: Thing, device: str) -> None:
    """Made behind a long wait, and read on another stream at once; then dropped while that one reads."""
    expected(thing.name, device)
    x = inputs(device)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for waits_first in (True, False):
        made, _ = thing.on(device)
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            if waits_first:
                torch.cuda._sleep(50_000_000)
            thing.call(made, x)
        with torch.cuda.stream(other):
            if not waits_first:
                torch.cuda._sleep(50_000_000)
            found = results(thing, made, device, x)
        del made
        context_manager._balanced.cache_clear()
        with torch.cuda.stream(one):  # memory of the things must not come back here
            junk = [torch.full((n,), 7, dtype=torch.int32, device=device) for n in (64, 512, 4096) for _ in range(40)]
        check(thing, found, device)
        del junk


def captured(thing: Thing, device: str) -> None:
    """A graph gives the same whenever it is replayed."""
    made, _ = thing.on(device)
    graph, found, _read = _capture(thing, made, device)
    check(thing, found, device)
    graph.replay()
    check(thing, found, device)


def captured_on_another_gpu(thing: Thing, device: str) -> None:
    """The GPU that captures is not the current one."""
    made, _ = thing.on("cuda:1")
    expected(thing.name, "cuda:1")
    unbuilt, _ = thing.on("cuda:1")
    with torch.cuda.device(1):
        graph, found, _read = _capture(thing, made, "cuda:1", current=0)
        check(thing, found, "cuda:1")
        del graph
        if thing.name in MASKS - {"indices", "selection"}:
            stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            is_refused = pytest.raises(RuntimeError, match="expected one that has been built")
            with torch.cuda.graph(graph, stream=stream), torch.cuda.device(0), is_refused:
                unbuilt.tables(torch.device("cuda", 1), backward=True)


def dropped_after_capture(thing: Thing, device: str) -> None:
    """A graph keeps what it reads of a mask; q, k and v are their owner's to keep."""
    made, _ = thing.on(device)
    graph, found, _read = _capture(thing, made, device)
    del made
    context_manager._balanced.cache_clear()
    gc.collect()
    torch.cuda.synchronize()
    junk = [torch.full((n,), 7, dtype=torch.int32, device=device) for n in (64, 512, 4096, 65536) for _ in range(200)]
    for x in found:
        x.zero_()
    graph.replay()
    check(thing, found, device)
    del junk


def _capture(
    thing: Thing, made: Any, device: str, current: int | None = None
) -> tuple[torch.cuda.CUDAGraph, Results, Results]:
    """A graph that has been replayed once, its results, and the q, k and v that it reads."""
    expected(thing.name, device)
    x = inputs(device)
    if isinstance(made, BlockMask):
        made.build(device)

    def step() -> Results:
        with nullcontext() if current is None else torch.cuda.device(current):
            return results(thing, made, device, x)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    return graph, found, x


BOTH, GPU, CPU = ("cpu", "cuda"), ("cuda",), ("cpu",)
ALL = {thing.name for thing in THINGS}
OWNED = ALL - {"context_parallel"}
_PICKLED = 64  # bytes by which pickles of equal things differ, as what they share is counted otherwise
PICKLED = OWNED - {"function"}  # whose function is of a function
# In which devices a situation can be, and which things it can be about.
SITUATIONS: dict[Callable[[Thing, str], None], tuple[tuple[str, ...], set[str]]] = {
    second_stream: (GPU, ALL),
    threads: (BOTH, ALL - {"context_parallel"}),  # which puts attention of all threads in its place
    inference_mode_first: (BOTH, ALL),
    made_in_inference_mode: (BOTH, OWNED),
    made_within_a_transform: (BOTH, OWNED - {"function"}),  # which keeps the wrappers that it looks up
    no_grad_first: (BOTH, ALL),
    autocast_first: (BOTH, ALL),
    fake_tensors_first: (BOTH, OWNED),
    traced_first: (BOTH, MASKS),
    default_device: (BOTH, ALL),
    compiled: (BOTH, MASKS),  # tests of ranks compile the others
    captured: (GPU, MASKS),  # Gloo, which ranks use here, is on the host
    captured_on_another_gpu: (GPU, MASKS),
    dropped_after_capture: (GPU, MASKS),
    copied: (BOTH, OWNED),
    deeply_copied: (BOTH, OWNED),
    pickled: (BOTH, PICKLED),
    loaded: (BOTH, PICKLED - {"flex"}),
    moved: (BOTH, MASKS),
    data_loader_worker: (CPU, PICKLED),
    forked: (BOTH, OWNED),
    written_before_use: (BOTH, OWNED),
    written_between_passes: (BOTH, OWNED),
    written_afterwards: (BOTH, OWNED),
    other_strides: (BOTH, OWNED),
}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# One backward pass on the CPU is enough: it starts a thread for each GPU that PyTorch finds.
forks_autograd = pytest.mark.skipif(
    torch.cuda.device_count() > 0,
    reason="PyTorch refuses autograd in children of a process that finds GPUs; run it with CUDA_VISIBLE_DEVICES=''",
)


def marks_of(situation: Callable[[Thing, str], None], device: str) -> list[pytest.MarkDecorator]:
    """The GPUs that a cell needs, or that there must not be."""
    if situation is captured_on_another_gpu:
        return [needs_kernels, two_gpus]
    if situation in (data_loader_worker, forked) and device == "cpu":
        return [forks_autograd]
    return [needs_kernels] if device == "cuda" else []


CELLS = [
    pytest.param(
        thing, situation, device, id=f"{thing.name}-{situation.__name__}-{device}", marks=marks_of(situation, device)
    )
    for situation, (devices, names) in SITUATIONS.items()
    for device in devices
    for thing in THINGS
    if thing.name in names
]


@pytest.mark.parametrize(("thing", "situation", "device"), CELLS)
def test_kept(thing: Thing, situation: Callable[[Thing, str], None], device: str) -> None:
    situation(thing, device)


def test_tensors_of_inference_mode_are_copied() -> None:
    """PyTorch counts no writes to them."""
    thing = BY_NAME["dense"]
    with torch.inference_mode():
        made, sources = thing.on("cpu")
        sources["mask"].zero_()
    check_made(thing, made, "cpu")


def test_failures_leave_nothing() -> None:
    def fails(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise ZeroDivisionError

    made = BlockMask.from_function(fails, ROWS, ROWS)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            flash_attn_func(*inputs("cpu"), block_mask=made)


def test_an_interrupt_leaves_nothing() -> None:
    """It may come between any two lines; others that ask would wait for ever."""

    class Interrupted(dict[Any, Any]):
        def setdefault(self, key: Any, default: Any = None) -> Any:
            super().setdefault(key, default)
            raise KeyboardInterrupt

    store = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        kept.made(store, "key", torch.device("cpu"), list)
    assert not store


def test_forked_children_make_what_others_have_begun() -> None:
    """The fork may come as soon as others can see that something is being made."""
    codes = []

    class Forked(dict[Any, Any]):
        def setdefault(self, key: Any, default: Any = None) -> Any:
            there = super().setdefault(key, default)
            child = os.fork()
            if not child:
                os._exit(len(self))
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return there

    assert kept.made(Forked(), "key", torch.device("cpu"), list) == []
    assert codes == [0]


def test_ids_of_sources_are_not_given_to_others() -> None:
    """A tensor in the place of one that is gone may have its id, and as many writes."""
    named = {"mask_mod": [torch.zeros(1)]}
    source, sources = weakref.ref(named["mask_mod"][0]), kept.Sources(named)
    named.clear()
    assert source() is not None
    with pytest.raises(ValueError, match="mask_mod: expected what it was"):
        sources.use({"mask_mod": [torch.zeros(1)]})


def test_copies_of_parts_are_not_of_the_whole() -> None:
    part = BlockMask.from_dense(torch.ones(9 * ROWS, ROWS, dtype=torch.bool)[:ROWS])
    whole = len(pickle.dumps(BlockMask.from_dense(torch.rand(ROWS, ROWS) < 0.5)))
    assert len(pickle.dumps(part)) == pytest.approx(whole, abs=_PICKLED)


def test_masks_go_with_their_last_reference() -> None:
    """Nothing waits for the garbage collector, which comes late and does not know how large tables are."""
    gc.disable()
    try:
        made, _ = BY_NAME["documents"].on("cpu")
        results(BY_NAME["documents"], made, "cpu")
        node = weakref.ref(made._node)
        del made
        assert node() is None
    finally:
        gc.enable()


def test_forked_children_may_compile() -> None:
    """A thread of the parent's that compiles at the fork does not go on in the child."""
    with cache._lock:
        child = os.fork()
        if not child:
            os._exit(0 if cache._lock.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_other_looks_of_one_address() -> None:
    """Plans are found by shape, stride and dtype of q, k and v."""
    made, _ = BY_NAME["documents"].on("cpu")
    halves = torch.randn(1, ROWS, 4, 16).bfloat16()
    memory = halves.view(torch.float32)
    for x in (memory[:, :, :2], memory[:, :, ::2], halves[:, :, :2, :8]):
        own = x.clone()
        new, _ = BY_NAME["documents"].on("cpu")
        assert torch.equal(flash_attn_func(x, x, x, block_mask=made), flash_attn_func(own, own, own, block_mask=new))
