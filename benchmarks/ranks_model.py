"""Balance, traffic and waiting of many ranks, as the cost model has them; nothing is run.

``python -m benchmarks context-parallel --model FOLDER`` writes ``context_parallel-model.json`` and ``.png``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import long_documents, plot, report
from benchmarks.suites.context_parallel import METHODS, Row
from flash_attn_cute.distributed import cost_model
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.cost_model import HOST
from flash_attn_cute.distributed.rank_layout import Layout

MIX = f"all_to_all in hosts of {HOST}, all_gather"
RANKS = (8, 64, 512)
SHAPE = Shape(nheads=64, nheads_k=8, d=128, d_v=128, itemsize=2)
CORPORA = (
    Row("causal", "one sequence", (131_072,)),
    Row("documents", "documents", long_documents.pack(524_288, 0)),
)


def write(folder: Path) -> None:
    """Writes the model's rows as JSON, and a picture of them."""
    rows = modelled(CORPORA)
    (folder / "context_parallel-model.json").write_text(report.text(rows))
    draw(folder / "context_parallel-model.png", rows)


def modelled(corpora: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each corpus, number of ranks and method that can serve it."""
    rows = []
    for corpus, ranks in ((corpus, ranks) for corpus in corpora for ranks in RANKS):
        layout = corpus.layout(ranks)
        areas = [layout.queries.area(rank, window_size=corpus.window) for rank in range(ranks)]
        found = cost_model.estimates(layout, SHAPE)
        if ranks > HOST:
            found[MIX] = _mixed(layout)
        for method, estimate in found.items():
            rows.append(
                {
                    "corpus": corpus.name,
                    "tokens": sum(corpus.lengths),
                    "documents": len(corpus.lengths),
                    "ranks": ranks,
                    "method": method,
                    "imbalance": ranks * max(areas) / sum(areas) - 1,
                    "segments of a rank, at most": max(map(len, layout.queries.segments)),
                    "computing, seconds": sum(cost_model.computing(layout, SHAPE)),
                    "waiting, seconds": estimate.waiting,
                    "received, bytes": estimate.received,
                    "buffers, bytes": estimate.buffers,
                }
            )
    return rows


def _mixed(layout: Layout) -> cost_model.Estimate:
    """Rows for heads within a host, then keys from other hosts."""
    hosts = layout.queries.merged(HOST)
    beyond = Layout(hosts, hosts, layout.lengths_q, layout.lengths_k, layout.bands)
    part = SHAPE._replace(nheads=SHAPE.nheads // HOST, nheads_k=max(1, SHAPE.nheads_k // HOST))
    within, between = cost_model.trading(layout, SHAPE, HOST), cost_model.estimates(beyond, part, host=1)["all_gather"]
    return cost_model.Estimate(*map(sum, zip(within, between, strict=True)))


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Traffic and efficiency over ranks, a column a corpus."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["corpus"] for row in rows))
    figure = Figure(figsize=(5 * len(names), 7), layout="constrained")
    above, below = figure.subplots(2, len(names), sharex=True, sharey="row", squeeze=False)
    for traffic, efficiency, name in zip(above, below, names, strict=True):
        for method in (*METHODS[1:], MIX):
            those = [row for row in rows if (row["corpus"], row["method"]) == (name, method)]
            ranks = [row["ranks"] for row in those]
            traffic.plot(ranks, [row["received, bytes"] / 1e6 for row in those], marker="o", label=method)
            share = [row["computing, seconds"] / (row["computing, seconds"] + row["waiting, seconds"]) for row in those]
            efficiency.plot(ranks, share, marker="o", label=method)
        tokens = next(row["tokens"] for row in rows if row["corpus"] == name)
        worst = max(row["imbalance"] for row in rows if row["corpus"] == name)
        traffic.set_title(f"{name}, {tokens // 1024}k tokens, imbalance up to {worst:.1%}")
        efficiency.set_xscale("log", base=2)
        efficiency.set_xticks(RANKS, RANKS)
        efficiency.set_xlabel("ranks")
    above[0].set_ylabel("MB received by a rank, both passes")
    above[0].set_yscale("log")
    below[0].set_ylabel("part of the time in which a rank computes")
    below[0].set_ylim(0, 1)
    below[0].legend()
    links = f"{cost_model.LINK / 1e9:.0f} GB/s a rank within hosts of {HOST}, {cost_model.NETWORK / 1e9:.0f} beyond"
    figure.suptitle(f"a model, not measured: {SHAPE.nheads}/{SHAPE.nheads_k} heads of {SHAPE.d}, {links}")
    plot.save(path, figure)
