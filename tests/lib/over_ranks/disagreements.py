"""Ranks that do not call alike."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.distributed import (
    Sharding,
    context_parallel,
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    context_parallel_unshard,
    gather,
    rank_of,
)
from tests.lib.over_ranks.cases import PACKED, WAYS, Leaves, alone, assert_same, expected_here, together
from tests.lib.refusals import assert_refused, pairs

SAME = "expected the same on all ranks of the group, got"


def disagreements() -> None:
    """One clear error on every rank, and none where ranks agree."""
    size, rank = dist.get_world_size(), dist.get_rank()
    sharding = PACKED.sharding(size)
    leaves = Leaves.of(PACKED)
    q, k, v = (sharding.shard(x, rank) for x in (leaves.q, leaves.k, leaves.v))
    agreed: dict[str, Any] = {"sharding": sharding, "causal": True, "q": q, "k": k, "v": v, "method": "ring"}
    agreed |= {"sharding_k": Sharding(sharding.cu_seqlens, sharding.total, sharding.segments)}
    sink = torch.zeros(4, dtype=torch.float64)
    # Arguments of rank 1 alone, and the error that all ranks then raise.
    different: list[tuple[dict[str, Any], str]] = [
        # options
        ({"causal": False}, "window_right: {} 0 on ranks 0, 2; None on rank 1$"),
        ({"window_size": (5, None)}, "window_left: {} None on ranks 0, 2; 5 on rank 1$"),
        ({"softcap": 2.0}, "softcap: {} 0.0 on ranks 0, 2; 2.0 on rank 1$"),
        ({"softmax_scale": 0.5}, "softmax_scale: {} None on ranks 0, 2; 0.5 on rank 1$"),
        ({"deterministic": True}, "deterministic: {} False on ranks 0, 2; True on rank 1$"),
        ({"return_max_logits": True}, "return_max_logits: {} False on ranks 0, 2; True on rank 1$"),
        ({"backend": "portable"}, "backend: {} None on ranks 0, 2; portable on rank 1$"),
        # methods; of these all_to_all sees the ranks as another grid
        ({"method": "all_gather"}, "method: {} ring on ranks 0, 2; all_gather on rank 1$"),
        ({"method": "auto"}, "method: {} ring on ranks 0, 2; auto on rank 1$"),
        ({"method": "all_to_all"}, "rank 1 of the group: method: expected one that exchanges no heads"),
        # shapes and dtypes
        ({"q": q[:, :2]}, r"heads, d and d_v: {} \(4, 2, 8, 8\) on ranks 0, 2; \(2, 2, 8, 8\) on rank 1$"),
        ({"k": k[:, :1], "v": v[:, :1]}, r"heads, d and d_v: {} \(4, 2, 8, 8\) .* \(4, 1, 8, 8\) on rank 1$"),
        ({"v": v[..., :4]}, r"heads, d and d_v: {} \(4, 2, 8, 8\) .* \(4, 2, 8, 4\) on rank 1$"),
        ({"q": q.float(), "k": k.float(), "v": v.float()}, "dtype: {} .*64 on ranks 0, 2; torch.float32 on rank 1$"),
        ({"learnable_sink": sink}, "sink: {} None on ranks 0, 2; torch.float64 on rank 1$"),
        ({"k": k.detach()}, "inputs that require gradients: {} q, k, v on ranks 0, 2; q, v on rank 1$"),
        # offsets, and who has which rows
        ({"sharding": Sharding.contiguous([0, 68, 73, 114, 114, 128], size)}, "sharding: {} layout .* on rank 1$"),
        ({"sharding_k": Sharding.contiguous([0, 70, 73, 113, 114, 128], size)}, "sharding_k: {} layout .* on rank 1$"),
        (
            {"sharding": Sharding(sharding.cu_seqlens, 128, sharding.segments[::-1])},
            "sharding: {} layout .* on rank 1$",
        ),
        ({"seqused_q": [1, 1, 1, 0, 1]}, r"seqused_q: {} None on ranks 0, 2; \(1, 1, 1, 0, 1\) on rank 1$"),
        ({"seqused_k": [1, 1, 1, 0, 1]}, r"seqused_k: {} None on ranks 0, 2; \(1, 1, 1, 0, 1\) on rank 1$"),
        # what is wrong on one rank alone
        ({"q": q[1:]}, "rank 1 of the group: q: expected the .* rows of rank 1 of its sharding, got shape"),
        (
            {"sharding": PACKED.sharding(2)},
            "rank 1 of the group: sharding: expected one over the 3 ranks of group, got 2",
        ),
        ({"mask": torch.ones(1, dtype=torch.bool)}, "rank 1 of the group: mask: expected None"),
        ({"bias": torch.ones(1)}, "rank 1 of the group: bias: expected None"),
        ({"block_mask": BlockMask.causal(128, 128)}, "rank 1 of the group: method: expected 'auto' or 'all_to_all'"),
        ({"softcap": -1.0}, "rank 1 of the group: softcap: expected 0"),
        ({"method": "ulysses"}, "rank 1 of the group: method: expected one of"),
        (
            {"seqused_k": [99, 1, 1, 0, 1]},
            "rank 1 of the group: seqused_k: expected 0 to 70 rows of document 0, got 99",
        ),
    ]
    for changes, message in different:
        given = {**agreed, **(changes if rank == 1 else {})}
        with pytest.raises(ValueError, match=message.format(SAME)):
            context_parallel_attn_varlen_func(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    compiled: Any = torch.compile(context_parallel_attn_varlen_func, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"window_right: .* 0 on ranks 0, 2; None on rank 1$"):
        compiled(q, k, v, sharding, causal=rank != 1)
    batch = torch.zeros(2 if rank == 1 else 1, 5, 6, 8)
    with pytest.raises(ValueError, match=r"batch: expected the same .* 1 on ranks 0, 2; 2 on rank 1$"):
        context_parallel_attn_func(batch, batch, batch, Sharding.balanced([0, 15], 3), method="ring")
    # The number of ranks divides these heads: rank 1 could do what it asks for.
    method = "all_to_all" if rank == 1 else "ring"
    with pytest.raises(ValueError, match=r"method: expected the same .* ring on ranks 0, 2; all_to_all on rank 1$"):
        context_parallel_attn_func(batch[:1], batch[:1], batch[:1], Sharding.balanced([0, 15], 3), method=method)
    promised: dict[str, Any] = {"deterministic": "invariant"} if rank == 1 else {}
    with pytest.raises(ValueError, match=r"deterministic: expected .* False on ranks 0, 2; invariant on rank 1$"):
        context_parallel_attn_func(batch[:1], batch[:1], batch[:1], Sharding.balanced([0, 15], 3), **promised)
    # Of which one call has a mask: the number of ranks divides these heads.
    causal, later = BlockMask.causal(15, 15), BlockMask.window(15, 15, left=3)
    for own, others, message in (
        (causal, None, r"None on ranks 0, 2; \(1, 1, 15, 15\) with contents \w+ on rank 1$"),
        (causal, later, r"\(.*15\) with contents \w+ on ranks 0, 2; \(1, 1, 15, 15\) with contents \w+ on rank 1$"),
    ):
        mask = own if rank == 1 else others
        with pytest.raises(ValueError, match=f"block_mask: {SAME} {message}"):
            context_parallel_attn_func(batch[:1], batch[:1], batch[:1], Sharding.balanced([0, 15], 3), block_mask=mask)
    context_parallel_attn_func(batch[:1], batch[:1], batch[:1], Sharding.balanced([0, 15], 3), block_mask=later)
    visible = torch.ones(15, 15, dtype=torch.bool)
    written = BlockMask.from_dense(visible[None, None])
    if rank == 1:
        visible.zero_()
    with pytest.raises(ValueError, match="rank 1 of the group: mask: expected what it was when the BlockMask was made"):
        context_parallel_attn_func(batch[:1], batch[:1], batch[:1], Sharding.balanced([0, 15], 3), block_mask=written)
    rows = torch.zeros(1, 33 if rank == 1 else 30, 2, 8)
    for buffers, message in (
        ([rows], r"sharding: expected the same .* layout .* on rank 1$"),
        ([rows, torch.zeros(1, 33 if rank != 1 else 30)], r"rank 0 of the group: buffers\[1\]: expected 30 rows"),
        ([torch.zeros(1, 30), rows], r"rank 1 of the group: buffers\[1\]: expected 30 rows in dimension 1, got shape"),
    ):
        with (
            pytest.raises(ValueError, match=message),
            context_parallel(None, buffers=buffers, buffer_seq_dims=[1] * len(buffers)),
        ):
            pytest.fail("the context has been entered")
    rows = torch.zeros(1, 30, 2, 8)
    with (
        context_parallel(None, buffers=[rows], buffer_seq_dims=[1]),
        pytest.raises(TypeError, match=r"rank 1 of the group: k: expected .*float32, got torch.float64"),
    ):
        flash_attn_func(rows, rows.double() if rank == 1 else rows, rows)
    lengths = torch.tensor(sharding.cu_seqlens if rank != 1 else [0, 9, 9, 9, 9, 128], dtype=torch.int32)
    with (
        context_parallel(None, sharding=sharding),
        pytest.raises(ValueError, match="rank 1 of the group: cu_seqlens_q: expected those of the sharding"),
    ):
        flash_attn_varlen_func(q, k, v, lengths, lengths, 128, 128, causal=True)
    mine = torch.zeros(2, sharding.num_rows(rank))
    names = {"gather": gather, "unshard": context_parallel_unshard, "mine": mine, "sharding": sharding, "rank": rank}
    for call, error in pairs(GATHERED):
        assert_refused(call, error, names)
    assert gather(mine, sharding, dim=1).shape == (2, 128)
    for way in WAYS[:2]:
        assert_same(
            together(PACKED, leaves, sharding, **way),
            expected_here(alone(PACKED, leaves), sharding, rank),
            way,
        )
    mesh = init_device_mesh("cpu", (size, 1))
    with pytest.raises(ValueError, match="rank 0 of the group: method: expected 'auto', 'all_gather' or 'ring'"):
        together(PACKED, leaves, sharding, group=mesh, method="all_to_all")
    assert together(PACKED, leaves, sharding, group=mesh)["out"].isfinite().all()


GATHERED = """
gather(mine[:, rank % 2 :], sharding, dim=1)
    ValueError: rank 1 of the group: x: expected ... rows in dim
gather([] if rank == 1 else mine, sharding, dim=1)
    TypeError: rank 1 of the group: x: expected a tensor
gather(mine[rank % 2 :], sharding, dim=1)
    ValueError: ... x, but its rows: ... on rank 1
unshard(None, [mine], [1, 1][: 1 + rank % 2])
    ValueError: rank 1 of the group: seq_dims: exp
unshard(None, [mine], [1 + rank % 2])
    ValueError: rank 1 of the group: buffers[0]: exp
unshard(None, [mine] * (rank != 1), [1] * (rank != 1))
    ValueError: the number of buffers: ... on rank 1
unshard(None, [mine[:, 9 * (rank % 2) :]], [1])
    ValueError: rank ... of the group: x: expected
"""


def other_gradients() -> None:
    """A loss of lse on one rank alone: ranks that trade rows for heads trade gradients of each result, too."""
    size, rank = dist.get_world_size(), dist.get_rank()
    sharding = Sharding.balanced([0, 5 * size], size)
    x = torch.randn(5, size, 8, requires_grad=True)
    error = f"results that have gradients: {SAME} out on ranks 0, 2; out, lse on rank 1$"

    def loss(method: str) -> Tensor:
        out, lse = context_parallel_attn_varlen_func(x, x, x, sharding, method=method, return_lse=True)
        return out.sum() + lse.sum() if rank == 1 else out.sum()

    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        function("ring").backward()
        found = function("all_to_all")
        with pytest.raises(ValueError, match=error):
            found.backward()


def outsiders() -> None:
    """Processes that a group leaves out, for which new_group has a number and a mesh no groups."""
    for group in (dist.new_group([1]), DeviceMesh("cpu", [1])):
        if dist.get_rank() == 1:
            assert rank_of(group) == 0
        else:
            with pytest.raises(ValueError, match="group: expected one that this process is in, got one without it"):
                rank_of(group)


def meshes_out_of_order() -> None:
    """Two processes would have the rows of one rank; groups of one dimension number them as they do."""
    size, rank = dist.get_world_size(), dist.get_rank()
    order = [*range(1, size), 0]
    assert rank_of(DeviceMesh("cpu", order)) == rank
    with pytest.raises(
        ValueError, match=r"group: expected a mesh of two dim.* in ascending order .* \[\[1\], \[2\], \[0\]\]"
    ):
        rank_of(DeviceMesh("cpu", [[x] for x in order]))


def other_backends() -> None:
    """One that cannot serve a call is refused on all ranks, those without rows as well, and ahead of any message."""
    rank, heads = dist.get_rank(), dist.get_world_size()
    rows: Any = [[(0, 0, 7)], [(1, 7, 20), (1, 25, 40)], *[[]] * (heads - 2)]
    rows[0].append((1, 20, 25))
    sharding = Sharding((0, 7, 40), 40, rows)
    x = torch.randn(sharding.num_rows(rank), heads, 8)
    for way in (*WAYS, {"method": "auto"}):
        for backend, message in (("sm90", "which cannot: tensors on cpu"), ("sm9", "None or one of .* got 'sm9'")):
            with pytest.raises(ValueError, match=f"backend: expected .*{message}"):
                context_parallel_attn_varlen_func(x, x, x, sharding, backend=backend, **way)
        assert context_parallel_attn_varlen_func(x, x, x, sharding, **way).shape == x.shape
