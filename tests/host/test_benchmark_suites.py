"""Suites of the benchmarks, on tiny shapes: what they compare, that contenders compute the same, and their rows."""

import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import __main__ as cli
from benchmarks import harness, report
from benchmarks.harness import CaseReport, Suite, Unavailable
from benchmarks.suites import attention, bias, packed, selected, sparse
from benchmarks.work import Passes, attention_flop
from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.usefixtures("small_ceilings")

CPU = torch.device("cpu")
Row = TypeVar("Row", bias.Row, sparse.Row)
MakeSuite = Callable[[torch.device, torch.dtype], Suite[Any]]
TINY = (packed.Shape("ragged", (5, 1, 17), 2, 2, 8), packed.Shape("gqa", (9, 30), 4, 2, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_suite_on_tiny_shapes(dtype: torch.dtype) -> None:
    suite = replace(packed.suite(CPU, dtype, TINY), rounds=3)
    reports = [harness.measure(suite, case) for case in suite.cases()]
    assert [result.name for result in reports] == ["ragged", "gqa"]
    assert reports[0].work.flop == attention_flop(15 + 1 + 153, 2, 8, 8, "both")
    for result in reports:
        assert list(result.times) == [packed.LOOP, packed.PACKAGE, packed.PADDED]
    verdicts = harness.judge(suite.bars, reports)
    assert [verdict.bar.case for verdict in verdicts] == (["ragged"] if dtype == torch.float32 else [])
    assert all(verdict.ratio is not None for verdict in verdicts)


@pytest.mark.parametrize("passes", ["forward", "backward", "both"])
def test_bars_of_the_attention_suites(passes: Passes) -> None:
    suite = attention.suite(passes, CPU, torch.bfloat16)
    assert suite.name == passes
    bars = [bar for bar in suite.bars if bar.against == attention.FA4]
    assert len(bars) == len(attention.DENSE) + len(attention.BOARD) + len(attention.PACKED)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bool]]:
    """Attention suites of tiny cases, by the portable backend, which stands in for flash-attn-4, too.

    Returns who was called with which ``deterministic``. Flash-attn-4's stand-in refuses it where d = 16.
    """
    asked = set()

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, deterministic: bool, **options: Any) -> Any:
            asked.add((attention.PACKAGE, deterministic))
            return function(*args, deterministic=deterministic, **options)

        return call

    def peer(q: torch.Tensor, *args: Any, deterministic: bool, **options: Any) -> tuple[torch.Tensor, None]:
        asked.add((attention.FA4, deterministic))
        if deterministic and q.shape[-1] == 16:
            raise NotImplementedError("d = 16")
        function = flash_attn_varlen_func if "cu_seqlens_q" in options else flash_attn_func
        return function(q, *args, **options), None

    for function in (flash_attn_func, flash_attn_varlen_func):
        monkeypatch.setattr(attention, function.__name__, recording(function))
    functions = {"flash_attn_func": peer, "flash_attn_varlen_func": peer}
    stand_in(monkeypatch, flash_attn={}, flash_attn__cute=functions)
    set_all(monkeypatch, attention, BACKEND="portable", TOKENS=32, DOCUMENTS=(5, 1, 17), LENGTHS=(8, 16, 32))
    set_all(monkeypatch, attention, DENSE=((2, 2, 8, 16, True), (4, 2, 16, 16, False)))
    set_all(monkeypatch, attention, BOARD=((4, 1, 8, 12, True),), PACKED=((4, 2, 8),))
    for name in ("forward", "backward", "both", "lengths"):
        shorten(monkeypatch, name, cli.SUITES[name])
    return asked


def written(suite: str, out: Path) -> dict[str, CaseReport]:
    """Runs a suite by the command, which draws it, too; returns the cases of its record by name."""
    pytest.importorskip("matplotlib")
    cli.main([suite, "--device", "cpu", "--out", str(out)])
    assert (out / f"{suite}-cpu-float32.png").read_bytes().startswith(b"\x89PNG")
    return {case.name: case for case in report.read_json(out / f"{suite}-cpu-float32.json")}


def verdicts(printed: str) -> dict[tuple[str, str, str], bool]:
    """Whether bars hold, by case, contender and opponent."""
    lines = re.findall(r"^bar: (\w+): (.*): (.*) takes .* of the time of (.*) \(", printed, re.MULTILINE)
    return {(case, contender, against): verdict == "pass" for verdict, case, contender, against in lines}


def of_rows(
    cases: dict[str, CaseReport], rows: Sequence[Row], pairs: dict[str, int], numbers_a_pair: int
) -> Iterator[tuple[Row, CaseReport]]:
    """The cases of rows, which are both passes of each, and whose FLOP are those of so many visible pairs."""
    assert list(cases) == [f"{passes} {row.name}" for row in rows for passes in ("forward", "backward")]
    for row in rows:
        for passes, factor in (("forward", 1.0), ("backward", 2.5)):
            case = cases[f"{passes} {row.name}"]
            assert case.panel == passes
            assert case.work.flop == pytest.approx(factor * 4 * pairs[row.name] * numbers_a_pair, rel=1e-6)
            yield row, case


def set_all(monkeypatch: pytest.MonkeyPatch, place: Any, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(place, name, value)


def stand_in(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Modules that may be imported then, and what is in them; a name has "__" for a point."""
    for name, content in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def shorten(monkeypatch: pytest.MonkeyPatch, name: str, make: MakeSuite, **limits: Any) -> None:
    """The command measures a suite in three rounds."""
    monkeypatch.setitem(cli.SUITES, name, lambda device, dtype: replace(make(device, dtype), rounds=3, **limits))


PLAIN = [attention.PACKAGE, attention.FA4]
DETERMINISTIC = [attention.PACKAGE_DETERMINISTIC, attention.FA4_DETERMINISTIC]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("suite", ["backward", "both"])
def test_deterministic_contenders(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = written(suite, tmp_path)
    assert list(cases) == ["2x8 16 causal", "4/2x16 16 full", "4/1x8 12 causal", "documents 4/2x8 causal"]
    for case in cases.values():
        refused = DETERMINISTIC[1:] if "x16" in case.name else []
        names = [name for name in PLAIN + DETERMINISTIC if name not in refused]
        assert [name for name in case.times if name != attention.CUDNN] == names
        for name in refused:
            assert case.unavailable[name] == "raised NotImplementedError: d = 16"
    expected = {
        (attention.FA4, attention.PACKAGE): 4,
        (attention.PACKAGE_DETERMINISTIC, attention.PACKAGE): 4,
        (attention.FA4_DETERMINISTIC, attention.PACKAGE_DETERMINISTIC): 3,
    }
    means = {(mean.contender, mean.against): mean.cases for mean in harness.means(list(cases.values()))}
    assert {pair: count for pair, count in means.items() if attention.CUDNN not in pair} == expected
    printed = capsys.readouterr().out
    for (contender, against), count in expected.items():
        line = rf"mean: {contender} takes \S+ of the time of {against} and \S+ of its peak memory \(\D+{count}\)"
        assert re.search(line, printed)


def test_forward_passes_need_no_deterministic_contenders(tiny: set[tuple[str, bool]], tmp_path: Path) -> None:
    """But one that asks for the largest logits."""
    for case in written("forward", tmp_path).values():
        assert attention.PACKAGE_MAX_LOGITS in case.times
        assert not {*case.times, *case.unavailable} & set(DETERMINISTIC)
    assert tiny == {(name, False) for name in PLAIN}


def test_lengths(tiny: set[tuple[str, bool]], tmp_path: Path) -> None:
    cases = written("lengths", tmp_path)
    assert list(cases)[:4] == [*(f"forward 16x128 {length} causal" for length in (8, 16, 32)), "forward 16x128 8 full"]
    panels = [f"{passes}, {mask}" for passes in ("forward", "backward") for mask in ("causal", "full")]
    assert [(case.panel, case.length) for case in cases.values()] == [(x, n) for x in panels for n in (8, 16, 32)]
    for case in cases.values():
        backward = case.panel.startswith("backward")
        assert set(PLAIN + DETERMINISTIC) & case.times.keys() == set(PLAIN + DETERMINISTIC if backward else PLAIN)
        factor = 2.5 if backward else 1.0
        assert case.length is not None
        pairs = (case.length + 1) / 2 if "causal" in case.panel else case.length
        assert case.work.flop == factor * 4 * 32 * pairs * 16 * 128
    assert tiny == {(name, deterministic) for name in PLAIN for deterministic in (False, True)}


def compiles_for_long(case: Any) -> Any:
    """Stands in for FlexAttention on a CPU."""
    raise Unavailable("on a CPU it compiles for long")


def triangle_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The layout that cuEquivariance documents: heads before tokens, and a batch around the rows."""
    assert (q.ndim, bias.shape[:2], mask.shape[2:4]) == (5, (1, 1), (1, 1))
    scores = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ v


TINY_ROWS = (
    bias.Row("plain", 2, 16, 2, 8),
    bias.Row("mask", 2, 16, 2, 8, mask="random", bars={bias.CUDNN: (1e-9, 1e-9)}),
    bias.Row("bias", 2, 16, 2, 8, bias=(0, 1, 1, 1), bars={bias.EFFICIENT: (None, 1e9)}),
    bias.Row("each", 2, 16, 2, 8, bias=(1, 1, 1, 1)),
    bias.Row("odd", 2, 15, 2, 8, bias=(0, 1, 1, 1), bars={bias.EVEN: (0.5, 0.5)}),
    bias.Row("keys", 2, 16, 2, 8, mask="keys", bars={bias.WITHOUT: (0.5, 0.5)}),
    bias.Row("ALiBi", 2, 16, 2, 8, bias=(1, 0, 1), alibi=True),
    bias.Row("ALiBi causal", 2, 16, 2, 8, bias=(1, 0, 1), alibi=True, causal=True),
    bias.Row("tiles", 2, 16, 2, 8, mask="tiles", bars={bias.ALL_TRUE: (0.5, 0.5)}),
    bias.Row("triangle", 6, 6, 2, 8, mask="keys", bias=(0, 1, 1, 1), triangle=True),
    bias.Row("documents", 1, 0, 2, 8, bias=(1, 1, 1), documents=(3, 9, 12), bars={bias.SAME_AREA: (0.5, 0.5)}),
)


def test_bias_suite_on_tiny_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everyone computes the same, but for what is there for comparison, and cuDNN no gradient of a bias."""
    stand_in(monkeypatch, cuequivariance_torch={"triangle_attention": triangle_attention})
    monkeypatch.setattr(harness, "peak_extra_bytes", lambda run, device: len(run()))  # looking takes long
    kernels = dict.fromkeys(bias.KERNELS, SDPBackend.MATH)
    set_all(monkeypatch, bias, BACKEND="portable", ROWS=TINY_ROWS, TILE=4, KERNELS=kernels, _flex=compiles_for_long)
    shorten(monkeypatch, "bias", bias.suite, seconds=0.1)
    cases = written("bias", tmp_path)
    comparisons = {"odd": bias.EVEN, "tiles": bias.ALL_TRUE, "documents": bias.SAME_AREA}
    pairs = {"tiles": 2 * 64, "ALiBi causal": 2 * 136, "triangle": 6**3, "odd": 2 * 225, "documents": 9 + 81 + 144}
    for row, case in of_rows(cases, TINY_ROWS, {row.name: pairs.get(row.name, 2 * 256) for row in TINY_ROWS}, 2 * 8):
        passes = case.panel
        expected = {bias.PACKAGE} | ({bias.PACKAGE_DETERMINISTIC} if passes == "backward" else set())
        expected |= {comparisons[row.name]} if row.name in comparisons else set()
        expected |= {bias.WITHOUT} if row.mask or row.bias else set()
        expected |= {bias.CUEQUIVARIANCE} if row.triangle else set()
        expected |= {bias.CUDNN, bias.EFFICIENT} if not (row.causal or row.documents) else set()
        assert case.times.keys() == expected, case.unavailable
    bars = verdicts(capsys.readouterr().out)
    assert ("forward bias", bias.PACKAGE, bias.EFFICIENT) not in bars
    assert not bars["backward bias", bias.PACKAGE, bias.EFFICIENT]
    assert bars["forward mask", bias.PACKAGE, bias.CUDNN]
    assert len(bars) == 2 + 1 + 4 * 2


def test_rows_of_the_bias_suite() -> None:
    names = [row.name for row in bias.ROWS]
    assert len(set(names)) == len(names) == 16
    for row in bias.ROWS:
        assert bias._area(row) > 0
        if row.mask == "tiles":
            visible = bias._visible_tiles(row.seqlen)
            assert visible.any(0).all()
            assert visible.any(1).all()
            assert visible.float().mean() == 0.25
    suite = bias.suite(CPU, torch.bfloat16)
    assert {bar.case.split(" ", 1)[1] for bar in suite.bars} == set(names) - {"16x128 4096 plain"}
    assert {bar.against for bar in suite.bars} <= {contender.name for contender in suite.contenders}


def test_lengths_of_the_bias_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, bias, LENGTHS=(7, 8), TOKENS=16)
    cases = list(bias.lengths(CPU, torch.float32).cases())
    panels = [f"{passes}, {kind}" for passes in ("forward", "backward") for kind in ("bias", "mask")]
    assert [(case.panel, case.length) for case in cases] == [(panel, n) for panel in panels for n in (7, 8)]
    assert all(case.q.shape[:2] == (2, case.length) for case in cases)


TINY_SPARSE_ROWS = (
    sparse.Row("window", "window", 512, bars={sparse.FA4: (1e-9, 1e-9), sparse.WITHOUT: (1e9, 1e9)}),
    sparse.Row("documents", "documents", 512, deterministic=1e-9),
    sparse.Row("prefix-LM", "prefix-LM", 512),
    sparse.Row("dilated", "dilated", 512),
    sparse.Row("random 50 %", "random", 512, share=0.5, bars={sparse.FA4: (1e-9, 1e-9)}),
    sparse.Row("random 100 %", "random", 512),
    sparse.Row("selected", "top-k", 512, top=2),
    sparse.Row("selected of 64", "top-k", 512, top=3, block=64),
)


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask_mod: Any,
    aux_tensors: list[torch.Tensor] | None,
    block_sparse_tensors: Any,
    block_sparse_tensors_bwd: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of flash-attn-4: lists of blocks, and a function of vectors of one element for those in part."""
    (batch, n, heads, _), blocks = q.shape, q.shape[1] // 128
    seen = []
    for cnt, idx, full_cnt, full_idx, size in (block_sparse_tensors, block_sparse_tensors_bwd):
        assert size == (128, 128)
        for counts, indices in ((cnt, idx), (full_cnt, full_idx)):
            assert counts.dtype == indices.dtype == torch.int32
            kept = torch.arange(blocks) < counts[..., None]
            map_ = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool)
            seen.append(map_.scatter_(-1, torch.where(kept, indices.long(), blocks), True)[..., :-1])
    assert torch.equal(seen[0], seen[2].mT)
    assert torch.equal(seen[1], seen[3].mT)
    in_part, full = (x.repeat_interleave(128, -1).repeat_interleave(128, -2) for x in seen[:2])
    shown = full.expand(batch, heads, n, n)
    if mask_mod is not None:
        places = torch.cartesian_prod(*map(torch.arange, (batch, heads, n, n))).T[:, None]
        shown = shown | (in_part & mask_mod(*places, None, aux_tensors).view(batch, heads, n, n))
    else:
        assert not in_part.any()
    return flash_attn_func(q, k, v, mask=shown, backend="portable"), None


@pytest.fixture
def tiny_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows by the portable backend, and a stand-in for flash-attn-4 that sees that one's arguments."""
    tensors = {"BlockSparseTensorsTorch": lambda *lists, block_size: (*lists, block_size)}
    stand_in(
        monkeypatch,
        flash_attn={},
        flash_attn__cute={"flash_attn_func": block_sparse_attention},
        flash_attn__cute__utils={"scalar_to_ssa": lambda x, dtype: x[None]},
        flash_attn__cute__block_sparsity=tensors,
        cutlass={"Int32": int},
    )
    set_all(monkeypatch, sparse, BACKEND="portable", HEADS=2, D=8, TOKENS=1024, WINDOW=200, DOCUMENTS=48)
    monkeypatch.setattr(sparse, "ROWS", TINY_SPARSE_ROWS)
    monkeypatch.setattr(harness, "peak_extra_bytes", lambda run, device: len(run()))


@pytest.mark.usefixtures("tiny_sparse")
def test_sparse_suite_on_tiny_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everyone computes the same, but for a pass over all blocks; FLOP are those of elements, or of blocks."""
    monkeypatch.setattr(sparse, "_flex", compiles_for_long)
    shorten(monkeypatch, "sparse", sparse.suite, seconds=0.1)
    cases = written("sparse", tmp_path)
    i, j = torch.arange(512)[:, None], torch.arange(512)
    ids = sparse.document_ids(2, 512)
    assert [len(entry.unique()) for entry in ids] == [3, 3]
    pairs = {
        "window": 4 * int(((j <= i) & (i - j < 200)).sum()),
        "documents": 2 * int(((ids[:, :, None] == ids[:, None]) & (j <= i)).sum()),
        "prefix-LM": 4 * int(((j <= i) | (j < 128)).sum()),
        "dilated": 4 * 9 * 128**2,
        "random 50 %": 4 * 8 * 128**2,
        "random 100 %": 4 * 512**2,
        "selected": 4 * 4 * 2 * 128**2,
        "selected of 64": 4 * 8 * 3 * 64**2,
    }
    for row, case in of_rows(cases, TINY_SPARSE_ROWS, pairs, 8):
        passes = case.panel
        assert ("on the model" in case.detail) is (passes == "backward" and row.block == 128)
        expected = {sparse.PACKAGE} | ({sparse.DETERMINISTIC} if passes == "backward" else set())
        expected |= {sparse.WITHOUT} if row.name in ("window", "documents", "random 100 %") else set()
        expected |= {sparse.ALL_BLOCKS} if row.name == "random 50 %" else set()
        expected |= {sparse.FA4} if row.block == 128 else set()
        assert case.times.keys() == expected, case.unavailable
    printed = capsys.readouterr().out
    bars = verdicts(printed)
    assert bars["backward window", sparse.PACKAGE, sparse.FA4]
    assert not bars["forward window", sparse.PACKAGE, sparse.WITHOUT]
    assert bars["backward documents", sparse.DETERMINISTIC, sparse.PACKAGE]
    assert ("forward random 50 %", sparse.PACKAGE, sparse.ALL_BLOCKS) in bars
    assert f"{sparse.ALL_BLOCKS} (at most 0.55)" in printed
    assert len(bars) == 4 + 1 + 2 + 2


@pytest.mark.usefixtures("tiny_sparse")
@pytest.mark.parametrize("row", TINY_ROWS + TINY_SPARSE_ROWS, ids=lambda row: row.name)
def test_flex_attention_computes_the_same(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, which on a CPU takes long; gradients come with compiling only."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    set_all(monkeypatch, bias, BACKEND="portable", TILE=4)
    suite: Any = bias if isinstance(row, bias.Row) else sparse
    case = suite._case(row, "forward", CPU, torch.float32)
    if row.documents if suite is bias else row.block != 128:
        with pytest.raises(Unavailable):
            suite._flex(case)
    else:
        torch.testing.assert_close(suite._flex(case)(), suite._package(case)())


def test_rows_of_the_sparse_suite() -> None:
    """Bars are of cases and contenders that there are, and random masks have exactly their share."""
    suite = sparse.suite(CPU, torch.bfloat16)
    names = {f"{passes} {row.name}" for row in sparse.ROWS for passes in ("forward", "backward")}
    assert len(names) == 2 * len(sparse.ROWS)
    assert {bar.case for bar in suite.bars} <= names
    contenders = {contender.name for contender in suite.contenders}
    assert {name for bar in suite.bars for name in (bar.contender, bar.against)} <= contenders
    for row in sparse.ROWS:
        if row.kind == "random":
            visible = sparse._random_blocks(row)
            blocks = row.seqlen // 128
            assert visible.shape == (16, blocks, blocks)
            assert (visible.sum((1, 2)) == round(row.share * blocks**2)).all()
            assert visible.diagonal(dim1=1, dim2=2).all()


@pytest.mark.usefixtures("tiny_sparse")
def test_lengths_of_the_sparse_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "LENGTHS", (2048, 4096))
    suite = sparse.lengths(CPU, torch.float32)
    shown = {contender.name for contender in suite.contenders}
    assert shown == {sparse.PACKAGE, sparse.DETERMINISTIC, sparse.FA4, sparse.FLEX}
    cases = list(suite.cases())
    panels = [f"{passes}, {kind}" for passes in ("forward", "backward") for kind in ("window", "documents", "top-k")]
    assert [(case.panel, case.length) for case in cases] == [(panel, n) for panel in panels for n in (2048, 4096)]


@pytest.mark.usefixtures("tiny_sparse")
def test_suite_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables are made anew in every round."""
    monkeypatch.setattr(sparse, "TABLES_LENGTH", 1024)
    made: list[int] = []
    build = BlockMask.build

    def count(mask: BlockMask, *device: torch.device) -> BlockMask:
        made.append(len(mask._tables) + len(mask._offsets))
        return build(mask, *device)

    monkeypatch.setattr(BlockMask, "build", count)
    monkeypatch.setattr(sparse, "create_block_mask", lambda mod, *sizes, _compile, **options: made.append(0))
    shorten(monkeypatch, "sparse-tables", sparse.tables)
    cases = written("sparse-tables", tmp_path)
    names = list(sparse.TABLES)
    assert list(cases) == names
    for case in cases.values():
        peers = [sparse.FLEX] if case.name in ("window", "causal", "documents", "prefix-LM") else []
        assert list(case.times) == [sparse.PACKAGE, *peers]
    assert not any(made)
    assert len(made) > 3 * (6 + 4)
    ruled = re.findall(r"^limit: \w+: ([^:]+):", capsys.readouterr().out, re.MULTILINE)
    assert ruled == [name for name in names if sparse.TABLES[name]]


def parallel_nsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_indices: torch.Tensor,
    block_counts: int,
    block_size: int,
) -> torch.Tensor:
    """The selected branch of flash-linear-attention's NSA: causal, and blocks behind the last key are none."""
    n, group = q.shape[1], q.shape[2] // k.shape[2]
    assert group >= 16
    assert block_indices.shape == (*k.shape[:3], block_counts)
    blocks = torch.arange(n) // block_size
    shown = (block_indices.transpose(1, 2)[..., None] == blocks).any(-2) & torch.ones(n, n, dtype=torch.bool).tril()
    out: torch.Tensor = flash_attn_func(q, k, v, mask=shown.repeat_interleave(group, 1), backend="portable")
    return out


TINY_SELECTED_ROWS = (selected.Row(16, 16, 300), selected.Row(4, 16, 300), selected.Row(16, 2, 300))


@pytest.fixture
def tiny_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows by the portable backend, a stand-in for flash-linear-attention, and FlexAttention as it is."""
    stand_in(monkeypatch, fla={}, fla__ops={}, fla__ops__nsa={"parallel_nsa": parallel_nsa})
    set_all(monkeypatch, selected, BACKEND="portable", GROUPS=2, D=16, BLOCK=32, _ROWS_AT_ONCE=100)
    monkeypatch.setattr(selected, "ROWS", TINY_SELECTED_ROWS)
    monkeypatch.setattr(harness, "peak_extra_bytes", lambda run, device: len(run()))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # which takes long on a CPU


@pytest.mark.usefixtures("tiny_selected")
def test_selected_suite_on_tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone computes the same, but for a pass over 16 blocks; FLOP are those of visible pairs."""
    flex = selected._flex

    def forward_alone(case: selected.SelectedCase) -> Any:
        if case.passes == "backward":
            raise Unavailable("gradients come with compiling only")
        return flex(case)

    monkeypatch.setattr(selected, "_flex", forward_alone)
    suite = replace(selected.suite(CPU, torch.float32), rounds=3, seconds=0.1)
    reports = {case.name: (case, harness.measure(suite, case)) for case in suite.cases()}
    for row in TINY_SELECTED_ROWS:
        for passes, factor in (("forward", 1), ("backward", 2.5)):
            case, result = reports.pop(f"{passes} {row.name}")
            i, j = torch.arange(300)[:, None], torch.arange(300)
            shown = (case.indices[..., None] == j // 32).any(-2) & (j <= i)
            assert result.work.flop == factor * 4 * row.group * int(shown.sum()) * 16
            everyone = [selected.PACKAGE, selected.FLA, selected.FLEX][: 3 if passes == "forward" else 2]
            everyone[1:1] = [selected.SIXTEEN] if row.top == 2 else []
            assert list(result.times) == everyone, result
    assert not reports
    assert [bar.most for bar in suite.bars] == [pytest.approx(1.15 * 2 / 16)] * 2


def test_rows_of_the_selected_suite() -> None:
    """Queries select their own block, and the first, each once."""
    assert len({row.name for row in selected.ROWS}) == len(selected.ROWS)
    indices = selected.selected_blocks(1000, 4, CPU)
    own = torch.arange(1000)[:, None] // selected.BLOCK
    assert ((indices == own).sum(-1) == 1).all()
    assert ((indices == 0).sum(-1) == 1).all()
    assert (indices <= own).all()
    assert ((indices >= 0).sum(-1) == (own[:, 0] + 1).clamp(max=4)).all()
