"""Calls rewritten as other sequences: the same rows attend to the same keys."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends import packing
from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.calls.dispatch import BACKENDS
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from tests.lib.checks import Case, each_of, random_call, same_bits
from tests.lib.interpreted.common import as_given
from tests.lib.oracle import Call, window

FORMS: dict[str, Case] = {
    "packed": {"packed": True, "seqused": False},
    "packed, seqused": {"packed": True, "seqused": True},
    "dense": {"packed": False, "seqused": False},
    "dense, seqused": {"packed": False, "seqused": True},
}


def random_lengths(draw: random.Random, form: dict[str, Any]) -> tuple[list[int], list[int]]:
    batch = draw.randint(0, 4)
    lengths_q, lengths_k = ([draw.randint(0, 9) for _ in range(batch)] for _ in range(2))
    if form["packed"] or form["seqused"]:
        return lengths_q, lengths_k
    return lengths_q[:1] * batch, lengths_k[:1] * batch


def inputs_of(call: Call) -> AttentionInputs:
    return as_given(call)[0]


def retold(call: Call, inputs: AttentionInputs) -> Call:
    where = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
    return replace(call, q=inputs.q, k=inputs.k, v=inputs.v, **where)


def visible_pairs(call: Call) -> Tensor:
    """(rows of q, rows of k), counted over the batch: which row of a packed or dense call sees which."""
    rows_q, rows_k = call.q.shape[-3], call.k.shape[-3]
    entries = 1 if call.cu_seqlens_q is not None else call.q.shape[0]
    pairs = torch.zeros(entries * rows_q, entries * rows_k, dtype=torch.bool)
    for b, of_q, of_k in call.sequences():
        first_q, first_k = (b or 0) * rows_q, (b or 0) * rows_k
        visible = window(call, of_q.stop - of_q.start, of_k.stop - of_k.start)
        pairs[first_q + of_q.start : first_q + of_q.stop, first_k + of_k.start : first_k + of_k.stop] = visible
    return pairs


@each_of("form", FORMS)
def test_fully_masked_queries_apart(form: dict[str, Any]) -> None:
    """Fully masked queries, by a look at every pair, are the first of each two sequences, and none of the others."""
    seen = 0
    for seed in range(300):
        draw = random.Random(seed)
        lengths_q, lengths_k = random_lengths(draw, form)
        left, right = draw.choice([None, draw.randint(0, 9)]), draw.choice([0, draw.randint(0, 9), 2**31 - 2])
        call = random_call(lengths_q, lengths_k, head_dim=2, window_size=(left, right), **form)
        inputs = inputs_of(call)
        if not form["packed"]:
            if not form["seqused"]:
                has_keys = call.k.shape[1] > 0  # else no kernel is asked
                fully_masked = call.fully_masked_rows().any().item()
                assert packing.dense_has_fully_masked(inputs, right) == fully_masked or not has_keys
            inputs = packing.as_packed(inputs)
            assert torch.equal(visible_pairs(retold(call, inputs)), visible_pairs(call))
        apart = retold(call, packing.split_fully_masked(inputs, right))
        assert torch.equal(visible_pairs(apart), visible_pairs(call))
        for real, original in zip(apart.real_rows(), call.real_rows(), strict=True):
            assert torch.equal(real, original.flatten())
        fully_masked_rows, sequences = call.fully_masked_rows().flatten(), apart.sequences()
        assert len(sequences) == 2 * len(lengths_q)
        for (_, masked_q, no_keys), (_, seeing_q, keys) in zip(sequences[::2], sequences[1::2], strict=True):
            assert no_keys.start == no_keys.stop == keys.start
            assert fully_masked_rows[masked_q].all()
            assert not fully_masked_rows[seeing_q].any() or keys.start == keys.stop
            seen += masked_q.stop - masked_q.start
    assert seen > 100


def test_equal_lengths_are_left_alone() -> None:
    """So is a window that is not bounded to the right; what cannot be seen to be equal is not."""
    call = random_call([5, 7], seqused=True)
    bare, padded = inputs_of(replace(call, seqused_q=None, seqused_k=None)), inputs_of(call)
    assert bare.cu_seqlens_q is not None
    assert padded.seqused_q is not None
    same_offsets = bare._replace(cu_seqlens_k=bare.cu_seqlens_q.detach())
    same_used = padded._replace(seqused_k=padded.seqused_q.detach())
    dense = inputs_of(random_call([5], [3], packed=False))
    for inputs in (same_offsets, same_used, dense):
        assert packing.split_fully_masked(inputs, 0) is inputs
    assert packing.split_fully_masked(bare, None) is bare
    for inputs in (bare, padded, same_offsets._replace(seqused_k=padded.seqused_k)):
        assert packing.split_fully_masked(inputs, 0) is not inputs


@each_of("form", FORMS)
def test_backends_agree_on_rewritten_calls(form: dict[str, Any]) -> None:
    """Gradients of the given sequences and of the rewritten ones have the same bits."""
    for lengths_q, lengths_k in (([9, 9], [4, 4]), ([40, 40], [60, 60])):
        call = random_call(lengths_q, lengths_k, causal=True, **form)
        inputs = inputs_of(call)
        packed = inputs if form["packed"] else packing.as_packed(inputs)
        results = []
        for rewritten in (packed, packing.split_fully_masked(packed, 0)):
            spec = AttentionSpec.of(rewritten, Options(None, None, 0, 0.0, True, True))
            out, lse, *_ = BACKENDS["portable"].forward(spec, rewritten)
            grads = BACKENDS["portable"].backward(BackwardCall(spec, rewritten, out, lse, torch.ones_like(out)))
            results.append((out, lse, *grads[:3]))
        assert same_bits(*results)


@each_of("form", FORMS)
def test_intervals_are_what_rows_see(form: dict[str, Any]) -> None:
    """Intervals of each query and, the other way round, of each key; rows that no sequence owns come back as zeros."""
    for seed in range(200):
        draw = random.Random(f"{seed} {form}")
        sides = draw.choice([None, 0, 3, 2**31 - 2]), draw.choice([None, 0, 3, 2**31 - 2])
        call = random_call(*random_lengths(draw, form), **form, window_size=sides)
        inputs = inputs_of(call)
        _, spec = as_given(call)
        _, dense, seen = packing.as_one_batch(spec, inputs)
        entries, rows_q, rows_k = dense.q.shape[0], dense.q.shape[1], dense.k.shape[1]
        pairs = visible_pairs(call).view(entries, rows_q, entries, rows_k)
        pairs = torch.stack([pairs[b, :, b] for b in range(entries)]) if entries else pairs.new_zeros(0, rows_q, rows_k)
        for intervals, shown in ((seen.keys, pairs), (seen.queries, pairs.mT)):
            assert intervals.dtype == torch.int32
            place = torch.arange(shown.shape[2])
            assert torch.equal((place >= intervals[..., :1]) & (place < intervals[..., 1:]), shown)
        for x, given, real in ((dense.q, inputs.q, pairs.any(2)), (dense.k, inputs.k, seen.real_k)):
            assert (x[~real] == 0).all()
            assert torch.equal(x[real], given.view_as(x)[real])
        for own, real in zip(call.real_rows(), (seen.real_q, seen.real_k), strict=True):
            assert torch.equal(own.view_as(real), real)
