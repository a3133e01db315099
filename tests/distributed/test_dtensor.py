"""DTensors: heads and batch entries sharded over two processes, as one process computes it."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.portable.backend import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.distributed import Sharding, context_parallel, context_parallel_unshard, gather
from flash_attn_cute.integrations import flash_attn
from flash_attn_cute.padding import Packing
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec
from flash_attn_cute.score_statistics import column_sums
from tests.lib import ranks

RANKS = 2
OFFSETS = torch.tensor([0, 4, 4, 9, 11], dtype=torch.int32)
DENSE = ("q", "k", "v")


def leaves(batch: int, heads: int, heads_k: int, packed: bool) -> dict[str, Tensor]:
    rows, rows_k = ((12,), (12,)) if packed else ((batch, 6), (batch, 9))
    shapes = {"q": (*rows, heads, 8), "k": (*rows_k, heads_k, 8), "v": (*rows_k, heads_k, 4)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def sharded(x: Tensor, mesh: Any, placements: Any) -> DTensor:
    """Shards a tensor that all ranks have, without communication."""
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def results_of(attend: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Out, lse and the gradients of all floating-point tensors."""
    floats = {name: x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}
    out, lse, max_logits = attend(**tensors, **options, return_lse=True, return_max_logits=True)
    torch.manual_seed(7)
    dout, dlse = (torch.randn(x.shape, dtype=x.dtype) for x in (out, lse))
    if isinstance(out, DTensor):
        dout, dlse = (sharded(g, x.device_mesh, x.placements) for g, x in ((dout, out), (dlse, lse)))
    gradients = torch.autograd.grad([out, lse], list(floats.values()), [dout, dlse])
    return {"out": out, "lse": lse, "max_logits": max_logits, **dict(zip(floats, gradients, strict=True))}


def assert_sharded(
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    placements: dict[str, Any],
    expected: dict[str, Any],
    free: bool = True,
) -> None:
    """Results and gradients are those of one process, sharded as expected, and without communication if ``free``.

    Tensors without a placement are plain ones, the same on each rank.
    """
    mesh = init_device_mesh("cpu", (RANKS,))
    attend = flash_attn_func if "cu_seqlens_q" not in options else flash_attn_varlen_func
    truth = results_of(attend, {name: x.clone() for name, x in tensors.items()}, options)
    parts = {
        name: sharded(x, mesh, [placements[name]]) if name in placements else x.clone() for name, x in tensors.items()
    }
    with CommDebugMode() as communication:
        results = results_of(attend, parts, options)
    assert not free or communication.get_total_counts() == 0, communication.get_comm_counts()
    for name, x in results.items():
        if name in expected:
            assert isinstance(x, DTensor)
            assert x.placements == (expected[name],), f"{name}: {x.placements}"
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        assert torch.allclose(whole, truth[name], rtol=0, atol=1e-12), name


def heads_dense() -> None:
    """Groups of heads stay together; sinks, masks and biases go along, and are summed where heads share them."""
    base = leaves(3, 8, 4, packed=False)
    by_heads = dict.fromkeys(DENSE, Shard(2))
    out = {"out": Shard(2), "lse": Shard(1), "max_logits": Shard(0), **by_heads}
    assert_sharded(base, {"causal": True, "softcap": 5.0}, by_heads, out)
    extras = {"learnable_sink": torch.randn(8), "bias": torch.randn(8, 6, 9), "mask": torch.rand(3, 8, 6, 9) < 0.7}
    extras = {name: x.double() if x.is_floating_point() else x for name, x in extras.items()}
    along = {"learnable_sink": Shard(0), "bias": Shard(0), "mask": Shard(1)}
    assert_sharded({**base, **extras}, {}, {**by_heads, **along}, {**out, "learnable_sink": Shard(0), "bias": Shard(0)})
    shared = {"bias": torch.randn(1, 6, 9, dtype=torch.float64)}
    assert_sharded({**base, **shared}, {}, {**by_heads, "bias": Replicate()}, out)


def heads_packed() -> None:
    """Offsets may be plain tensors."""
    base = leaves(0, 4, 2, packed=True)
    used = torch.tensor([3, 0, 5, 1], dtype=torch.int32)
    options = {
        "cu_seqlens_q": OFFSETS,
        "cu_seqlens_k": OFFSETS,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
        "seqused_k": used,
    }
    by_heads = dict.fromkeys(DENSE, Shard(1))
    assert_sharded(base, {**options, "causal": True}, by_heads, {"out": Shard(1), "lse": Shard(0), **by_heads})


class WithKernel(PortableBackend):
    """Has column sums for a function of the keys, the head and lse."""

    has_column_sums = True

    def column_sums(self, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        keys = inputs.k.sum(-1).transpose(-1, -2).float().repeat_interleave(spec.nheads // spec.nheads_k, -2)
        return keys + lse.sum(-1, keepdim=True)


def sums_of_keys() -> None:
    """Column sums, a backend's own and those by attention, by heads and by entries, without communication."""
    base, mesh = leaves(4, 8, 4, packed=False), init_device_mesh("cpu", (RANKS,))
    for backend, dims in product((WithKernel(), PortableBackend()), ((2, 2, 1), (0, 0, 0))):
        with patch.dict(dispatch.BACKENDS, portable=backend), torch.no_grad():
            _, lse = flash_attn_func(base["q"], base["k"], base["v"], return_lse=True)
            truth = column_sums(base["q"], base["k"], lse, causal=True)
            tensors = base["q"], base["k"], lse
            parts = [sharded(x, mesh, [Shard(dim)]) for x, dim in zip(tensors, dims, strict=True)]
            with CommDebugMode() as communication:
                sums = column_sums(*parts, causal=True)
            assert communication.get_total_counts() == 0, communication.get_comm_counts()
            assert isinstance(sums, DTensor)
            assert sums.placements == (Shard(dims[2]),)
            assert torch.allclose(sums.full_tensor(), truth, rtol=0, atol=1e-12)


def entries() -> None:
    """Shards a batch that two ranks divide unevenly; tensors that entries share get a gradient from both."""
    base, used = leaves(3, 4, 2, packed=False), torch.tensor([9, 4, 0], dtype=torch.int32)
    by_entries = dict.fromkeys(DENSE, Shard(0))
    out = {"out": Shard(0), "lse": Shard(0), **by_entries}
    assert_sharded(base, {"seqused_k": used, "window_size": (3, 1)}, by_entries, out)
    shared = {"learnable_sink": torch.randn(4), "bias": torch.randn(1, 4, 6, 9)}
    shared = {name: x.double() for name, x in shared.items()}
    assert_sharded({**base, **shared}, {}, {**by_entries, **dict.fromkeys(shared, Replicate())}, out)
    own = {"bias": torch.randn(3, 1, 1, 9, dtype=torch.float64)}
    assert_sharded({**base, **own}, {}, {**by_entries, "bias": Shard(0)}, {**out, "bias": Shard(0)})


def other_placements() -> None:
    """Replicated tensors stay so; rows become heads; heads that cannot be divided are gathered."""
    base = leaves(2, 4, 2, packed=False)
    whole = dict.fromkeys((*DENSE, "out", "lse"), Replicate())
    assert_sharded(base, {"causal": True}, dict.fromkeys(DENSE, Replicate()), whole)
    assert_sharded(base, {"causal": True}, dict.fromkeys(DENSE, Shard(1)), {}, free=False)
    single, three = leaves(1, 4, 1, packed=False), leaves(1, 6, 3, packed=False)
    assert_sharded(single, {}, {"q": Shard(2), "k": Replicate(), "v": Replicate()}, {"out": Replicate()}, free=False)
    assert_sharded(three, {}, dict.fromkeys(DENSE, Shard(2)), {"out": Replicate()}, free=False)
    plain = {**base, "bias": torch.randn(6, 9, dtype=torch.float64)}
    assert_sharded(plain, {}, dict.fromkeys(DENSE, Shard(2)), {"out": Shard(2)}, free=False)


def needs_of_the_backward_pass() -> None:
    """A bias that wants no gradient now may want one later: PyTorch keeps both calls apart."""
    base, bias = leaves(2, 4, 2, packed=False), torch.randn(6, 9, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (RANKS,))
    q, k, v = (sharded(x, mesh, [Shard(2)]).requires_grad_() for x in base.values())
    for wanted in (False, True):
        shared = sharded(bias, mesh, [Replicate()]).requires_grad_(wanted)
        flash_attn_func(q, k, v, bias=shared).sum().backward()
        assert (shared.grad is not None) == wanted
    assert shared.grad is not None
    assert shared.grad.shape == (6, 9)


def compiled() -> None:
    """In one graph, like plain tensors."""
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = [x.requires_grad_() for x in leaves(2, 4, 2, packed=False).values()]
    parts = [sharded(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in whole]
    attend: Any = torch.compile(lambda *x: flash_attn_func(*x, causal=True), backend="aot_eager", fullgraph=True)
    expected, out = flash_attn_func(*whole, causal=True), attend(*parts)
    assert torch.allclose(out.full_tensor(), expected, rtol=0, atol=1e-12)
    expected.sum().backward()
    out.sum().backward()
    for x, part in zip(whole, parts, strict=True):
        assert x.grad is not None
        assert isinstance(part.grad, DTensor)
        assert part.grad.placements == (Shard(2),)
        assert torch.allclose(part.grad.full_tensor(), x.grad, rtol=0, atol=1e-12)


def block_masks() -> None:
    """Each rank makes the tables of a mask; they are sharded as heads and entries are."""
    base, lengths = leaves(3, 8, 4, packed=False), (6, 9)
    by_heads, by_entries = dict.fromkeys(DENSE, Shard(2)), dict.fromkeys(DENSE, Shard(0))
    heads, entries = {"out": Shard(2), "lse": Shard(1)}, {"out": Shard(0), "lse": Shard(0)}
    shapes: list[tuple[int, int]] = [(1, 1), (1, 8), (3, 1), (3, 4), (3, 8)]
    for shape in shapes:
        mask = BlockMask.from_dense(torch.rand(*shape, *lengths) < 0.6)
        ordered = mask.with_order("spt", group=2 if shape[1] == 8 else 1)
        assert_sharded(base, {"block_mask": ordered, "softcap": 4.0}, by_heads, {**heads, **by_heads})
        assert_sharded(base, {"block_mask": mask, "causal": True}, by_entries, {**entries, **by_entries})
        selection = BlockMask.from_selection(torch.randint(-1, 5, (*shape, 6, 3)), block=2, seqlen_k=9)
        assert_sharded(base, {"block_mask": selection}, by_heads, {**heads, **by_heads})
        assert_sharded(base, {"block_mask": selection, "causal": True}, by_entries, {**entries, **by_entries})
    for rule in (
        BlockMask.causal(*lengths),
        BlockMask.documents(torch.tensor([0, 0, 1, 1, 1, -1]), torch.arange(9) // 4),
    ):
        assert_sharded(base, {"block_mask": rule}, by_heads, {**heads, **by_heads})
    used = torch.tensor([3, 0, 5, 1], dtype=torch.int32)
    options = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "max_seqlen_q": 5, "max_seqlen_k": 5}
    for heads_of_mask in (1, 2, 4):
        mask = BlockMask.from_dense(torch.rand(1, heads_of_mask, 12, 12) < 0.6)
        given = {**options, "seqused_k": used, "block_mask": mask}
        packed = dict.fromkeys(DENSE, Shard(1))
        assert_sharded(leaves(0, 4, 2, packed=True), given, packed, {"out": Shard(1), "lse": Shard(0), **packed})


@pytest.mark.slow
def test_over_ranks(tmp_path: Path) -> None:
    plain = [heads_dense, heads_packed, entries, other_placements, needs_of_the_backward_pass, compiled]
    ranks.run([sums_of_keys, block_masks, *plain], RANKS, tmp_path)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process, on which all but communication is as on several ranks."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [None, Replicate(), Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_alibi_slopes(packed: bool, placement: Any, alone: DeviceMesh) -> None:
    """Slopes of any placement have a gradient, and offsets may be DTensors, too."""
    attend: Any = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func
    base = {**leaves(2, 4, 4, packed), "alibi_slopes": torch.rand(4, dtype=torch.float64)}
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 5} if packed else {}
    base |= {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS} if packed else {}

    def results(placements: Any) -> list[Tensor]:
        given = {
            name: sharded(x, alone, [placements[name]]) if placements.get(name) else x.clone()
            for name, x in base.items()
        }
        floats = [x.requires_grad_() for x in given.values() if x.is_floating_point()]
        out, lse, _ = attend(**given, **lengths, causal=packed, return_attn_probs=True)
        found = (out, lse, *torch.autograd.grad(out.sin().sum() + lse.exp().sum(), floats))
        return [x.full_tensor() if isinstance(x, DTensor) else x for x in found]

    by_heads = {**dict.fromkeys(DENSE, Shard(1 if packed else 2)), "alibi_slopes": placement}
    if placement != Partial():
        by_heads |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), placement)
    torch.testing.assert_close(results(by_heads), results({}))


def test_transforms(alone: DeviceMesh) -> None:
    """Plain tensors beside DTensors are the same on every rank in torch.func, too; k and v are refused."""
    whole, bias = list(leaves(2, 4, 2, packed=False).values()), torch.randn(6, 9, dtype=torch.float64)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, bias=bias, block_mask=BlockMask.prefix(6, 9, 5)).sin().sum()

    found = torch.func.grad(loss, (0, 1, 2))(*(sharded(x, alone, [Shard(2)]) for x in whole))
    torch.testing.assert_close([x.full_tensor() for x in found], [*torch.func.grad(loss, (0, 1, 2))(*whole)])
    q, k, v = whole
    parts = sharded(q, alone, [Shard(2)]), k, v
    with pytest.raises(
        TypeError, match=r"^k: expected a DTensor, as q is one, got a plain tensor; DTensor\.from_local"
    ):
        torch.func.grad(loss)(*parts)


@pytest.mark.parametrize("name", ["k", "learnable_sink", "mask", "seqused_k", "block_mask", "lse"])
def test_a_dtensor_beside_plain_queries(name: str, alone: DeviceMesh) -> None:
    call: dict[str, Any] = {
        **leaves(2, 4, 4, packed=False),
        "learnable_sink": torch.zeros(4, dtype=torch.float64),
        "mask": torch.ones(6, 9, dtype=torch.bool),
        "seqused_k": torch.tensor([9, 4], dtype=torch.int32),
        "block_mask": torch.zeros(2, 1, 6, 1, dtype=torch.int64),
        "lse": torch.zeros(2, 4, 6, dtype=torch.float64),
    }
    given = {key: call[key] for key in ({"q", "k"} if name == "lse" else {*DENSE})} | {name: call[name]}
    given[name] = sharded(given[name], alone, [Shard(0)])
    if name == "block_mask":
        given[name] = BlockMask.from_selection(given[name], block=2, seqlen_k=9)
    attend: Any = column_sums if name == "lse" else flash_attn_func
    with pytest.raises(
        TypeError, match=rf"^{name}: expected a plain tensor, as q is one, got a DTensor with placements"
    ):
        attend(**given)


def test_what_each_rank_makes_for_itself(alone: DeviceMesh) -> None:
    """Masks, packings and shardings are made of plain tensors, and rows of them are dealt."""

    def given(*shape: int, dtype: torch.dtype = torch.int64) -> DTensor:
        return sharded(torch.zeros(shape, dtype=dtype), alone, [Replicate()])

    makers: dict[str, Callable[[], Any]] = {
        r"buffers\[0\]": lambda: context_parallel_unshard(None, [given(4)], [0]),
        r"buffers\[0\] ": lambda: context_parallel(None, buffers=[given(4)], buffer_seq_dims=[0]).__enter__(),
        "x ": lambda: gather(given(4), Sharding.balanced([0, 4], 1)),
        "cu_seqlens": lambda: Sharding.balanced(given(3), 1),
        "mask": lambda: BlockMask.from_dense(given(6, 9, dtype=torch.bool)),
        "ids": lambda: BlockMask.documents(given(6)),
        "order": lambda: BlockMask.causal(6, 6).with_order(given(1)),
        "mask ": lambda: Packing.of(given(2, 6, dtype=torch.bool)),
        "x": lambda: Packing.of(torch.ones(2, 6, dtype=torch.bool)).pack(given(2, 6)),
    }
    for name, make in makers.items():
        with pytest.raises(TypeError, match=rf"^{name.strip()}: expected a plain tensor, got a DTensor .*full_tensor"):
            make()
