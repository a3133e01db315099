"""PyTorch's way to ask for context parallelism gives what one process gives, and buffers come back as they were."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, MistralConfig

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.distributed import (
    Sharding,
    context_parallel,
    context_parallel_attn_varlen_func,
    context_parallel_unshard,
    gather,
    rank_of,
)
from flash_attn_cute.integrations import flash_attn
from flash_attn_cute.integrations.transformers import register
from flash_attn_cute.integrations.varlen import varlen_attn
from tests.lib import ranks
from tests.lib.refusals import assert_refused, refusals

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Predicts tokens (batch, rows) by attention over (batch, rows, heads, d), with a buffer of rows."""

    def __init__(self, attend: Attention, rows: int) -> None:
        super().__init__()
        self.attend = attend
        self.embedding = nn.Embedding(11, 32, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(32, 64, dtype=torch.float64) for _ in range(2))
        self.register_buffer("angles", torch.arange(rows, dtype=torch.float64)[:, None] * torch.rand(32).double())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, of shape (batch, rows, 11)."""
        x = self.embedding(tokens) + self.get_buffer("angles").sin()
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (8, 8)).split((4, 2, 2), -2)
            x = x + checkpoint(self.attend, q, k, v, use_reentrant=False).flatten(-2)
        return x @ self.embedding.weight.T


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def step(model: Model, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, loss, and the gradients of all parameters."""
    logits = model(tokens)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return logits.detach(), loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def groups() -> list[Any]:
    """Groups of the first 1, 2, 3 and all processes that this one is in, and a mesh of two dimensions."""
    found: list[Any] = []
    for size in range(1, dist.get_world_size()):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            found.append(DeviceMesh.from_group(group, "cpu"))
    return [*found, None, init_device_mesh("cpu", (2, 2))]


def training_steps() -> None:
    """Loss and gradients of all ranks together, with rows that no number of ranks divides."""
    rows = 61
    for mesh in groups():
        ranks_of = [mesh.get_group(i) for i in range(mesh.ndim)] if mesh is not None else [dist.group.WORLD]
        torch.manual_seed(5)  # groups leave some ranks out
        model = Model(by_torch, rows)
        data = torch.randint(11, (2, rows + 1))
        expected = step(model, data[:, :-1], data[:, 1:])
        angles = model.get_buffer("angles")
        before, kept = data.clone(), angles.clone()
        # Of the same memory, as they often are.
        tokens, targets = data[:, :-1], data[:, 1:]
        with context_parallel(
            mesh,
            buffers=[tokens, targets, angles],
            buffer_seq_dims=[1, -1, 0],
            no_restore_buffers={tokens, targets},
        ) as sharding:
            mine = sharding.index(rank_of(mesh))
            assert tokens.equal(before[:, :-1][:, mine])
            assert targets.equal(before[:, 1:][:, mine])
            assert angles.equal(kept[mine])
            logits, loss, grads = step(model, tokens, targets)
        assert data.equal(before), "buffers that are views have changed what they are views of"
        assert angles.equal(kept)
        assert tokens.shape == targets.shape == (2, len(mine))
        for x in (loss, *grads):
            for group in ranks_of:
                dist.all_reduce(x, group=group)
        whole = (*context_parallel_unshard(mesh, [logits], [1]), gather(logits, sharding, mesh, dim=1))
        for found in whole:
            torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-10)
        torch.testing.assert_close([loss, *grads], [expected[1], *expected[2]], rtol=0, atol=1e-10)


def packed_documents() -> None:
    """A sharding of documents serves packed calls, which give the offsets of all rows."""
    lengths = [30, 0, 17, 5, 41]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    x = torch.randn(93, 3, 4, 8, dtype=torch.float64)
    for attend in (
        lambda q, k, v: flash_attn_varlen_func(q, k, v, offsets, offsets, 41, 41, causal=True),
        lambda q, k, v: varlen_attn(q, k, v, offsets, offsets, 41, 41, window_size=(-1, 0)),
    ):
        expected = torch.cat([by_torch(*x[a:b].unsqueeze(0).unbind(2))[0] for a, b in pairwise(offsets.tolist())])
        mine = x.clone()
        sharding = Sharding.balanced(offsets, dist.get_world_size(), causal=True)
        with context_parallel(None, buffers=[mine], buffer_seq_dims=[0], sharding=sharding, method="ring"):
            q, k, v = mine.unbind(1)
            out = attend(q, k, v)
            # Of as many rows on each rank as the default sharding has.
            (whole,) = context_parallel_unshard(None, [out], [0])
            other = torch.arange(30.0)
            sharded = Sharding.balanced([0, 30], dist.get_world_size(), causal=True).shard(other, rank_of())
            assert context_parallel_unshard(None, [sharded], [0])[0].equal(other)
            with pytest.raises(ValueError, match=r"cu_seqlens_k: expected those of the sharding, \[0, 30, 30, 47"):
                flash_attn_varlen_func(q, k, v, offsets, offsets.clamp(max=60), 41, 41)
            with pytest.raises(ValueError, match="cu_seqlens_q: expected the 6 offsets of the sharding, got 2"):
                flash_attn_varlen_func(q, k, v, offsets[-2:], offsets[-2:], 41, 41)
        for found in (whole, gather(out, sharding)):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        # Outside of the context as many rows have the default sharding, too.
        other = torch.arange(93.0)
        sharded = Sharding.balanced([0, 93], dist.get_world_size(), causal=True).shard(other, rank_of())
        assert context_parallel_unshard(None, [sharded], [0])[0].equal(other)


def calls_by_pytorch() -> None:
    """A module of PyTorch that calls attention by itself."""
    module = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 33, 16, dtype=torch.float64)
    expected, _ = module(x, x, x, need_weights=False)
    with context_parallel(None, buffers=[x], buffer_seq_dims=[1]) as sharding:
        out, _ = module(x, x, x, need_weights=False)
        (whole,) = context_parallel_unshard(None, [out], [1])
    assert out.shape == (2, sharding.num_rows(rank_of()), 16)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


def models_of_transformers() -> None:
    """Packed by the offsets of all rows, with windows."""
    register()
    lengths = [40, 3, 30]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 40, "max_length_k": 40}
    sizes = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=9)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attn_cute").double()
    ids, positions = torch.randint(11, (1, 73)), torch.cat([torch.arange(n) for n in lengths])[None]
    expected = model(ids, position_ids=positions, use_cache=False, **packed).logits
    grads = torch.autograd.grad(expected.sin().sum(), list(model.parameters()))
    sharding = Sharding.balanced(offsets, dist.get_world_size(), causal=True)
    with context_parallel(None, buffers=[ids, positions], buffer_seq_dims=[1, 1], sharding=sharding):
        logits = model(ids, position_ids=positions, use_cache=False, **packed).logits
        parts = torch.autograd.grad(logits.sin().sum(), list(model.parameters()))
    torch.testing.assert_close(gather(logits, sharding, dim=1), expected, rtol=0, atol=1e-10)
    for part, grad in zip(parts, grads, strict=True):
        dist.all_reduce(part)
        torch.testing.assert_close(part, grad, rtol=0, atol=1e-10)


def what_is_refused() -> None:
    """Calls that cannot run over ranks, and the backward pass of what a restored buffer is part of."""
    x, rows = torch.randn(1, 40, 2, 8), 10
    given: dict[str, Any] = {"buffers": [x], "buffer_seq_dims": [1]}
    with context_parallel(None, **given):
        q = x.transpose(1, 2)
        bias, visible = torch.zeros(rows, rows), torch.ones(40, 40, dtype=torch.bool)
        selected = BlockMask.from_selection(torch.zeros(1, 1, rows, 1, dtype=torch.int64), block=8, seqlen_k=rows)
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("attn_mask: expected None", lambda: F.scaled_dot_product_attention(q, q, q, visible)),
            ("attn_mask: expected None", lambda: F.scaled_dot_product_attention(q, q, q, bias)),
            ("dropout_p: expected 0", lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)),
            ("block_mask: expected None", lambda: flash_attn_func(x, x, x, block_mask=BlockMask.causal(40, 40))),
            ("block_mask: expected None", lambda: flash_attn_func(x, x, x, block_mask=selected)),
            ("alibi_slopes: expected None", lambda: flash_attn.flash_attn_func(x, x, x, alibi_slopes=torch.ones(2))),
            ("precise_gradients: expected False", lambda: flash_attn_func(x, x, x, precise_gradients=True)),
            ("k: expected the 10 rows of rank", lambda: flash_attn_func(x, x[:, 1:], x[:, 1:])),
        ]
        for message, call in refused:
            with pytest.raises(ValueError, match=message):
                call()
        leaf = torch.ones(8, requires_grad=True)
        product = x * leaf
    assert x.shape == (1, 40, 2, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()

    with pytest.raises(ZeroDivisionError), context_parallel(None, **given):
        1 / 0  # noqa: B018
    assert x.shape == (1, 40, 2, 8), "an error has left a buffer in shards"
    q = x.transpose(1, 2)
    assert F.scaled_dot_product_attention(q, q, q).shape == q.shape


# One start of the processes for all.
def test_over_ranks(tmp_path: Path) -> None:
    ranks.run(
        [training_steps, packed_documents, calls_by_pytorch, models_of_transformers, what_is_refused], 4, tmp_path
    )


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """This process as a group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('rank')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ROWS = torch.ones(4)
REFUSED = """
entered(buffers=[ROWS])
    ValueError: buffer_seq_dims: expected 1, one a buffer, got 0
entered()
    ValueError: buffers: expected at least one
entered(buffers=[], buffer_seq_dims=0)
    TypeError: buffer_seq_dims: expected a sequence, got 0
entered(buffers=[[1]], buffer_seq_dims=[0])
    TypeError: buffers[0]: expected a tensor, got list
entered(buffers=[torch.ones(4, requires_grad=True)], buffer_seq_dims=[0])
    ValueError: buffers[0]: expected a tensor that requires no gradient
entered(buffers=[ROWS, torch.ones(2, 5)], buffer_seq_dims=[0, 1])
    ValueError: buffers[1]: expected 4 rows in dimension 1, got shape (2, 5)
entered(buffers=[ROWS], buffer_seq_dims=[1])
    ValueError: buffers[0]: expected a dimension 1 of rows, got shape (4,)
entered(buffers=[ROWS], buffer_seq_dims=[0], no_restore_buffers={ROWS.clone()})
    ValueError: no_restore_buffers: expected some of buffers
entered(sharding=Sharding.balanced([0, 4], 2))
    ValueError: sharding: expected one over the 1 ranks
entered(sharding=[0, 4])
    TypeError: sharding: expected a Sharding, ... got list
entered(7, buffers=[ROWS], buffer_seq_dims=[0])
    TypeError: mesh: expected a ProcessGroup, a DeviceMesh or None, got int
context_parallel_unshard(7, [ROWS], [0])
    TypeError: mesh: expected a ProcessGroup, a DeviceMesh or None, got int
entered(buffers=[ROWS], buffer_seq_dims=[0], method="alltoall")
    ValueError: method: expected one of
"""


def entered(mesh: Any = None, **given: Any) -> None:
    """Enters a context, and sees that buffers are as they were."""
    buffers = [x for x in given.get("buffers", ()) if isinstance(x, Tensor)]
    shapes = [x.shape for x in buffers]
    try:
        with context_parallel(mesh, **given):
            pytest.fail("the context has been entered")
    finally:
        assert shapes == [x.shape for x in buffers]


@refusals(REFUSED)
def test_wrong_arguments(call: str, error: str) -> None:
    assert_refused(call, error, globals())


def test_threads_enter_one_at_a_time() -> None:
    """Contexts of two threads, left in another order, would leave attention replaced."""
    original, x = F.scaled_dot_product_attention, torch.ones(4)
    with ThreadPoolExecutor(1) as another:
        with context_parallel(None, buffers=[x], buffer_seq_dims=[0]) as sharding:
            entering = another.submit(entered, buffers=[x], buffer_seq_dims=[0])
            with pytest.raises(RuntimeError, match=r"^context_parallel: expected one thread at a time"):
                entering.result()
            with context_parallel(None, sharding=sharding):
                pass
            assert F.scaled_dot_product_attention is not original
        assert F.scaled_dot_product_attention is original
        with pytest.raises(pytest.fail.Exception):
            another.submit(entered, buffers=[x], buffer_seq_dims=[0]).result()


def test_models_that_find_documents_by_themselves() -> None:
    """The error names what the model was given, and not the offsets that were made of it."""
    register()
    sizes = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attn_cute")
    ids, positions = torch.zeros(1, 7, dtype=torch.int64), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    message = "position_ids or attention_mask: expected the 2 offsets of the sharding, got 3; within context_parallel"
    with (
        context_parallel(None, buffers=[ids, positions], buffer_seq_dims=[1, 1]),
        pytest.raises(ValueError, match=message),
    ):
        model(ids, position_ids=positions, use_cache=False)


def test_lengths_are_those_of_the_sharding() -> None:
    x, offsets = torch.randn(8, 2, 8), torch.tensor([0, 4, 8], dtype=torch.int32)
    used = torch.tensor([3, 2], dtype=torch.int32)
    call: dict[str, Any] = {"seqused_q": used, "seqused_k": used}
    expected = flash_attn_varlen_func(x, x, x, offsets, offsets, 4, 4, **call)
    sharding = Sharding.balanced([0, 4, 8], 1, **call)
    with context_parallel(None, buffers=[x], buffer_seq_dims=[0], sharding=sharding):
        out = flash_attn_varlen_func(x, x, x, offsets, offsets, 4, 4, **call)
        torch.testing.assert_close(gather(out, sharding), expected)
        for name in call:
            with pytest.raises(ValueError, match=rf"{name}: expected those of the sharding, \[3, 2\]"):
                flash_attn_varlen_func(x, x, x, offsets, offsets, 4, 4, **call | {name: used - 1})


def test_offsets_in_place_of_a_sharding() -> None:
    x, offsets = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    call: Any = context_parallel_attn_varlen_func
    with pytest.raises(TypeError, match=r"sharding: expected a Sharding, which Sharding\.balanced makes of cu_seqlens"):
        call(x, x, x, offsets)
    for wrong in (
        lambda: call(x, x, x, offsets, offsets, 4, 4),
        lambda: call(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets),
    ):
        with pytest.raises(
            TypeError, match=r"argument.*; a sharding, .* takes the place of cu_seqlens and max_seqlen$"
        ):
            wrong()


def test_gather_takes_a_tensor_with_rows() -> None:
    whole, untyped_gather = Sharding.balanced([0, 4], 1), cast(Any, gather)
    with pytest.raises(TypeError, match="x: expected a tensor, got NoneType"):
        untyped_gather(None, whole)
    with pytest.raises(ValueError, match=r"x: expected a dimension 1 of rows, got shape \(4,\)"):
        gather(torch.ones(4), whole, dim=1)


def test_unshard_takes_a_dimension_a_buffer() -> None:
    with pytest.raises(ValueError, match="seq_dims: expected 1, one a buffer, got 0"):
        context_parallel_unshard(None, [torch.ones(4)], [])
    with pytest.raises(TypeError, match="seq_dims: expected a sequence, got 0"):
        cast(Any, context_parallel_unshard)(None, [torch.ones(4)], 0)
    assert context_parallel_unshard(None, [], []) == []
    with pytest.raises(ValueError, match=r"buffers\[0\]: expected a dimension 1 of rows, got shape \(4,\)"):
        context_parallel_unshard(None, [torch.ones(4)], [1])
