"""Block masks on a Hopper GPU: attention that costs what its visible blocks cost, either pass, and making the tables.

Most rows are 4 batch entries of 8192 tokens in 16 heads of 128: a window, documents, a prefix LM, a dilated window,
random blocks a head, and blocks as a model selects them a head and batch entry. Against flash-attn-4's block sparsity
and compiled FlexAttention, where they are there. The package also takes part deterministically, and with arguments of
its own that ask for the same without a block mask. It also takes part with all blocks visible, to whose time that of
random masks is to be proportional.

Windows, documents and prefix LMs count the pairs that are visible, others all pairs of visible blocks. A backward row
of blocks of 128 says of itself what it takes on the model in ``flash_attn_cute.sparsity.dq_order.contention_model``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness import Bar, Case, Contender, Limit, NoPart, Results, Run, Suite, Unavailable
from benchmarks.suites.passes import EACH, Forward, PassCase, deterministic, run_passes
from benchmarks.work import Passes, Work, attention_flop, causal_area, gpu_backend
from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.sparsity import column_tables
from flash_attn_cute.sparsity.dq_order.contention_model import Pass, machine_of

PACKAGE, FA4, FLEX = "flash_attn_cute", "flash-attn-4", "FlexAttention"
DETERMINISTIC = f"{PACKAGE} deterministic"
# The same by other arguments of the package, and what is not what a row asks for.
WITHOUT, ALL_BLOCKS = f"{PACKAGE} without a block mask", f"{PACKAGE} all blocks"
BACKEND = gpu_backend()
HEADS, D = 16, 128
TOKENS = 32_768
BLOCK = 128
WINDOW = 2048
DOCUMENTS = 8  # in 8192 tokens
LENGTHS = (8192, 16384, 32768, 65536, 131072)

Kind = Literal["window", "documents", "prefix-LM", "dilated", "random", "top-k"]
# FlexAttention's mask_mod.
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """A mask over sequences of ``seqlen`` tokens.

    Of random masks a ``share`` of all blocks is visible; ``top`` blocks of ``block`` tokens are selected. The bars are
    the least speed over others, (forward, backward), and that of the deterministic backward pass over the other one.
    """

    name: str
    kind: Kind
    seqlen: int = 8192
    share: float = 1.0
    top: int = 16
    block: int = BLOCK
    bars: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    deterministic: float | None = None


_REGULAR = {FA4: (1.12, 1.06), FLEX: (1.5, 1.4), WITHOUT: (0.96, 0.96)}


def _random(percent: float, seqlen: int = 8192, bars: Mapping[str, tuple[float, float]] | None = None) -> Row:
    name = f"random {percent} %" + ("" if seqlen == 8192 else f" {seqlen // 1024}k")
    return Row(name, "random", seqlen, share=percent / 100, bars=bars or {}, deterministic=0.95)


ROWS = (
    Row("window", "window", bars=_REGULAR, deterministic=0.97),
    Row("documents", "documents", bars=_REGULAR, deterministic=0.97),
    Row("prefix-LM", "prefix-LM"),
    Row("dilated", "dilated"),
    _random(5),
    _random(10),
    _random(25, bars={FA4: (1.10, 1.05)}),
    _random(50),
    _random(100),
    _random(12.5, 16384),
    Row("top 16 of 64", "top-k", deterministic=0.95),
    Row("top 32 of 128 of 64 tokens", "top-k", top=32, block=64),
)
PROPORTIONAL = 1.1  # the most time over a row's share of that of all blocks


class Shown(NamedTuple):
    """A mask for everyone: ours, its visible pairs over all batch entries and heads, and its elements' rule.

    ``cute`` makes flash-attn-4's function, and the tensors that it reads; None where blocks alone say it all.
    """

    mask: BlockMask
    pairs: int
    mod: Mod
    cute: Callable[[], tuple[Any, list[Tensor]]] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseCase(PassCase):
    """Passes, inputs (batch, seqlen, heads, d) and the mask; ``ids`` (batch, seqlen) are those of its documents."""

    row: Row
    shown: Shown
    ids: Tensor | None


def suite(device: torch.device, dtype: torch.dtype) -> Suite[SparseCase]:
    """The suite of all rows. Its bars are the least that the package has to reach."""

    def cases() -> Iterator[SparseCase]:
        for row in ROWS:
            for passes in EACH:
                yield _case(row, passes, device, dtype)

    return Suite("sparse", cases, _contenders(), PACKAGE, list(_bars()), rounds=20, seconds=2.0)


def lengths(device: torch.device, dtype: torch.dtype) -> Suite[SparseCase]:
    """The suite of a window, documents and selected blocks over the lengths. It has no bars."""

    def cases() -> Iterator[SparseCase]:
        kinds: tuple[Kind, ...] = ("window", "documents", "top-k")
        for passes in EACH:
            for kind in kinds:
                for length in LENGTHS:
                    case = _case(Row(f"{kind} {length}", kind, length), passes, device, dtype)
                    yield replace(case, panel=f"{passes}, {kind}", length=length)

    contenders = [x for x in _contenders() if x.name in (PACKAGE, DETERMINISTIC, FA4, FLEX)]
    return Suite("sparse-lengths", cases, contenders, PACKAGE, bars=(), rounds=10, seconds=1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class TablesCase(Case):
    """Functions that make all that calls read of a mask, or its launch order; and the peer's mask, if it has one."""

    ours: Callable[[], list[Tensor]]
    peers: Callable[[], object] | None


TABLES_LENGTH = 32_768
# Seconds, and bytes beyond what was there, that the package may take.
TABLES = {
    "window": (1e-3, 1e6),
    "causal": (1e-3, 1e6),
    "documents": (1e-3, 1e6),
    "prefix-LM": None,
    "from_flex": (50e-3, 100e6),
    "permutation": (50e-3, None),
    "from_indices": None,
}


def tables(device: torch.device, dtype: torch.dtype) -> Suite[TablesCase]:
    """The suite of what masks cost before the first call, at 32k tokens in 16 heads; host and waits included."""
    limits = [Limit(name, PACKAGE, *least) for name, least in TABLES.items() if least is not None]
    contenders = [Contender(PACKAGE, _tables), Contender(FLEX, _peers_tables)]
    cases = partial(_tables_cases, device, dtype)
    return Suite("sparse-tables", cases, contenders, PACKAGE, (), rounds=20, seconds=2.0, limits=limits)


def _bars() -> Iterator[Bar]:
    for row in ROWS:
        for against, both in row.bars.items():
            for passes, least in zip(EACH, both, strict=True):
                yield Bar(f"{passes} {row.name}", PACKAGE, against, 1 / least)
        if row.kind == "random" and row.share < 1:
            for passes in EACH:
                yield Bar(f"{passes} {row.name}", PACKAGE, ALL_BLOCKS, PROPORTIONAL * row.share)
        if row.deterministic is not None:
            yield Bar(f"backward {row.name}", DETERMINISTIC, PACKAGE, 1 / row.deterministic)


def _contenders() -> list[Contender[SparseCase]]:
    return [
        Contender(PACKAGE, run_passes(_package)),
        Contender(DETERMINISTIC, run_passes(deterministic(_package))),
        Contender(WITHOUT, run_passes(_without)),
        Contender(ALL_BLOCKS, run_passes(_all_blocks), compared=False),
        Contender(FA4, run_passes(_flash_attn_4)),
        Contender(FLEX, run_passes(_flex)),
    ]


def _case(row: Row, passes: Passes, device: torch.device, dtype: torch.dtype) -> SparseCase:
    draw = torch.Generator(device).manual_seed(0)
    batch = max(1, TOKENS // row.seqlen)
    shape = (batch, row.seqlen, HEADS, D)
    q, k, v, dout = (torch.randn(shape, generator=draw, device=device, dtype=dtype) for _ in range(4))
    ids = document_ids(batch, row.seqlen).to(device) if row.kind == "documents" else None
    shown = shown_by(row, batch, ids, device)
    for x in (q, k, v):
        x.requires_grad_(passes != "forward")
    detail = f"q, k and v {shape}, {shown.mask.build(device, tables=True)}"
    is_modelled = passes == "backward" and row.block == BLOCK  # the kernel of smaller blocks has no model
    return SparseCase(
        name=f"{passes} {row.name}",
        detail=f"{detail}; {_modelled(shown.mask, batch, device)}" if is_modelled else detail,
        panel=passes,
        device=device,
        dtype=dtype,
        work=Work(attention_flop(shown.pairs, 1, D, D, passes), (4 if passes == "forward" else 7) * q.nbytes),
        row=row,
        passes=passes,
        q=q,
        k=k,
        v=v,
        dout=dout,
        shown=shown,
        ids=ids,
    )


def _modelled(mask: BlockMask, batch: int, device: torch.device) -> str:
    """Time of the backward pass on the model, in words."""
    return f"on the model {modelled(mask, batch, device):.0f} us"


def modelled(mask: BlockMask, batch: int, device: torch.device) -> float:
    """Microseconds of the backward pass on the model: in order under low contention, else without an order."""
    tables = mask.tables(device, backward=True)
    steps = column_tables.steps(tables.rows, mask.sizes).cpu().expand(batch, HEADS, -1, -1)
    work = Pass(steps, machine=machine_of(mask.seqlen_q))
    assert tables.columns is not None
    launch = tables.columns.order.cpu().expand(work.order_shape)
    ordered = mask.low_contention
    return work.overhead(ordered=ordered) + work.play(launch, ordered=ordered).makespan


def document_ids(batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen), int64: as many documents in each batch entry, of uneven lengths, none of them empty."""
    count = max(1, seqlen * DOCUMENTS // 8192)
    draw = torch.Generator().manual_seed(0)
    starts = torch.zeros(batch, seqlen, dtype=torch.int64)
    cuts = torch.rand(batch, seqlen - 1, generator=draw).argsort(1)[:, : count - 1] + 1
    return starts.scatter_(1, cuts, 1).cumsum(1)


def shown_by(row: Row, batch: int, ids: Tensor | None, device: torch.device) -> Shown:
    """The mask of a row; ``ids`` (batch, seqlen) are those of its documents."""
    n, every = row.seqlen, batch * HEADS
    if row.kind == "window":
        mask = BlockMask.window(n, n, left=WINDOW - 1, right=0)
        pairs = every * (causal_area([n]) - causal_area([max(n - WINDOW, 0)]))
        return Shown(mask, pairs, lambda b, h, i, j: (i >= j) & (i - j < WINDOW), _cute_window)
    if row.kind == "documents":
        assert ids is not None
        mask = BlockMask.documents(ids) & BlockMask.causal(n, n)
        lengths = [len(of) for entry in ids.cpu() for of in entry.split(entry.bincount().tolist())]
        return Shown(
            mask,
            HEADS * causal_area(lengths),
            lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]),
            partial(_cute_documents, ids),
        )
    if row.kind == "prefix-LM":
        prefix = n // 4
        pairs = every * (causal_area([n]) + prefix * (prefix - 1) // 2)
        mask = BlockMask.prefix_lm(n, n, prefix)
        return Shown(mask, pairs, lambda b, h, i, j: (i >= j) | (j < prefix), partial(_cute_prefix, prefix))
    if row.kind == "dilated":
        mask = BlockMask.dilated(n, n, 2, left=WINDOW - 1, right=0)
        return Shown(
            mask,
            every * _pairs_of_blocks(mask, device),
            lambda b, h, i, j: (i >= j) & (i - j < WINDOW) & ((i - j) % 2 == 0),
            _cute_dilated,
        )
    if row.kind == "random":
        visible = _random_blocks(row).to(device)
        mask = BlockMask.from_blocks(visible)
        pairs = batch * _pairs_of_blocks(mask, device)
        return Shown(mask, pairs, lambda b, h, i, j: visible[h, i // BLOCK, j // BLOCK])
    draw = torch.Generator().manual_seed(0)
    blocks = n // row.block
    indices = torch.rand(batch, HEADS, blocks, blocks, generator=draw).topk(row.top, -1).indices.to(device)
    mask = BlockMask.from_indices(indices, block=row.block, seqlen_k=n)
    chosen = torch.zeros(batch, HEADS, blocks, blocks, dtype=torch.bool, device=device).scatter_(-1, indices, True)
    pairs = every * blocks * row.top * row.block**2
    return Shown(mask, pairs, lambda b, h, i, j: chosen[b, h, i // row.block, j // row.block])


def _random_blocks(row: Row) -> Tensor:
    """(heads, blocks, blocks), bool: the share of all, those on the diagonal among them, so that no row is empty."""
    blocks = row.seqlen // BLOCK
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand(HEADS, blocks, blocks, generator=draw)
    scores.diagonal(dim1=1, dim2=2).zero_()
    kept = scores.flatten(1).argsort(1)[:, : max(blocks, round(row.share * blocks**2))]
    return torch.zeros(HEADS, blocks**2, dtype=torch.bool).scatter_(1, kept, True).view(HEADS, blocks, blocks)


def _pairs_of_blocks(mask: BlockMask, device: torch.device) -> int:
    """Pairs of queries and keys of visible blocks, over the batch entries and heads of the mask."""
    statistics = mask.build(device).statistics
    return (statistics.full + statistics.partial) * BLOCK**2


def _package(case: SparseCase, mask: BlockMask | None = None, *, deterministic: bool = False) -> Forward:
    mask = case.shown.mask if mask is None else mask
    mask.build(case.device)
    options: dict[str, Any] = {"block_mask": mask, "deterministic": deterministic, "backend": BACKEND}

    def run() -> Tensor:
        out: Tensor = flash_attn_func(case.q, case.k, case.v, **options)
        return out

    return run


def _without(case: SparseCase) -> Forward:
    """The case without a block mask: by a window, packed sequences, or all keys for all queries."""
    q, k, v = case.q, case.k, case.v
    options: dict[str, Any] = {"backend": BACKEND}
    if case.ids is not None:
        every = torch.cat([entry.bincount() for entry in case.ids])
        cu = torch.nn.functional.pad(every.cumsum(0), (1, 0)).int()
        longest = int(every.max())

        def packed() -> Tensor:
            q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
            out: Tensor = flash_attn_varlen_func(
                q_rows, k_rows, v_rows, cu, cu, longest, longest, causal=True, **options
            )
            return out.view_as(q)

        return packed
    if case.row.kind == "window":
        options["window_size"] = (WINDOW - 1, 0)
    elif not (case.row.kind == "random" and case.row.share == 1):
        raise NoPart  # no other argument asks for this mask

    def run() -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, **options)
        return out

    return run


def _all_blocks(case: SparseCase) -> Forward:
    if case.row.kind != "random" or case.row.share == 1:
        raise NoPart
    return _package(case, BlockMask.from_blocks(torch.ones_like(_random_blocks(case.row)).to(case.device)))


def _lists(case: SparseCase) -> FlexBlockMask:
    """The mask's lists of blocks of 128, in both directions and as wide as there are blocks, and its own function."""
    lists = case.shown.mask.to_flex()
    lists.mask_mod = case.shown.mod
    return lists


def _flex(case: SparseCase) -> Forward:
    """Compiled FlexAttention, its mask made once."""
    if case.row.block != BLOCK:
        raise Unavailable("blocks of 64 are not passed to it here")
    shown = _lists(case)
    torch.compiler.reset()  # or after eight rows it would be compiled no more
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))

    def run() -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=shown)
        return out.transpose(1, 2)

    return run


def _flash_attn_4(case: SparseCase) -> Forward:
    """flash-attn-4's block sparsity: lists for the forward pass, and transposed ones for the backward pass."""
    try:
        from flash_attn.cute import flash_attn_func as attention
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError as reason:
        raise Unavailable(str(reason)) from reason
    if case.row.block != BLOCK:
        raise Unavailable("it takes blocks of 128 and more")
    lists = _lists(case)
    by_row, by_column = (
        BlockSparseTensorsTorch(*(getattr(lists, name) for name in names), block_size=(BLOCK, BLOCK))
        for names in (
            ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
            ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
        )
    )
    mod, tensors = (None, []) if case.shown.cute is None else case.shown.cute()

    def run() -> Tensor:
        result = attention(
            case.q,
            case.k,
            case.v,
            mask_mod=mod,
            aux_tensors=tensors or None,
            block_sparse_tensors=by_row,
            block_sparse_tensors_bwd=by_column,
        )
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return run


# flash-attn-4's functions: of batch entry, head, query and key as vectors of one element, in its kernels' language.


def _cute_window() -> tuple[Any, list[Tensor]]:
    def mod(b: Any, h: Any, i: Any, j: Any, seqlen: Any, tensors: Any) -> Any:
        return (j <= i) & (j > i - WINDOW)

    return mod, []


def _cute_documents(ids: Tensor) -> tuple[Any, list[Tensor]]:
    from cutlass import Int32
    from flash_attn.cute.utils import scalar_to_ssa

    def mod(b: Any, h: Any, i: Any, j: Any, seqlen: Any, tensors: Any) -> Any:
        of_i, of_j = (scalar_to_ssa(tensors[0][b[0], x[0]], Int32) for x in (i, j))
        return (j <= i) & (of_i == of_j)

    return mod, [ids.int()]


def _cute_prefix(prefix: int) -> tuple[Any, list[Tensor]]:
    def mod(b: Any, h: Any, i: Any, j: Any, seqlen: Any, tensors: Any) -> Any:
        return (j <= i) | (j < prefix)

    return mod, []


def _cute_dilated() -> tuple[Any, list[Tensor]]:
    def mod(b: Any, h: Any, i: Any, j: Any, seqlen: Any, tensors: Any) -> Any:
        return (j <= i) & (j > i - WINDOW) & ((i - j) % 2 == 0)

    return mod, []


def _tables_cases(device: torch.device, dtype: torch.dtype) -> Iterator[TablesCase]:
    n = TABLES_LENGTH
    ids = document_ids(1, n).to(device)
    draw = torch.Generator().manual_seed(0)
    blocks = n // BLOCK
    indices = torch.rand(1, HEADS, blocks, blocks, generator=draw).topk(min(32, blocks), -1).indices.to(device)
    documents = shown_by(Row("documents", "documents", n), 1, ids, device)
    flex = documents.mask.to_flex()
    flex.mask_mod = documents.mod
    scattered = BlockMask.from_blocks(_random_blocks(Row("random", "random", n, share=0.125)).to(device)).build()

    def built(make: Callable[[], BlockMask]) -> Callable[[], list[Tensor]]:
        return lambda: _read_of(make().build(device), device)

    def peers(mod: Mod) -> Callable[[], object]:
        return lambda: create_block_mask(mod, None, None, n, n, device=device, _compile=True)

    window = shown_by(Row("window", "window", n), 1, None, device)
    prefix = shown_by(Row("prefix-LM", "prefix-LM", n), 1, None, device)
    making: dict[str, tuple[Callable[[], list[Tensor]], Callable[[], object] | None]] = {
        "window": (built(lambda: BlockMask.window(n, n, left=WINDOW - 1, right=0)), peers(window.mod)),
        "causal": (built(lambda: BlockMask.causal(n, n)), peers(lambda b, h, i, j: i >= j)),
        "documents": (
            built(lambda: BlockMask.documents(ids) & BlockMask.causal(n, n)),
            peers(lambda b, h, i, j: (i >= j) & (ids[0, i] == ids[0, j])),
        ),
        "prefix-LM": (built(lambda: BlockMask.prefix_lm(n, n, n // 4)), peers(prefix.mod)),
        "from_flex": (built(lambda: BlockMask.from_flex(flex)), None),
        "permutation": (lambda: _read_of(scattered.with_order("permutation"), device), None),
        "from_indices": (built(lambda: BlockMask.from_indices(indices, seqlen_k=n)), None),
    }
    for name, (ours, others) in making.items():
        yield TablesCase(
            name=name,
            detail=f"{n} tokens, {HEADS} heads where they differ",
            panel=name,
            length=n,
            device=device,
            dtype=dtype,
            work=Work(0.0, max(1, sum(x.nbytes for x in ours()))),  # of nothing, a byte: bounds are times
            ours=ours,
            peers=others,
        )


def _read_of(mask: BlockMask, device: torch.device) -> list[Tensor]:
    """Tables that dense calls read of a mask that has been built; none where they do without."""
    if mask.plain is not None and mask.plain.documents is None:
        return []
    read = mask.tables(device, backward=True).flat() if mask.offsets is None else mask.offsets[:2]
    return [x for x in read if x is not None]


def _tables(case: TablesCase) -> Run:
    return _without_results(case.ours)


def _peers_tables(case: TablesCase) -> Run:
    if case.peers is None:
        raise NoPart  # it has nothing of the kind
    return _without_results(case.peers)


def _without_results(make: Callable[[], object]) -> Run:
    """Runs something whose results are ours alone to read."""

    def run() -> Results:
        make()
        return {}

    return run
