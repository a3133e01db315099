"""Figures in docs/performance.md and the README are those of benchmarks/results, ratios taken round by round."""

import json
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import over_ranks, ranks_model, report
from benchmarks.harness import CaseReport
from benchmarks.suites import context_parallel, sparse
from benchmarks.suites.context_parallel import Sizes
from flash_attn_cute.distributed.checked_call import METHODS, Shape

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
OURS, FA4, CUDNN, FLEX = "flash_attn_cute", "flash-attn-4", "cuDNN", "FlexAttention"
FLA = "flash-linear-attention"


def record(name: str) -> dict[str, CaseReport]:
    return {case.name: case for case in report.read_json(ROOT / "benchmarks" / "results" / f"{name}.json")}


def rate(case: CaseReport, contender: str = OURS) -> str:
    """TFLOP/s at the median time."""
    return f"{case.work.flop / case.times[contender].median / 1e12:.0f}"


def prose(page: str) -> str:
    """All that it says, in one line."""
    return " ".join((ROOT / page).read_text().split())


def ratio(case: CaseReport, contender: str, against: str = OURS) -> float:
    """Median of a contender's time over another's, round by round."""
    return case.ratios[contender, against].median


def speed(case: CaseReport, contender: str) -> str:
    """Our speed as a multiple of another's."""
    return f"{ratio(case, contender):.2f}"


def rows(title: str) -> dict[str, list[str]]:
    """The rows of the table below a title, by their first cell."""
    section = PAGE.partition(f"{title}\n")[2].partition("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {first: cells for first, *cells in lines[1:]}


def together(each: Iterable[str]) -> str:
    return " / ".join(each)


def names_of(row: str) -> list[str]:
    """The cases of a row of dense calls, such as "64/8x128, 2 x 4k causal / full"."""
    heads, calls = row.rsplit(", ", 1)
    if "documents" in row:
        return [f"documents {heads} causal" for heads in calls.split(" / ")]
    length, kinds = calls.removeprefix("2 x ").split(" ", 1)
    return [f"{heads} {length} {kind}" for kind in kinds.split(" / ")]


def dense_row(names: list[str]) -> list[str]:
    cells = []
    for suite in ("forward", "backward"):
        recorded = record(f"{suite}-cuda-bfloat16")
        cases = [recorded[name] for name in names if name in recorded]
        cells.append(together(rate(case) for case in cases) or "-")
        for peer in (FA4, CUDNN):
            cells.append(together(speed(case, peer) for case in cases if peer in case.times) or "-")
    return cells


def test_dense_calls() -> None:
    shown = rows("## Hopper kernels")
    assert shown == {row: dense_row(names_of(row)) for row in shown}
    recorded = {name for suite in ("forward", "backward") for name in record(f"{suite}-cuda-bfloat16")}
    assert recorded == {name for row in shown for name in names_of(row)}


SCORES = {
    "none": "plain",
    "mask of all scores, 90 % visible": "mask",
    "mask of tiles of 128 x 128, a quarter visible": "tiles",
    "key padding": "key padding",
    "bias a head, with its gradient": "bias",
    "bias a head and batch entry, with its gradient": "bias each",
}


def test_masks_and_biases() -> None:
    cases = record("bias-cuda-bfloat16")
    shown = rows("### Masks and biases")
    assert shown.keys() == SCORES.keys()
    for row, name in SCORES.items():
        for cell, panel in zip(shown[row], ("forward", "backward"), strict=True):
            case = cases[f"{panel} 16x128 4096 {name}"]
            expected = [rate(case, who) for who in (OURS, "cuDNN (no dBias)", "memory-efficient", FLEX)]
            assert cell.replace(" (without)", "") == together(expected), row


BLOCKS = {
    "window of 2048": "window",
    "8 uneven documents, causal": "documents",
    "prefix LM, a quarter": "prefix-LM",
    "every second key of a window of 2048": "dilated",
    "blocks at random a head, 10 %": "random 10 %",
    "25 %": "random 25 %",
    "50 %": "random 50 %",
    "16 of 64 blocks, chosen a head and entry": "top 16 of 64",
    "all": "random 100 %",
}


def test_block_masks() -> None:
    cases = record("sparse-cuda-bfloat16")
    shown = rows("### Block masks")
    assert shown.keys() == BLOCKS.keys()
    for row, name in BLOCKS.items():
        forward, backward, deterministic = shown[row]
        for cell, panel in ((forward, "forward"), (backward, "backward")):
            case = cases[f"{panel} {name}"]
            assert cell == together(rate(case, who) for who in (OURS, FA4, FLEX) if who in case.times), row
        assert deterministic == rate(cases[f"backward {name}"], f"{OURS} deterministic"), row
    selected = rate(cases["forward top 32 of 128 of 64 tokens"])
    without = together(
        rate(cases[f"{panel} random 100 %"], f"{OURS} without a block mask") for panel in ("forward", "backward")
    )
    page = prose("docs/performance.md")
    assert f"Of blocks of 64 a quarter selected a head and entry runs at {selected} forward." in page
    assert f"Without a mask the last row runs at {without.replace(' / ', ' and ')}." in page


def test_block_masks_of_all_lengths() -> None:
    cases = record("sparse-lengths-cuda-bfloat16").items()
    found = {
        panel: sorted(float(speed(case, FA4)) for name, case in cases if name.startswith(panel))
        for panel in ("forward window", "backward window", "forward documents", "forward top-k")
    }
    assert sum(map(len, found.values())) == len(cases)
    least, most = ([f"{x[at]:.2f}" for x in found.values()] for at in (0, -1))
    assert least[0] == most[0]
    said = f"a window is {least[0]} times as fast as under flash-attn-4's block sparsity forward and {least[1]} to "
    said += f"{most[1]} times backward, documents {least[2]} to {most[2]} times and 16 selected blocks of 128 for each "
    assert f"{said}{least[3]} to {most[3]} times forward" in prose("docs/performance.md")


@pytest.mark.parametrize("row", [row for row in sparse.ROWS if row.block == sparse.BLOCK], ids=lambda row: row.name)
def test_the_model_of_the_backward_pass(row: sparse.Row) -> None:
    batch, cpu = max(1, sparse.TOKENS // row.seqlen), torch.device("cpu")
    ids = sparse.document_ids(batch, row.seqlen) if row.kind == "documents" else None
    took = record("sparse-cuda-bfloat16")[f"backward {row.name}"].times[OURS].median
    time = sparse.modelled(sparse.shown_by(row, batch, ids, cpu).mask, batch, cpu)
    assert took == pytest.approx(time * 1e-6, rel=0.15)


def test_two_ranks() -> None:
    """The table of context parallelism is the record's: times, and the speed over one GPU."""
    cases = record("context_parallel-cuda-bfloat16")
    page = (ROOT / "docs" / "context-parallelism.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.partition("| | one GPU |")[2].splitlines()[2:6]]
    methods = ["all_gather", "ring", "all_to_all", "PyTorch, cuDNN"]
    for (_, one, *others), (name, case) in zip(lines[:2], cases.items(), strict=True):
        assert one == f"{case.times['one GPU'].median * 1e3:.0f}"
        for method, cell in zip(methods, others, strict=True):
            if method in case.times:
                speed = 1 / ratio(case, method, "one GPU")
                assert cell == f"{case.times[method].median * 1e3:.0f} ({speed:.2f})", name
            else:
                assert cell == "not served"
    for (_, *cells), case in zip(lines[2:], cases.values(), strict=True):
        shown = [float(cell.split()[0]) for cell in cells if cell.strip("| ")]
        taken = [case.peak_bytes[who] for who in ["one GPU", *methods] if who in case.times]
        assert shown == [round(size / 1e9, 1) for size in taken if size is not None]
    slower = [
        ratio(case, f"{method}, deterministic", method) for case in cases.values() for method in ("all_gather", "ring")
    ]
    said = f"`deterministic=True` takes {min(slower):.2f} to {max(slower):.2f} times as long"
    assert said in prose("docs/context-parallelism.md")


def test_four_ranks() -> None:
    """The table of four GPUs: mean rates of a GPU, and speeds of both passes together."""
    means = dict(line.strip().rpartition(": ")[::2] for line in over_ranks.mean_lines(list(FOUR.values()), 4))
    page = prose("docs/context-parallelism.md")
    for row, kind in FOUR_ROWS.items():
        cells = [row]
        for who in (context_parallel.ONE, *METHODS, context_parallel.PYTORCH):
            rates = re.findall(r"(?:forward|backward) (\d+)", means.get(f"{kind}: {who}", ""))
            cells.append(together(rates) or ("not run" if kind.startswith("full") else "not served"))
        assert f"| {' | '.join(cells)} |" in page
    (long, short), of = ("causal, 128k", "causal, 8k a rank"), _both_passes
    ours, peer = of(long, "auto"), of(long, context_parallel.PYTORCH)
    scaling, over = of(long, context_parallel.ONE) / ours, of(short, context_parallel.PYTORCH) / of(short, "auto")
    said = f"are {scaling:.2f} times as fast as on one GPU and {peer / ours:.2f} times as fast as PyTorch's; "
    assert f"{said}at 8k a rank they are {over:.2f} times" in page
    assert f"times as fast on two, {scaling:.2f} on four |" in prose("docs/index.md")


FOUR = record("context_parallel-4-cuda-bfloat16")
FOUR_ROWS = {
    "causal documents, 8k tokens a rank": "documents, 8k a rank",
    "causal documents, 16k a rank": "documents, 16k a rank",
    "one causal sequence, 128k": "causal",
    "one causal sequence, 8k a rank": "causal, 8k a rank",
    "one sequence without a mask, 8k a rank": "full, 8k a rank",
    "128k, a window of 1024 keys": "window",
}


def _both_passes(row: str, who: str) -> float:
    return sum(FOUR[f"{row}, {passes}"].times[who].median for passes in context_parallel.PASSES)


def test_the_model_of_ranks() -> None:
    """It is within 15 % of what each method took on four GPUs, and "auto" picks the fastest of both passes."""
    content = json.loads((ROOT / "benchmarks" / "results" / "context_parallel-4-cuda-bfloat16.json").read_text())
    given, ranks = content["environment"]["sizes"], content["environment"]["ranks"]
    shape = Shape(**given.pop("shape"))
    sizes = Sizes(tuple(given.pop("tokens_per_rank")), **given, shape=shape)
    methods = [method for method in METHODS if method != "auto"]
    measured = {name.rpartition(", ")[0] for name in FOUR}
    for row in sizes.rows(ranks):
        if row.name not in measured:  # the run ended before
            continue
        model = over_ranks.predicted(row, ranks, shape)
        for method, (which, passes) in product(methods, enumerate(context_parallel.PASSES)):
            measured_time = FOUR[f"{row.name}, {passes}"].times[method].median
            assert model[method][which] == pytest.approx(measured_time, rel=0.15), (row.name, passes, method)
        chosen = next(method for method in methods if model[method] == model["auto"])
        took = {method: _both_passes(row.name, method) for method in methods}
        assert took[chosen] == min(took.values()), row.name


@pytest.mark.slow
def test_the_model_of_many_ranks() -> None:
    page = (ROOT / "docs" / "context-parallelism.md").read_text()
    assert "\n".join(ranks_model.table()) in page


def _row(text: str, name: str) -> list[str]:
    """Cells of the last row of a page's tables that has this name."""
    *_, line = (x for x in text.splitlines() if x.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_cost_of_determinism() -> None:
    """Deterministic backward passes in multiples of the others, under irregular masks and for wide heads."""
    notes = (ROOT / "benchmarks/notes/determinism.md").read_text()
    cases = record("sparse-cuda-bfloat16")
    five, ten, quarter, half = (
        f"{ratio(cases[f'backward random {share} %'], f'{OURS} deterministic'):.2f}" for share in (5, 10, 25, 50)
    )
    said = (
        f"it takes {five} times as long for 5 % of the blocks at random, {ten} for 10 % and {quarter} for 25 %; "
        f"in fixed point {half} times for 50 %. "
    )
    five, ten, quarter = (f"{1 / float(_row(notes, f'random {n} %, 4 x 8k')[-1]):.2f}" for n in (5, 10, 25))
    said += f"In calls back to back, at the power limit, it takes {five}, {ten} and {quarter} times as long"
    page = prose("docs/determinism.md")
    assert said in page
    dense = record("backward-cuda-bfloat16").items()
    wide, narrow = (
        sorted(f"{ratio(case, f'{OURS} deterministic'):.2f}" for name, case in dense if ("x256" in name) == is_wide)
        for is_wide in (True, False)
    )
    said = f"{narrow[0]} to {narrow[-1]} times as long up to d = 128 and {wide[0]} to {wide[-1]} times above"
    assert f"Without a mask a deterministic pass takes {said}" in page
    assert f"There `deterministic=True` takes {said}" in prose("docs/performance.md")


PORTABLE = {
    "16 documents of 128..794 tokens, 8 heads of 64": "even",
    "the same, 8 query heads on 2 key heads": "gqa",
    "one sequence of 4096, 8 heads": "long",
    "one of 4096 and 31 of 64, 2 heads": "skewed",
}


def test_the_portable_backend() -> None:
    cases = record("packed-cpu-float32")
    loop, padded = "sdpa loop", "sdpa padded"
    expected = {}
    for row, name in PORTABLE.items():
        case = cases[name]
        taken = [case.peak_bytes[who] for who in (loop, OURS, padded)]
        memory = together(f"{size / 1e6:.0f}" for size in taken if size is not None)
        expected[row] = [f"{ratio(case, OURS, loop):.2f}", f"{ratio(case, padded, loop):.2g}", f"{memory} MB"]
    assert rows("## The portable backend") == expected


def span(suite: str, panel: str = "") -> str:
    """The least and the largest ratio to flash-attn-4."""
    cases = record(f"{suite}-cuda-bfloat16").items()
    found = sorted(float(speed(case, FA4)) for name, case in cases if name.startswith(panel) and FA4 in case.times)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def test_the_readme() -> None:
    text = prose("README.md")
    bias = record("bias-cuda-bfloat16")
    mask, mask_backward, added = (
        speed(bias[f"{name} 16x128 4096 {tensor}"], "cuDNN (no dBias)")
        for name, tensor in (("forward", "mask"), ("backward", "mask"), ("forward", "bias"))
    )
    for said in (
        f"the forward pass has {span('forward')} times the speed of flash-attn-4 in the same run, ",
        f"the backward pass {span('backward')} times; ",
        f"under block masks {span('sparse', 'forward')} and {span('sparse', 'backward')} times. ",
        f"With a mask tensor they have {mask} and {mask_backward} times the speed of cuDNN; ",
        f"with a bias, the forward pass has {added} times: ",
    ):
        assert said in text


def test_selected_blocks() -> None:
    """Milliseconds of a call, "-" where a contender does not run."""
    recorded, shown = record("selected-cuda-bfloat16"), rows("### Selected blocks")
    assert len(shown) == 4
    for first, cells in shown.items():
        row = first.replace("groups", "group") + ("" if "128k" in first else ", 32k")
        for passes, cell in zip(("forward", "backward"), cells, strict=True):
            times = recorded[f"{passes} {row}"].times
            milliseconds = [times[who].median * 1e3 if who in times else None for who in (OURS, FLA, FLEX)]
            assert cell == together("-" if x is None else f"{x:.{x < 100:d}f}" for x in milliseconds)
