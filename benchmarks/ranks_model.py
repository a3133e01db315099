"""Traffic and waiting of many ranks, as the cost model has them; nothing is run.

``python -m benchmarks context-parallel --model`` prints the table of ``docs/context-parallelism.md``.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks import long_documents
from benchmarks.suites.context_parallel import METHODS, Row
from flash_attn_cute.distributed import cost_model
from flash_attn_cute.distributed.checked_call import Shape
from flash_attn_cute.distributed.cost_model import HOST, Estimate
from flash_attn_cute.distributed.rank_layout import Layout

MIX = f"all_to_all in hosts of {HOST}, all_gather"
RANKS = (8, 64, 512)
SHAPE = Shape(nheads=64, nheads_k=8, d=128, d_v=128, itemsize=2)
CORPORA = (
    Row("causal", "one sequence", (131_072,)),
    Row("documents", "documents", long_documents.pack(524_288, 0)),
)


class Modelled(NamedTuple):
    """A corpus on so many ranks by one method, both passes."""

    corpus: str
    ranks: int
    method: str
    imbalance: float  # the largest area of a rank over the mean, less 1
    computing: float  # seconds
    estimate: Estimate


def modelled(corpora: Sequence[Row]) -> Iterator[Modelled]:
    """Each corpus on each number of ranks by each method that can serve it."""
    for corpus, ranks in ((corpus, ranks) for corpus in corpora for ranks in RANKS):
        layout = corpus.layout(ranks)
        areas = [layout.queries.area(rank, window_size=corpus.window) for rank in range(ranks)]
        imbalance, computing = ranks * max(areas) / sum(areas) - 1, sum(cost_model.computing(layout, SHAPE))
        found = cost_model.estimates(layout, SHAPE)
        if ranks > HOST:
            found[MIX] = _mixed(layout)
        for method, estimate in found.items():
            yield Modelled(corpus.name, ranks, method, imbalance, computing, estimate)


def _mixed(layout: Layout) -> Estimate:
    """Rows for heads within a host, then keys from other hosts."""
    hosts = layout.queries.merged(HOST)
    beyond = Layout(hosts, hosts, layout.lengths_q, layout.lengths_k, layout.bands)
    part = SHAPE._replace(nheads=SHAPE.nheads // HOST, nheads_k=max(1, SHAPE.nheads_k // HOST))
    within, between = cost_model.trading(layout, SHAPE, HOST), cost_model.estimates(beyond, part, host=1)["all_gather"]
    return Estimate(*map(sum, zip(within, between, strict=True)))


def table() -> Iterator[str]:
    """MB that a rank receives, and the part of the time in which it computes; a column a corpus and number of ranks."""
    found = {(x.method, x.corpus, x.ranks): x for x in modelled(CORPORA)}
    columns = [(corpus.name, ranks) for corpus in CORPORA for ranks in RANKS]
    yield f"| | {' | '.join(f'{corpus}, {ranks}' for corpus, ranks in columns)} |"
    yield f"|---{'|---' * len(columns)}|"
    for method in (*METHODS[1:], MIX):
        cells = (found.get((method, *column)) for column in columns)
        yield f"| {method} | {' | '.join(_cell(x) if x else '' for x in cells)} |"


def _cell(x: Modelled) -> str:
    return f"{x.estimate.received / 1e6:.0f} MB, {x.computing / (x.computing + x.estimate.waiting):.2f}"
