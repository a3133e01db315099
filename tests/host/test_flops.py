"""FLOP, as ``torch.utils.flop_counter`` counts them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec
from flash_attn_cute.score_statistics import column_sums
from tests.lib.checks import random_call, run

D, D_V, HEADS = 8, 16, 4


def counted(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def pairs_of(lengths: list[tuple[int, int]], window: tuple[int | None, int | None]) -> int:
    """Counted one by one."""
    left, right = (10**9 if side is None else side for side in window)
    count = 0
    for seqlen_q, seqlen_k in lengths:
        rows, columns = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
        count += int(((columns >= rows - left) & (columns <= rows + right)).sum())
    return count


@pytest.mark.parametrize("seqlen_q", [0, 1, 5, 9])
@pytest.mark.parametrize("seqlen_k", [0, 1, 4, 12])
@pytest.mark.parametrize("left", [None, 0, 2, 30])
@pytest.mark.parametrize("right", [None, 0, 3, 30])
def test_visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> None:
    expected = pairs_of([(seqlen_q, seqlen_k)], (left, right))
    assert Band.of((left, right), seqlen_q, seqlen_k).area(0, seqlen_q, seqlen_k) == expected


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seqused", [True, False])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 2)])
def test_both_passes(packed: bool, seqused: bool, window: tuple[int | None, int | None]) -> None:
    """Two products of all visible pairs, and five; each pass where the counter is on."""
    lengths_q, lengths_k = ([5, 0, 9], [8, 3, 4]) if packed else ([9] * 3, [8] * 3)
    given: dict[str, Any] = {"nheads": HEADS, "nheads_k": 2, "head_dim": D, "head_dim_v": D_V, "seqused": seqused}
    call = random_call(lengths_q, lengths_k, packed=packed, window_size=window, **given)
    real = [(q.stop - q.start, k.stop - k.start) for _, q, k in call.sequences()]
    pairs = HEADS * pairs_of(real, window)
    results: list[Tensor] = []
    assert counted(lambda: results.append(run(call))) == 2 * pairs * (D + D_V)
    gradient = torch.randn_like(results[0])
    backward = 2 * pairs * (3 * D + 2 * D_V)
    assert counted(lambda: torch.autograd.grad(results[0], call.q, gradient)) == backward
    uncounted = run(call)
    assert counted(lambda: torch.autograd.grad(uncounted, call.q, gradient)) == backward


def test_a_full_batch_counts_as_sdpa_does() -> None:
    q, k, v = (torch.randn(2, HEADS, 16, D, requires_grad=True) for _ in range(3))

    def both() -> None:
        flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).sum().backward()

    forward = flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)
    assert counted(both) == forward + flop_counter.sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "meta"])
def test_without_numbers(fake: bool) -> None:
    """Dense batches are full, packed rows those of the longest sequences that there may be."""
    with FakeTensorMode() if fake else torch.device("meta"):
        q = torch.empty(2, 10, HEADS, D)
        rows, offsets = torch.empty(19, HEADS, D), torch.empty(5, dtype=torch.int32)
        used = torch.empty(2, dtype=torch.int32)
        dense = counted(lambda: flash_attn_func(q, q, q, seqused_q=used, seqused_k=used, causal=True))
        packed = counted(lambda: flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 8, 8, causal=True))
    assert dense == 2 * HEADS * 2 * 55 * 2 * D
    assert packed == 2 * HEADS * (36 + 36 + 6) * 2 * D


def test_the_first_counter_knows() -> None:
    """Whichever pass it sees, and though the package has not imported it; each in a process of its own."""
    code = """
import os, sys
import torch, flash_attn_cute
torch.set_num_threads(1)  # for the children: threads of OpenMP do not survive a fork
q = torch.randn(1, 4, 2, 8, requires_grad=True)
out = flash_attn_cute.flash_attn_func(q, q, q)
passes = {"forward": lambda: flash_attn_cute.flash_attn_func(q, q, q), "backward": lambda: out.sum().backward()}
for name, products in (("forward", 2), ("backward", 5)):
    child = os.fork()
    if not child:
        assert "torch.utils.flop_counter" not in sys.modules
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counter:
            passes[name]()
        os._exit(counter.get_total_flops() != products * 2 * 2 * 16 * 8)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_selected_blocks() -> None:
    """Pairs that are gathered count, or those visible without the selection if these are fewer."""
    q, k = torch.randn(2, 30, HEADS, D), torch.randn(2, 40, HEADS, D)
    for top, pairs in ((3, 30 * 12), (20, 30 * 40)):
        mask = BlockMask.from_selection(torch.zeros(1, 1, 30, top, dtype=torch.int32), block=4, seqlen_k=40)
        assert counted(lambda mask=mask: flash_attn_func(q, k, k, block_mask=mask)) == 2 * HEADS * 2 * pairs * 2 * D


def test_column_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend has them, one product; else they are attention."""

    class WithKernel(PortableBackend):
        has_column_sums = True

        def column_sums(self, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> Tensor:
            return lse.new_zeros(*lse.shape[:-1], inputs.k.shape[1])

    q, k, lse = torch.randn(1, 5, HEADS, D), torch.randn(1, 8, 2, D), torch.zeros(1, HEADS, 5)
    monkeypatch.setitem(dispatch.BACKENDS, "portable", WithKernel())
    assert counted(lambda: column_sums(q, k, lse, causal=True)) == 2 * HEADS * pairs_of([(5, 8)], (None, 0)) * D
