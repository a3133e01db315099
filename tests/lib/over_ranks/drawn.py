"""Plain calls drawn with every option, and the same over the ranks: by the functions, and within context_parallel.

All ranks draw the same. What is drawn follows from a seed and a number, which a failure names. Unwritten memory is
NaN, and so is the padding of all inputs and of the gradients of results; padding of results has to be zero, and -inf in
lse. Values are compared, never flags: with those of one process in float64, within what is allowed for the
error that one process makes at the lower precision.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.distributed import (
    Segment,
    Sharding,
    context_parallel,
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    rank_of,
)
from flash_attn_cute.distributed.head_trade import refusal
from tests.lib import checks

Attention = Callable[..., tuple[Tensor, ...]]
Results = dict[str, Tensor]
AT_LEAST = {"cpu": 48, "cuda": 2}  # calls, however long they take; on a GPU most need kernels of their own
ON_A_GPU = 8  # calls for each second of FUZZ_SECONDS: as many as a rehearsal has drawn


@dataclass(frozen=True)
class Drawn:
    """A plain call, and what is around it."""

    dense: bool
    batch: int  # entries of a dense batch; else 1
    cu_q: list[int]  # of a dense batch [0, rows]
    cu_k: list[int]
    total_q: int
    total_k: int
    used_q: list[int] | None
    used_k: list[int] | None
    nheads: int
    nheads_k: int
    d: int
    d_v: int
    dtype: torch.dtype
    autocast: bool
    options: dict[str, Any]
    sink: bool
    loss: str
    around: str
    strides: str
    block_mask: BlockMask | None

    @property
    def rows(self) -> int:
        """The dimension of rows."""
        return int(self.dense)

    @property
    def of_the_same_rows(self) -> bool:
        """Whether queries and keys are, as within context_parallel."""
        return (self.cu_q, self.total_q) == (self.cu_k, self.total_k)


def drawn(draw: random.Random, device: str) -> Drawn:
    """Any call; on a GPU mostly one for kernels."""
    dense, longer = draw.random() < 0.35, draw.random() < 0.4
    has_mask = draw.random() < 0.25
    lengths = [draw.choice([0, 1, 3, draw.randint(1, 40), draw.randint(20, 90)]) for _ in range(draw.randint(0, 5))]
    lengths = [draw.randint(1, 90)] if dense else lengths
    lengths_k = [length + draw.choice([0, 1, draw.randint(0, 30)]) for length in lengths] if longer else lengths
    if draw.random() < 0.5:
        lengths, lengths_k = lengths_k, lengths
    before, behind = (0, 0) if dense else (0 if has_mask else draw.choice([0, 0, 1, 7]), draw.choice([0, 0, 5]))
    cu_q, cu_k = (list(accumulate(x, initial=before)) for x in (lengths, lengths_k))
    batch = draw.randint(1, 3) if dense else 1
    used_q, used_k = (
        [draw.choice([n, draw.randint(0, n)]) for n in (x * batch if dense else x)] if draw.random() < 0.4 else None
        for x in (lengths, lengths_k)
    )
    nheads_k = draw.randint(1, 4)
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float64])
    if device == "cpu" and draw.random() < 0.6:
        dtype = torch.float64
    options: dict[str, Any] = {
        "causal": draw.random() < 0.5,
        "window_size": tuple(draw.choice([None, None, 0, draw.randint(1, 40)]) for _ in range(2)),
        "softcap": draw.choice([0.0, 0.0, 2.0]),
        "softmax_scale": draw.choice([None, 0.3]),
        "deterministic": draw.random() < 0.3,
        "zero_padding": draw.random() < 0.5,
        "return_max_logits": draw.random() < 0.3,
    }
    total_q, total_k = cu_q[-1] + behind, cu_k[-1] + behind
    return Drawn(
        dense, batch, cu_q, cu_k, total_q, total_k, used_q, used_k,
        nheads=nheads_k * draw.choice([1, 2]),
        nheads_k=nheads_k,
        d=8 * draw.randint(1, 3) if device == "cpu" else 64,  # of which kernels are compiled
        d_v=8 * draw.randint(1, 2) if device == "cpu" else 64,
        dtype=dtype,
        autocast=dtype == torch.float32 and draw.random() < 0.5,
        options=options,
        sink=draw.random() < 0.3,
        loss=draw.choice(["out", "out", "both", "lse"]),
        around=draw.choice(["nothing"] * 8 + ["checkpoint", "reentrant checkpoint", "inference"] * 2 + ["compile"]),
        strides=draw.choice(["contiguous", "slice", "heads first", "one head"]),
        block_mask=random_mask(draw, batch, total_q, total_k, device) if has_mask and total_q and total_k else None,
    )  # fmt: skip


def random_mask(draw: random.Random, batch: int, seqlen_q: int, seqlen_k: int, device: str) -> BlockMask:
    """Elements at random, of each entry or of all, and a window or documents over them."""
    visible = torch.rand(draw.choice([1, batch]), 1, seqlen_q, seqlen_k) < draw.choice([0.1, 0.6])
    mask = BlockMask.from_dense(visible.to(device))
    return mask & BlockMask.window(seqlen_q, seqlen_k, left=30) if draw.random() < 0.5 else mask


def tensors_of(call: Drawn, device: str) -> Results:
    """All rows of q, k and v, the sink, and the gradients of out and lse, in float64; NaN in padding."""
    shape: dict[str, tuple[int, ...]] = {
        side: (call.batch, total) if call.dense else (total,)
        for side, total in (("q", call.total_q), ("k", call.total_k))
    }
    x = {
        "q": torch.randn(*shape["q"], call.nheads, call.d),
        "k": torch.randn(*shape["k"], call.nheads_k, call.d),
        "v": torch.randn(*shape["k"], call.nheads_k, call.d_v),
        "dout": torch.randn(*shape["q"], call.nheads, call.d_v),
        "dlse": torch.randn(*shape["q"], call.nheads),
    }
    padding_q, padding_k = (
        padding(call, call.cu_q, call.used_q, shape["q"]),
        padding(call, call.cu_k, call.used_k, shape["k"]),
    )
    for name, values in x.items():
        if name in ("k", "v") and call.strides == "one head":
            values.copy_(values[..., :1, :].clone())
        values[padding_k if name in ("k", "v") else padding_q] = torch.nan
    x["dlse"] = x["dlse"].transpose(-1, -2)
    if call.sink:
        x["sink"] = torch.randn(call.nheads)
    # What low precision would round is rounded for all.
    low = torch.bfloat16 if call.autocast else call.dtype
    return {name: values.to(low).to(device, torch.float64) for name, values in x.items()}


def padding(call: Drawn, cu: list[int], used: list[int] | None, shape: tuple[int, ...]) -> Tensor:
    """Which rows are padding."""
    found = torch.ones(shape, dtype=torch.bool)
    lengths = [b - a for a, b in pairwise(cu)]
    starts = cu[:-1] if not call.dense else [0] * call.batch
    for entry, (start, length) in enumerate(zip(starts, used or lengths * call.batch, strict=True)):
        (found[entry] if call.dense else found)[start : start + length] = False
    return found


def laid_out(x: Tensor, strides: str) -> Tensor:
    """A leaf with these numbers in other memory."""
    if strides == "slice":
        x = torch.cat((x, torch.full_like(x, torch.nan)), -1)[..., : x.shape[-1]]
    elif strides == "heads first":
        x = x.transpose(-3, -2).contiguous().transpose(-3, -2)
    elif strides == "one head":
        x = x[..., :1, :].expand_as(x)
    return x.detach().requires_grad_()


def results(call: Drawn, x: Results, dtype: torch.dtype, attend: Attention, around: str) -> Results:
    """Out, lse and, but for inference, all gradients of a function of q, k, v and the sink."""
    leaves = {name: laid_out(x[name].to(dtype), call.strides if name in "kv" else "contiguous") for name in "qkv"}
    if call.strides != "one head":
        leaves["q"] = laid_out(x["q"].to(dtype), call.strides)
    # Gradients of a sink are rounded on each rank.
    sink = x["sink"].to(torch.promote_types(dtype, torch.float32)).requires_grad_() if "sink" in x else None
    arguments = (*leaves.values(), sink)
    has_autocast = call.autocast and dtype == torch.float32
    with torch.autocast(x["q"].device.type, torch.bfloat16) if has_autocast else nullcontext():
        if "checkpoint" in around:
            out, lse, *others = checkpoint(attend, *arguments, use_reentrant=around.startswith("reentrant"))
        elif around == "compile":
            torch._dynamo.reset()
            step = torch.compile(attend, backend="aot_eager", fullgraph=call.block_mask is None)
            out, lse, *others = step(*arguments)
        else:
            with torch.inference_mode(around == "inference"):
                out, lse, *others = attend(*arguments)
    found = {"out": out.detach(), "lse": lse.detach(), **dict(zip(["max_logits"], others, strict=False))}
    if around == "inference":
        return found
    given = [(out, x["dout"].to(out.dtype)), (lse, x["dlse"].to(lse.dtype))]
    given = {"out": given[:1], "lse": given[1:], "both": given}[call.loss]
    torch.autograd.backward([y for y, _ in given], [grad for _, grad in given])
    for name, leaf in (*leaves.items(), ("sink", sink)):
        if leaf is not None:
            found[f"d{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


def plain(call: Drawn, device: str, **others: Any) -> Attention:
    """The call of one process, and what calls within context_parallel are."""
    options = {**call.options, "return_lse": True, **others}
    for name in ("seqused_q", "seqused_k"):
        used = call.used_q if name == "seqused_q" else call.used_k
        options[name] = None if used is None else torch.tensor(used, dtype=torch.int32, device=device)
    if call.dense:
        return lambda q, k, v, sink: flash_attn_func(q, k, v, learnable_sink=sink, **options)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (call.cu_q, call.cu_k))
    longest = [max((b - a for a, b in pairwise(cu)), default=0) for cu in (call.cu_q, call.cu_k)]
    return lambda q, k, v, sink: flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, learnable_sink=sink, **options)


def sharding_of(call: Drawn, cu: list[int], total: int, draw: random.Random) -> Sharding:
    """Any layout of rows, which keeps the lengths that a call gives by tensors on a device."""
    num_ranks, mask = dist.get_world_size(), {name: call.options[name] for name in ("causal", "window_size")}
    if draw.random() < 0.3:  # in balance under each window of several layers
        mask = {"window_sizes": [(16, 0), (None, 0), (50, 7)]}
    layout = draw.choice(["balanced", "contiguous", "random"])
    if layout == "balanced":
        sharding = Sharding.balanced(cu, num_ranks, total=total, **mask)
    elif layout == "contiguous":
        sharding = Sharding.contiguous(cu, num_ranks, total=total)
    else:
        sharding = scattered(cu, total, num_ranks, draw)
    return sharding.with_lengths(seqused_q=call.used_q, seqused_k=call.used_k)


def scattered(cu: list[int], total: int, num_ranks: int, draw: random.Random) -> Sharding:
    """Runs of any length on any ranks; some ranks have no rows."""
    segments: list[list[Segment]] = [[] for _ in range(num_ranks)]
    allowed = draw.sample(range(num_ranks), draw.randint(1, num_ranks))
    spans = [(document, start, stop) for document, (start, stop) in enumerate(pairwise(cu))]
    for document, start, stop in [*spans, (-1, 0, cu[0]), (-1, cu[-1], total)]:
        while start < stop:
            end = min(stop, start + draw.choice([1, 5, 20, 100]))
            segments[draw.choice(allowed)].append(Segment(document, start, end))
            start = end
    return Sharding(tuple(cu), total, tuple(map(tuple, segments)))


def lengths_given(call: Drawn, used: list[int] | None, draw: random.Random, device: str) -> Any:
    """Real lengths as functions over ranks take them: on the host or on a GPU, for which another device may stand.

    Not in compiled programs, whose operators run nothing where a tensor has no memory.
    """
    if used is None:
        return None
    other = device if device != "cpu" or call.around == "compile" else "meta"
    elsewhere = torch.tensor(used, dtype=torch.int32, device=other)
    return draw.choice([used, torch.tensor(used, dtype=torch.int32), elsewhere])


def ways_of(call: Drawn, draw: random.Random, meshes: list[Any]) -> Iterator[dict[str, Any]]:
    """A group and a method that can serve the call; twice."""
    size = dist.get_world_size()
    for _ in range(2):
        group = draw.choice([None, *(meshes if call.block_mask is None else meshes[:2])])
        is_grid = group is not None and group.ndim == 2
        method = draw.choice(["auto", "all_to_all", *(["ring", "all_gather"] if call.block_mask is None else [])])
        if is_grid and method == "all_to_all":
            method = "auto"
        trading = group.size(1) if is_grid else size if method == "all_to_all" or call.block_mask is not None else 1
        if refusal(call.nheads, call.nheads_k, trading) is None:
            yield {"group": group, "method": method}


@contextmanager
def nothing_unwritten() -> Iterator[None]:
    """Unwritten memory is NaN meanwhile."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(call: Drawn, draw: random.Random, device: str, meshes: list[Any]) -> int:
    """Compares what ranks give of a call with what one process gives; returns how often."""
    x = tensors_of(call, device)
    masked = {"block_mask": call.block_mask}
    true = results(
        call, x, torch.float64, plain(call, device, **masked, zero_padding=True, backend="portable"), "nothing"
    )
    low = results(call, x, call.dtype, plain(call, device, **masked, zero_padding=True), "nothing")
    sharding = sharding_of(call, call.cu_q, call.total_q, draw)
    keys = (
        sharding if call.of_the_same_rows and draw.random() < 0.7 else sharding_of(call, call.cu_k, call.total_k, draw)
    )
    compared = 0
    for way in ways_of(call, draw, meshes):
        rank = rank_of(way["group"])

        def own(name: str, values: Tensor, rank: int = rank) -> Tensor:
            dim = call.rows + 1 if name in ("lse", "dlse") else call.rows
            of = keys if name in ("k", "v", "dk", "dv") else sharding
            return values if name in ("sink", "dsink", "max_logits") else of.shard(values, rank, dim)

        mine, *expected = ({name: own(name, values) for name, values in those.items()} for those in (x, true, low))
        function: Any = context_parallel_attn_func if call.dense else context_parallel_attn_varlen_func
        used = {
            "seqused_q": lengths_given(call, call.used_q, draw, device),
            "seqused_k": lengths_given(call, call.used_k, draw, device),
        }
        given = {**call.options, **used, **masked, **way, "return_lse": True}
        by_function: Attention = lambda q, k, v, sink, given=given, function=function: function(  # noqa: E731
            q, k, v, sharding, None if keys is sharding else keys, learnable_sink=sink, **given
        )
        assert_same(call, results(call, mine, call.dtype, by_function, call.around), *expected)
        compared += 1
        refused: dict[str, Any] = {
            "mask": torch.ones((), dtype=torch.bool, device=device),
            "bias": torch.zeros((), device=device),
        }
        names = draw.sample(["mask", "bias"], draw.randint(0, 1))
        for name in names:
            with pytest.raises(ValueError, match=f"^{name}: expected None"):
                results(call, mine, call.dtype, partial(by_function, given={**given, name: refused[name]}), "nothing")
        if keys is not sharding:
            continue
        with context_parallel(way["group"], method=way["method"], sharding=sharding):
            if call.block_mask is None:
                assert_same(call, results(call, mine, call.dtype, plain(call, device), call.around), *expected)
                compared += 1
            else:
                names, refused = ["block_mask"], masked
            for name in names:
                with pytest.raises(ValueError, match=f"^{name}: expected"):
                    results(call, mine, call.dtype, plain(call, device, **{name: refused[name]}), "nothing")
    return compared


def assert_same(call: Drawn, got: Results, true: Results, low: Results) -> None:
    """Compares results; the sink's gradient is first summed over the ranks."""
    size = max((y.double().nan_to_num(0, 0, 0).abs().max().item() for y in low.values() if y.numel()), default=0.0)
    for name, y in got.items():
        if name == "dsink":
            y = y.contiguous()
            dist.all_reduce(y)
        reference = low[name]
        assert y.dtype == reference.dtype, name
        if call.autocast and name in ("dq", "dk", "dv"):  # float32 has been rounded before
            y, reference = y.to(torch.bfloat16), reference.to(torch.bfloat16)
        # Kernels round P and dS, and where one call has them differs from where several do.
        factor = 4.0 if y.is_cuda else 3.0 if call.options["softcap"] else 2.0
        checks.assert_close(name, y, true[name], reference, factor, max(size, 1.0))


def drawn_calls(device: str = "cpu") -> None:
    """Calls for as long as FUZZ_SECONDS says, or on a GPU as many, from FUZZ_SEED."""
    seconds, seed = float(os.environ.get("FUZZ_SECONDS", "1")), int(os.environ.get("FUZZ_SEED", "0"))
    size = dist.get_world_size()
    shapes = [(size,), (1, size), *((n, size // n) for n in range(2, size) if size % n == 0)]
    meshes = [init_device_mesh(device, shape) for shape in shapes]
    stop, compared = time.monotonic() + seconds, 0
    with nothing_unwritten():
        for number in count():
            has_time = number < ON_A_GPU * seconds if device == "cuda" else time.monotonic() < stop
            goes_on = torch.tensor(int(number < AT_LEAST[device] or has_time), device=device)
            dist.all_reduce(goes_on, dist.ReduceOp.MIN)
            if not goes_on:
                break
            draw = random.Random(f"{seed} {size} {number}")
            torch.manual_seed(draw.randrange(2**31))
            call = drawn(draw, device)
            try:
                compared += check(call, draw, device, meshes)
            except Exception as error:
                raise AssertionError(f"seed {seed}, call {number}: {call}") from error
    if dist.get_rank() == 0:
        print(f"seed {seed}, {size} ranks: {number} calls, compared {compared} times", flush=True)
    assert compared > 0


def drawn_calls_on_a_gpu() -> None:
    """``drawn_calls`` by kernels, seqused on the device."""
    drawn_calls("cuda")
