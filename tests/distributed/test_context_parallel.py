"""Attention over several ranks gives what one process gives."""

import json
import random
import statistics
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import long_documents, over_ranks, ranks_model
from benchmarks.harness import CaseReport, Spread
from benchmarks.suites import context_parallel as suite
from benchmarks.work import Work
from flash_attn_cute.calls import dispatch
from flash_attn_cute.distributed import Sharding, cost_model, method_plan
from flash_attn_cute.distributed.all_gather import AllGather
from flash_attn_cute.distributed.block_mask_method import BlockMaskMethod
from flash_attn_cute.distributed.call_passes import (
    Context,
    Merged,
    check_backend,
    forward,
    prepared,
)
from flash_attn_cute.distributed.checked_call import METHODS, PlanRequest, RankCall, Shape, plan_request
from flash_attn_cute.distributed.key_value_rows import KeyValues
from flash_attn_cute.distributed.packed_calls import Call, Run, calls_of, parts_of
from flash_attn_cute.distributed.process_groups import Place
from flash_attn_cute.distributed.rank_layout import Layout
from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.spec import Options
from tests.lib import checks, oracle, ranks
from tests.lib.checks import random_call
from tests.lib.over_ranks import block_masks, disagreements, drawn, meshes, padded, precision, programs, uncut

# What ranks are started for takes less time than to start them.
ON_RANKS: dict[int, list[Callable[[], None]]] = {
    1: [block_masks.block_masks, programs.operators_are_sound, padded.padded_documents, drawn.drawn_calls],
    2: [
        programs.benchmark,  # which collects garbage, of which compilers leave much
        block_masks.block_masks,
        precision.low_precision,
        programs.second_derivatives,
        programs.compiled,
        programs.compiled_in_context,
        programs.compiled_without_a_sharding,
        programs.backward_without_a_group,
        programs.example,
        padded.padded_documents,
        drawn.drawn_calls,
        uncut.uncut_documents,
    ],
    3: [precision.as_precise_as_one, padded.padded_documents, drawn.drawn_calls],
    4: [
        precision.one_part_and_several,
        precision.as_precise_as_one,
        block_masks.block_masks,
        meshes.rows_come_together,
        meshes.other_meshes,
        meshes.nothing_to_do,
        meshes.neighbours,
        padded.padded_documents,
        drawn.drawn_calls,
    ],
    8: [drawn.drawn_calls],
}


@pytest.fixture
def fuzz(fuzz_seconds: float) -> dict[str, str]:
    """How long calls are drawn on each number of ranks, and from which seed."""
    return {"FUZZ_SECONDS": str(fuzz_seconds), "FUZZ_SEED": str(checks.fuzz_seed)}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", ON_RANKS)
def test_ranks_give_what_one_process_gives(num_ranks: int, tmp_path: Path, fuzz: dict[str, str]) -> None:
    ranks.run(ON_RANKS[num_ranks], num_ranks, tmp_path, **fuzz)


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_gpus_repeat_their_bits(num_gpus: int, tmp_path: Path) -> None:
    """A GPU a rank: errors by the rule of all tests, and the same bits in 200 repetitions."""
    _skip_without(num_gpus)
    ranks.run([precision.on_gpus], num_gpus, tmp_path, backend="nccl")


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_gpus(num_gpus: int, tmp_path: Path, fuzz: dict[str, str]) -> None:
    """A GPU a rank: padding and drawn calls."""
    _skip_without(num_gpus)
    ranks.run([padded.padded_on_a_gpu, drawn.drawn_calls_on_a_gpu], num_gpus, tmp_path, backend="nccl", **fuzz)


def _skip_without(num_gpus: int) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_gpu(tmp_path: Path, fuzz: dict[str, str]) -> None:
    """A group of one rank: padding and drawn calls, which compile few kernels."""
    ranks.run([padded.padded_on_a_gpu, drawn.drawn_calls_on_a_gpu], 1, tmp_path, backend="nccl", **fuzz)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_a_gpu(num_ranks: int, tmp_path: Path, fuzz: dict[str, str]) -> None:
    ranks.run(
        [precision.on_a_gpu, padded.padded_on_a_gpu, drawn.drawn_calls_on_a_gpu],
        num_ranks,
        tmp_path,
        backend="shared",
        **fuzz,
    )


def test_ranks_that_disagree_get_the_same_error(tmp_path: Path) -> None:
    ranks.run(
        [
            disagreements.disagreements,
            disagreements.other_gradients,
            disagreements.outsiders,
            disagreements.meshes_out_of_order,
            disagreements.other_backends,
        ],
        3,
        tmp_path,
        FLASH_ATTN_CUTE_CHECK="1",
    )


def random_runs(draw: random.Random, length: int) -> list[Run]:
    """Some positions, in adjacent rows."""
    runs, row, position = [], draw.randint(0, 3), 0
    while position < length:
        stop = min(length, position + draw.randint(1, 12))
        if draw.random() < 0.6:
            runs.append(Run(position, stop, row))
            row += stop - position
        position = stop
    return runs


@pytest.mark.parametrize("seed", range(300))
def test_parts_are_what_the_mask_shows(seed: int) -> None:
    """Each visible pair in one part, as that part's window shows it, and no other pair in any."""
    draw = random.Random(seed)
    length_q, length_k = draw.randint(1, 40), draw.randint(1, 40)
    window = (draw.choice([None, 0, 3, 15]), draw.choice([None, 0, 0, 3, 15]))
    queries, keys = random_runs(draw, length_q), random_runs(draw, length_k)
    parts = parts_of({7: queries}, {7: keys}, {7: Band.of(window, length_q, length_k)})  # type: ignore[arg-type]
    nothing = torch.empty(0)
    visible = oracle.window(oracle.Call(nothing, nothing, nothing, window_size=window), length_q, length_k)
    expected = torch.zeros(60, 60, dtype=torch.int64)
    for q in queries:
        for k in keys:
            seen = visible[q.start : q.stop, k.start : k.stop]
            expected[q.row : q.row + q.stop - q.start, k.row : k.row + k.stop - k.start] = seen
    got = torch.zeros_like(expected)
    for call in calls_of(parts, torch.device("cpu")):
        for q_rows, k_rows in zip(sequences(call, "q"), sequences(call, "k"), strict=True):
            shown = oracle.Call(nothing, nothing, nothing, window_size=call.window)
            got[slice(*q_rows), slice(*k_rows)] += oracle.window(shown, q_rows[1] - q_rows[0], k_rows[1] - k_rows[0])
    assert got.equal(expected)


def sequences(call: Call, side: str) -> list[tuple[int, int]]:
    """The rows (start, stop) of each sequence of a call, which is checked to be a valid one."""
    start, stop = (getattr(call, f"{side}_{end}") for end in ("start", "stop"))
    cu, used = getattr(call, f"cu_seqlens_{side}").tolist(), getattr(call, f"seqused_{side}")
    slots = [b - a for a, b in pairwise(cu)]
    lengths = slots if used is None else used.tolist()
    assert cu[0] == 0
    assert start + cu[-1] == stop
    assert all(0 < length <= slot for length, slot in zip(lengths, slots, strict=True))
    assert max(lengths) == getattr(call, f"max_seqlen_{side}")
    return [(start + a, start + a + length) for a, length in zip(cu, lengths, strict=False)]


@pytest.mark.parametrize("rank", [0, 1])
def test_documents_of_one_rank_are_one_call_on_its_own_rows(rank: int) -> None:
    """They are not collected, under whatever window; rows of the shared document are padding to that call."""
    lengths = (10, 200, 30, 40)
    sharding = Sharding.contiguous([0, *accumulate(lengths)], 2, total=285)  # the second document is cut at row 142
    for window in ((None, 0), (15, 0), (None, None)):
        layout = Layout.of(sharding, sharding, lengths, lengths, window)
        planned = AllGather(layout, rank, torch.device("cpu"))
        own, expected = planned._own_call, ([0, 142], [10]) if rank == 0 else ([0, 68, 98, 143], [0, 30, 40])
        assert own is not None
        assert own.window == window
        assert (own.q_start, own.q_stop, own.k_start, own.k_stop) == (0, expected[0][-1]) * 2
        assert [own.cu_seqlens_q.tolist(), own.seqused_q.tolist()] == list(expected)  # type: ignore[union-attr]
        assert own.cu_seqlens_k is own.cu_seqlens_q
        assert own.seqused_k is own.seqused_q
        assert planned._queries == planned._keys == [(10, 142) if rank == 0 else (0, 68)]
        assert planned._num_collected <= 200
        assert all(0 <= call.q_start < call.q_stop <= (132 if rank == 0 else 68) for call in planned._calls)


@pytest.mark.parametrize("documents", [[4096], [4096, 1000, 3000]])
def test_a_step_of_a_causal_ring_is_one_call(documents: list[int]) -> None:
    """An early and a late chunk of a document need no more launches than one would."""
    sharding = Sharding.balanced([0, *accumulate(documents)], 4, causal=True)
    layout = Layout.of(sharding, sharding, tuple(documents), tuple(documents), (None, 0))
    for rank, other in product(range(4), range(4)):
        parts = parts_of(layout.queries_of[rank], layout.keys_of[other], layout.bands)
        assert len(parts) == len({d for d in layout.queries_of[rank] if d in layout.keys_of[other]})
        assert len(calls_of(parts, torch.device("cpu"))) <= 1
        assert {part.window for part in parts} <= ({(None, 0)} if rank == other else {(None, None)})


@pytest.mark.parametrize("window", [(None, 0), (100, 0), (None, None)])
@pytest.mark.parametrize("other", [None, 0, 1])
def test_hopper_kernels_serve_the_calls(other: int | None, window: tuple[int | None, int | None]) -> None:
    """Calls on keys of another rank, on a rank's own keys, and on collected ones."""
    sharding = Sharding.balanced([0, 700, 710, 2000], 2, causal=True)
    layout = Layout.of(sharding, sharding, (700, 10, 1290), (700, 10, 1290), window)
    everything = {d: [Run(0, n, start)] for d, (n, start) in enumerate(((700, 0), (10, 700), (1290, 710)))}
    keys = everything if other is None else layout.keys_of[other]
    calls = calls_of(parts_of(layout.queries_of[1], keys, layout.bands), torch.device("cpu"))
    assert calls
    q, kv = torch.empty(1000, 4, 64, dtype=torch.float16), torch.empty(2000, 2 * (64 + 128), dtype=torch.float16)
    rows = KeyValues(kv, 2, 64)
    options = Options(None, None, None, 0.0, True, True)
    for call in calls:
        _, spec, inputs = prepared(Context(options, None, None), call, q, rows.k, rows.v)
        assert dispatch.select(spec, inputs, "sm90", dispatch.supposing("sm90")).name == "sm90"
        assert all(x.stride(-1) == 1 and x.stride(0) % 8 == 0 for x in (inputs.q, inputs.k, inputs.v))


def test_parts_of_out_are_rounded_once() -> None:
    """Merged from parts of the keys, out in bfloat16 is what rounding of the exact one gives, and no worse."""
    given = random_call([300], [512], nheads=4, nheads_k=2, dtype=torch.bfloat16)
    with torch.no_grad():
        q, k, v = given.q, given.k, given.v
        true, _ = oracle.attention(given.to(torch.float64))
        merged = Merged(q, v.shape[-1], shared=True)
        context = Context(Options(None, None, None, 0.0, True, True), "portable", None)
        for start in range(0, 512, 128):
            cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (300, 128))
            call = Call(0, 300, start, start + 128, (None, None), 300, 128, cu_q, cu_k, None, None)
            merged.add(call, forward(context, call, q, k, v, is_part=True))
        out = merged.result(None, ()).out

    def error(x: torch.Tensor) -> float:
        return (x - true).square().mean().sqrt().item()

    assert out.dtype == torch.bfloat16
    assert error(out) == pytest.approx(error(true.bfloat16()), rel=1e-3)


SMALL = ["--tokens-per-rank", "20", "--packs", "1", "--sequence", "48", "--window", "8", "--heads", "4", "2", "8"]


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
@pytest.mark.usefixtures("small_ceilings")
def test_the_benchmark_of_ranks(alone: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It starts the ranks, measures, writes, and prints what it has written with the model beside it."""
    ranks, more = (2, ["--alone"]) if alone else (1, [])
    given = ["--ranks", str(ranks), *SMALL, "--rounds", "2", "--cases", "documents", "--out", str(tmp_path), *more]
    assert cli.main(["context-parallel", *given]) == 0
    name = "context_parallel-alone" if alone else "context_parallel"
    path = tmp_path / f"{name}-{ranks}-cpu-float32.json"
    found = json.loads(path.read_text())
    assert found["environment"]["ranks"] == ranks
    shares = {f"{method}, rank {rank}" for method in method_plan.KEY_METHODS for rank in range(ranks)}
    passes = [{suite.ONE, *shares} if alone else {suite.ONE, suite.SHARE, *METHODS}] * 2
    if not alone:
        assert found["environment"]["devices"] == ["cpu"]
        passes[1] = passes[1] | {f"{method}, deterministic" for method in METHODS if method != "auto"}
    assert [set(case["measured"]) for case in found["cases"]] == passes
    printed = capfd.readouterr().out
    assert cli.main(["context-parallel", "--record", str(path)]) == 0
    (again, *_), (before, *_) = capfd.readouterr().out.splitlines(), printed.splitlines()[0 if alone else 1 :]
    assert again == before
    assert again.startswith("documents, 20 a rank, pack 0, forward: ")


def test_rates_are_those_of_one_gpu() -> None:
    """Ranks share the work; the one GPU that has all rows does all of it."""
    case = CaseReport(
        name="a, forward",
        length=None,
        detail="",
        work=Work(8e12, 0.0),
        against={},
        times={suite.ONE: Spread(2.0, 2.0, 2.0), "ring": Spread(0.5, 0.5, 0.5)},
        ratios={},
        peak_bytes={suite.ONE: None, "ring": None},
        unavailable={},
        flop_rate=Spread(1e13, 1e13, 1e13),
        byte_rate=Spread(1.0, 1.0, 1.0),
        panel="documents, forward",
    )
    backward = replace(case, name="a, backward", panel="documents, backward", times={"ring": Spread(1.0, 1.0, 1.0)})
    lines = over_ranks.mean_lines([case, backward], 4)
    # Of 3.5 units of work one takes 1 / 4 s and 2.5 take 2.5 / 2 s.
    assert lines[1:] == [
        f"  documents: {suite.ONE}: forward 4",
        "  documents: ring: forward 4, backward 2, both 2.33",
    ]


@pytest.mark.parametrize("tokens", [1, 7, 4096, 65_536, 524_288])
def test_packs_of_long_documents(tokens: int) -> None:
    """Packs have as many tokens as asked for, no document above a quarter of them, and the median of the corpus."""
    packs = [long_documents.pack(tokens, seed) for seed in range(20)]
    assert all(sum(pack) == tokens and min(pack) > 0 and max(pack) <= max(1, tokens // 4) for pack in packs)
    assert packs[0] == long_documents.pack(tokens, 0)
    if tokens >= 65_536:
        assert 450 < statistics.median(length for pack in packs for length in pack) < 700
        assert max(map(max, packs)) == tokens // 4 if tokens == 65_536 else max(map(max, packs)) > 100_000


SHAPE = Shape(32, 8, 128, 128, 2)


@pytest.mark.parametrize(
    ("documents", "num_ranks", "by_heads", "expected"),
    [
        ([131_072], 2, True, "all_gather"),  # nothing is merged, and heads in groups make K and V small
        ([131_072], 8, True, "all_to_all"),  # trading heads moves less the more ranks there are
        ([1000] * 128, 8, True, "all_gather"),  # next to nothing is moved
        ([4_194_304], 64, True, "ring"),  # 64 ranks have no part of 8 heads, and all keys are too many for one
        ([131_072], 8, False, "all_gather"),
    ],
)
def test_auto_chooses_what_waits_least(documents: list[int], num_ranks: int, by_heads: bool, expected: str) -> None:
    sharding = Sharding.balanced([0, *accumulate(documents)], num_ranks, causal=True)
    layout = Layout.of(sharding, sharding, tuple(documents), tuple(documents), (None, 0))
    found = cost_model.estimates(layout, SHAPE)
    if not by_heads:
        found.pop("all_to_all")
    assert cost_model.best(found) == expected


@pytest.mark.parametrize("packing_invariant", [False, True])
def test_auto_trades_heads_where_that_waits_least(packing_invariant: bool) -> None:
    """If invariant, where no rank shares a head of k with another one: here each of 8 has one."""
    sharding = Sharding.balanced([0, 131_072], 8, causal=True)
    request = PlanRequest(sharding, None, 1, None, None, (None, 0), "auto", SHAPE, packing_invariant=packing_invariant)
    assert method_plan.plan(request, Place(0, 8, 1), torch.device("cpu")).trade is not None


def test_a_plan_is_made_once_for_all_layers() -> None:
    sharding = Sharding.contiguous([0, 8], 2)
    request = PlanRequest(sharding, None, 1, None, None, (None, 0), "ring", SHAPE)
    found = method_plan.plan(request, Place(0, 2, 1), torch.device("cpu"))
    assert method_plan.plan(request._replace(), Place(0, 2, 1), torch.device("cpu")) is found
    assert method_plan.plan(request, Place(1, 2, 1), torch.device("cpu")) is not found
    plans, gone = weakref.ref(found.method), weakref.ref(sharding)
    del found, request, sharding
    assert gone() is None, "something keeps the layout"
    assert plans() is None


def test_a_backend_is_checked_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls with the same options and heads; one that is refused is refused again."""
    asked: list[str | None] = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *given: asked.append(given[2]) or select(*given))  # type: ignore[func-returns-value]
    options, q, k = Options(softcap=3.25), torch.empty(5, 4, 8), torch.empty(7, 2, 8)
    for rows in (5, 0):
        check_backend("portable", options, q[:rows], k, k, None)
    check_backend("portable", options, q, k, k, torch.empty(4))
    check_backend("portable", options, q, q, q, None)
    for _ in range(2):
        with pytest.raises(ValueError, match="which cannot: tensors on cpu"):
            check_backend("sm90", options, q, k, k, None)
    assert asked == ["portable"] * 3 + ["sm90"] * 2


@pytest.mark.parametrize(
    ("used", "message"),
    [
        ((None, [5, 6]), "seqused_q: expected at most 5 real rows of document 0, .* got all 7: make the sharding with"),
        (([5, 6], None), "seqused_k: expected at most 5 real rows of document 0, .* got all 7: make the sharding with"),
        (([5, 6], [5, 8]), "seqused_k: expected at most 7 real rows of document 1, .* got 8: make the sharding with"),
        (([5, 7], [0, 6]), ""),
    ],
)
def test_rows_that_a_sharding_has_as_padding_are_not_real(used: tuple[Any, Any], message: str) -> None:
    """They are of no document there: queries came out as zeros, and keys were not seen."""
    sharding = Sharding.balanced([0, 7, 15], 1, seqused_q=[5, 7], seqused_k=[0, 6])
    q, k, v = torch.randn(15, 2, 8), torch.randn(15, 1, 8), torch.randn(15, 1, 4)
    call = RankCall(q, k, v, None, sharding, None, *used, (), "auto", dense=False)
    if message:
        with pytest.raises(ValueError, match=message):
            plan_request(call, Options(), Place(0, 1, 1))
    else:
        request = plan_request(call, Options(), Place(0, 1, 1))
        assert (request.seqused_q, request.shape) == ((5, 7), Shape(2, 1, 8, 4, 4))


def test_entries_have_no_more_rows_than_a_sharding_has() -> None:
    sharding = Sharding.balanced([0, 7], 1, seqused_q=[5])
    q = torch.randn(3, 7, 2, 8)
    call = RankCall(q, q, q, None, sharding, None, [5, 2, 5], [5, 2, 6], (), "auto", dense=True)
    with pytest.raises(ValueError, match=r"seqused_k: expected at most 5 real rows of entry 2, .* got 6"):
        plan_request(call, Options(), Place(0, 1, 1))


def test_a_plan_under_a_block_mask_is_another_one() -> None:
    sharding = Sharding.contiguous([0, 8], 2)
    request = PlanRequest(sharding, None, 1, None, None, (None, None), "all_to_all", SHAPE)
    where = Place(0, 1, 2), torch.device("cpu")
    masked = method_plan.plan(request._replace(has_block_mask=True), *where)
    assert isinstance(masked.method, BlockMaskMethod)
    assert not isinstance(method_plan.plan(request, *where).method, BlockMaskMethod)
    assert method_plan.plan(request._replace(has_block_mask=True), *where) is masked


def test_methods_of_invariant_calls() -> None:
    """Neither a ring nor ranks that share heads, which sum parts of what is a document's; "auto" chooses neither."""
    sharding = Sharding.contiguous([0, 8], 4)
    request = PlanRequest(sharding, None, 1, None, None, (None, 0), "ring", SHAPE, packing_invariant=True)
    where, cpu = Place(0, 4, 1), torch.device("cpu")
    with pytest.raises(ValueError, match="method: expected 'auto', 'all_gather' or 'all_to_all' with determin"):
        method_plan.plan(request, where, cpu)
    shared = request._replace(method="all_to_all", shape=SHAPE._replace(nheads_k=2))
    with pytest.raises(ValueError, match="deterministic: expected a bool where ranks share heads of k"):
        method_plan.plan(shared, Place(0, 1, 4), cpu)
    assert isinstance(method_plan.plan(shared._replace(method="auto"), where, cpu).method, AllGather)


def test_heads_that_the_ranks_of_a_mesh_cannot_trade() -> None:
    """It is the mesh that asks for it, whatever the method."""
    request = PlanRequest(Sharding.contiguous([0, 8], 6), None, 1, None, None, (None, 0), "ring", SHAPE)
    with pytest.raises(
        ValueError, match=r"group: expected a mesh .* \(3 ranks do not divide the 32 .* got 2 x 3 ranks"
    ):
        method_plan.plan(request, Place(0, 2, 3), torch.device("cpu"))


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "message"),
    [
        ((8, 2, 8), (8, 2, 0), r"at least one head .* got shape \(8, 2, 0\)"),
        ((8, 2, 8), (1, 8, 2, 8), r"shape \(rows_k, nheads_k, d\)"),
        ((1, 8, 2, 8), (1, 8, 2, 0), r"at least one head .* got shape \(1, 8, 2, 0\)"),
        ((1, 8, 2, 8), (8, 2, 8), r"shape \(batch, seqlen_k, nheads_k, d\)"),
    ],
)
def test_errors_have_the_shapes_of_the_call(q_shape: tuple[int, ...], k_shape: tuple[int, ...], message: str) -> None:
    """Packed, or of a dense batch."""
    q, k = torch.randn(q_shape), torch.randn(k_shape)
    call = RankCall(q, k, k, None, Sharding.contiguous([0, 8], 1), None, None, None, (), "auto", dense=q.ndim == 4)
    with pytest.raises(ValueError, match=f"^k: expected {message}"):
        plan_request(call, Options(), Place(0, 1, 1))


def test_each_method_has_a_name_and_a_class() -> None:
    assert set(METHODS) == {"auto", "all_to_all", *method_plan.KEY_METHODS}


def test_the_model_of_the_benchmark() -> None:
    corpora = suite.Row("causal", "one sequence", (16_384,)), suite.Row("", "documents", long_documents.pack(32_768, 0))
    rows = list(ranks_model.modelled(corpora))
    assert {(row.corpus, row.ranks) for row in rows} == set(
        product((corpus.name for corpus in corpora), ranks_model.RANKS)
    )
    assert all(row.imbalance < 0.03 for row in rows if row.ranks < 512)
    for row in rows:
        assert 0 < row.estimate.received < 1e12
        assert 0 < row.estimate.buffers < 1e12
    of = {(row.corpus, row.ranks, row.method): row.estimate.received for row in rows}
    assert of["one sequence", 8, "all_gather"] == of["one sequence", 8, "ring"]
    assert of["documents", 64, "all_gather"] < of["documents", 64, "ring"] / 1.5
