"""The Blackwell forward kernel, executed on the CPU from its PTX (``tests.lib.ptx``), against the oracle."""

import dataclasses
import functools
import itertools
import math
import random
import struct
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn_cute.backends.cute import backend as cute_backend
from flash_attn_cute.backends.cute.backend import CuteBackend
from flash_attn_cute.backends.cute.plan import FEW_QUERIES, ForwardPlan, Shapes, plan_forward
from flash_attn_cute.kernels.arguments import BLOCK, ForwardArguments, ForwardNumbers
from flash_attn_cute.kernels.registry import ARCHITECTURES, Architecture
from flash_attn_cute.kernels.sm100.config import PART_ROWS, SHARED_MEMORY, TARGETS
from flash_attn_cute.sparsity.bits import pack
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Options
from tests.compile.test_sm100_code import forward_paired
from tests.lib import oracle, ptx
from tests.lib.checks import assert_close, bitwise_equal, draws, random_call
from tests.lib.oracle import Call

NUM_SMS = 2
B200, B300 = TARGETS  # their compute capabilities
FULL, EMPTY = -1, -2  # as in ``common.block_lists``


def sequences_of(a: Any) -> list[tuple[int, int, int, int]]:
    """Of a pass: the first rows of sequences, of q and of k, counted over the batch, and how many each has."""
    if a.mCuSeqlensQ is None:
        num_q, num_k = a.mQ.shape[1], a.mK.shape[1]
        return [(b * num_q, b * num_k, num_q, num_k) for b in range(a.mQ.shape[0])]
    used_q = a.mCuSeqlensQ.diff() if a.mSeqUsedQ is None else a.mSeqUsedQ
    used_k = a.mCuSeqlensK.diff() if a.mSeqUsedK is None else a.mSeqUsedK
    places = a.mCuSeqlensQ[:-1], a.mCuSeqlensK[:-1], used_q, used_k
    return list(zip(*(x.tolist() for x in places), strict=True))


def cut_mask(a: Any, n: Any, queries: int, keys: int, *, rows_are_keys: bool = False) -> tuple[Tensor, Tensor]:
    """Codes of a mask's tiles of so many queries and keys, and their elements: see ``common.mask_tiles``.

    (row of tiles, block of keys), and (row, block, queries, keys). A query that there is not hides nothing of a tile
    whose rows are queries.
    """
    blocks, packed = max(1, -(-a.mMask.shape[3] // keys)), a.mCuSeqlensQ is not None
    codes = torch.full((n.lists_batch * n.lists_heads * n.lists_tiles, blocks), EMPTY, dtype=torch.int32)
    tiles = torch.zeros(*codes.shape, queries, keys, dtype=torch.bool)
    for s, (start, _, num_q, num_k) in enumerate(sequences_of(a) if packed else sequences_of(a)[: n.lists_batch]):
        entry, first_row = divmod(start, n.rows_a_slot) if packed else (s, 0)
        num_k = min(num_k, a.mMask.shape[3])
        first = start // queries + s if packed else 0
        i, j = torch.arange(num_q)[:, None] + num_k - num_q, torch.arange(num_k)
        window = (j >= i - n.window_left) & (j <= i + n.window_right)
        for head, row in itertools.product(range(n.lists_heads), range(min(-(-num_q // queries), n.lists_tiles))):
            number = ((entry if n.lists_batch > 1 else 0) * n.lists_heads + head) * n.lists_tiles + first + row
            shown = window & (a.mMask[entry, head, first_row : first_row + num_q, :num_k] != 0)
            for block, part in enumerate(shown[row * queries :][:queries].split(keys, 1)):
                tiles[number, block, : part.shape[0], : part.shape[1]] = part
                is_whole = part.all() and part.shape[1] == keys and (part.shape[0] == queries or not rows_are_keys)
                codes[number, block] = EMPTY if not part.any() else FULL if is_whole else number * blocks + block
    return codes, tiles


def tables_of_mask(a: ForwardArguments, n: ForwardNumbers, keys: int) -> dict[str, Tensor]:
    """What the kernels ahead of the main one make of a mask (``common.mask_tiles``), in their order.

    ``keys`` are those of a block.
    """
    codes, tiles = cut_mask(a, n, BLOCK, keys)
    blocks = codes.shape[1]
    entries, lists = torch.full((*codes.shape, 2), 2**30, dtype=torch.int32), []
    for number, row_of_codes in enumerate(codes):
        seen = (row_of_codes != EMPTY).nonzero().flatten()
        entries[number, : len(seen)] = torch.stack((seen, row_of_codes[seen]), 1)
        lists.append([number * blocks, len(seen)])
    return {
        "lists": torch.tensor(lists, dtype=torch.int32),
        "entries": entries.view(-1, 2),
        "codes": codes,
        "bits": pack(pad(tiles, (0, BLOCK - keys)))[..., : keys // 32].reshape(-1, 1, BLOCK, keys // 32).contiguous(),
    }


class Memory:
    """Global memory, filled with NaN, and tensors in it."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []
        self.size = 0

    def put(self, x: Tensor) -> int:
        """Where its bytes are from now on."""
        place, self.size = self.size, (self.size + x.numel() * x.element_size()) // 256 * 256 + 512
        self.parts.append((place, x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()))
        return place

    def put_last(self, x: Tensor) -> int:
        """The same; memory ends with the 16 bytes that hold its last element, so that nothing is read behind them."""
        place = self.put(x)
        self.size = place + -(-x.numel() * x.element_size() // 16) * 16
        return place

    def bytes(self) -> Any:
        """All of it."""
        memory = np.full(self.size, 0xFF, np.uint8)
        for place, content in self.parts:
            memory[place : place + len(content)] = np.frombuffer(content, np.uint8)
        return memory


def tensor_argument(place: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A tensor as kernels get it: its address, sizes and strides, but for one that is known to be 1."""
    sizes = struct.pack(f"<{len(shape)}i", *shape)
    sizes += bytes(-len(sizes) % 8 if strides else 0)
    return struct.pack("<Q", ptx.address_of(place)) + sizes + struct.pack(f"<{len(strides)}q", *strides)


@functools.cache
def text_of(config: Any) -> str:
    """The PTX of a configuration's kernels."""
    cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    compiler = pytest.importorskip("cutlass.base_dsl.compiler")
    compile_module = pytest.importorskip("flash_attn_cute.jit.compile")
    with tempfile.TemporaryDirectory() as folder:
        text: str = compile_module.compile_kernel(config, cute.KeepPTX, compiler.DumpDir(folder)).artifacts.PTX
    return text


@functools.cache
def program(config: Any, kernel: str = "") -> ptx.Program:
    """A kernel's, by default that of the pass."""
    return ptx.Program(text_of(config), kernel or ("ForwardPair" if config.ctas_a_tile == 2 else "ForwardSm100"))


def spread(x: Tensor) -> Tensor:
    """The memory behind a tensor, as far as its strides reach."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((reach if x.numel() else 0,), (1,))


def as_given(call: Call, *, backward: bool = False) -> tuple[AttentionInputs, AttentionSpec]:
    """A call as backends are given it, with what a backward pass takes; autograd knows nothing of its q, k and v."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "learnable_sink", "mask", "bias")
    fields: dict[str, Any] = {name: getattr(call, name) for name in names}
    fields |= {name: getattr(call, name).detach() for name in ("q", "k", "v")}
    if call.block_mask is not None:
        fields["block_mask"] = call.block_mask.tables(torch.device("cpu"), backward=backward)
    inputs = AttentionInputs(**fields, max_seqlen_q=call.q.shape[-3], max_seqlen_k=call.k.shape[-3])
    left, right = call.window_size
    options = Options(
        softmax_scale=call.softmax_scale,
        window_left=left,
        window_right=0 if call.causal else right,
        softcap=call.softcap,
        deterministic=False,
        zero_padding=True,
    )
    return inputs, AttentionSpec.of(inputs, options)


def planned(call: Call) -> tuple[Any, Any]:
    """The configuration of a call that kernels take as it is, dense or packed, and the numbers that they are given."""
    _, spec = as_given(call)
    num_sequences = 0 if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    shapes = Shapes(call.q.shape, call.k.shape, num_sequences, FEW_QUERIES + 1)
    config, numbers, _ = plan_forward(ARCHITECTURES["sm100"], spec, shapes, NUM_SMS)
    return config, numbers


@dataclasses.dataclass(frozen=True)
class Executed:
    """What the backend launches in the place of a compiled pass: kernels, executed by the interpreter."""

    plan: Any
    draw: random.Random
    changed: ptx.Program | None  # instead of the configuration's main kernel
    lagging: ptx.Lagging | None

    def arguments(self, given: dict[str, Tensor], places: dict[str, int]) -> list[bytes]:
        """Those of the pass as each of its kernels gets them."""
        config, params = self.plan.config, []
        strided = {"mMask", "mContributors"}  # the last stride of others is known to be 1
        if config.pass_name == "backward" or config.features.strided_bias:
            strided.add("mBias")
        for name, x in given.items():
            if name in ("mWorkspace", "mSums", "mTables", "mBits"):
                params.append(struct.pack("<Qq", ptx.address_of(places[name]), len(x)))
            else:
                strides = x.stride() if name in strided else x.stride()[:-1]
                params.append(tensor_argument(places[name], x.shape, strides))
        return params + [
            struct.pack("<f" if isinstance(x, float) else "<i", x) for x in self.plan.numbers if x is not None
        ]

    def run(
        self,
        code: ptx.Program,
        params: list[bytes],
        memory: Any,
        tensors: dict[int, ptx.Rows],
        ctas: int,
        ctas_a_cluster: int = 1,
    ) -> None:
        """Executes a kernel, which changes memory."""
        params = [param + bytes(size - len(param)) for param, size in zip(params, code.param_sizes, strict=True)]
        ptx.run(code, params, memory, tensors, ctas, self.draw, SHARED_MEMORY, self.lagging, ctas_a_cluster)


@dataclasses.dataclass(frozen=True)
class Pass(Executed):
    """A forward pass, but for kernels ahead of the main one."""

    plan: ForwardPlan

    def __call__(self, a: ForwardArguments) -> None:
        """Runs the main kernel on the arguments."""
        config, numbers = self.plan.config, self.plan.numbers
        code = program(config) if self.changed is None else self.changed
        packed, memory, given = config.features.packed, Memory(), tensors_of(a)
        tables = self.tables_of(a)
        places = {name: memory.put(spread(x)) for name, x in (given | tables).items() if name != "mBias"}
        if a.mBias is not None:
            places["mBias"] = memory.put_last(spread(a.mBias))
        params, tensors = [bytes(32)] * 2, {}
        boxes = {"mQ": PART_ROWS, "mK": config.keys_shared, "mV": config.tile_n, "mO": PART_ROWS}
        if config.features.wide:  # it does not leave by TMA
            del boxes["mO"]
        for name, box in boxes.items():
            x = given[name]
            batch, strides = (0, x.stride()) if packed else (x.stride(0), x.stride()[1:])
            tensors[len(params)] = ptx.Rows(
                places[name] // 2, x.shape[-3], x.shape[-1], x.shape[-2], strides[0], strides[1], batch, box
            )
            params += [bytes(128), bytes(code.param_sizes[len(params) + 1])]
        order = [0, 2, 1] if packed else [1, 3, 2, 0]  # rows, columns, heads, batch
        by_rows, numbers_by_rows = given["mO"].permute(order), given["mLSE"].permute([1, 0] if packed else [2, 1, 0])
        params.append(tensor_argument(places["mO"], by_rows.shape, (by_rows.stride(0), *by_rows.stride()[2:])))
        params.append(tensor_argument(places["mLSE"], numbers_by_rows.shape, numbers_by_rows.stride()[1:]))
        params += self.arguments(given, places)
        params += [table_argument(name, places[name], x) for name, x in tables.items()]
        rest = numbers.softcap or numbers.softmax_scale
        tanh = numbers.softmax_scale / numbers.softcap if numbers.softcap else 1.0
        before_bias, behind = (rest, 1.0) if config.features.bias else (1.0, rest)
        params += [struct.pack("<f", x) for x in (tanh, before_bias, behind * math.log2(math.e))]
        heads, rows = a.mQ.shape[-2], a.mQ.shape[-3]
        tiles = -(-rows // config.tile_m) * heads * (1 if packed else a.mQ.shape[0])
        if a.mCuSeqlensQ is not None:
            tiles = (rows // config.tile_m + len(a.mCuSeqlensQ) + 1) * heads
        everything = memory.bytes()
        ctas = config.ctas_a_tile * min(tiles, NUM_SMS // config.ctas_a_tile)
        self.run(code, params, everything, tensors, ctas, config.ctas_a_tile)
        for name in ("mO", "mLSE", "mNextTile"):
            assert given[name].is_contiguous()
            given[name].copy_(at(everything, places[name], given[name]))
        assert not a.mNextTile[:1].any(), "the counter of tiles is not left as it was"

    def tables_of(self, a: ForwardArguments) -> dict[str, Tensor]:
        """Lists, entries and bits: of a block mask as they are, or made of a mask, with its codes."""
        if a.blocks.mTiles is not None:
            lists, entries, tiles = a.blocks.mSpans, a.blocks.mEntries, a.blocks.mTiles
            return {"lists": lists.view(-1, 2), "entries": entries.view(-1, 2), "bits": tiles.view(-1, 1, BLOCK, 4)}
        return {} if a.mMask is None else tables_of_mask(a, self.plan.numbers, self.plan.config.tile_n)


def tensors_of(a: Any) -> dict[str, Tensor]:
    """Those among the arguments, in their order."""
    found: dict[str, Tensor] = {}
    for name, x in a._asdict().items():
        some = x._asdict() if name == "blocks" else {name: x}
        found |= {key: each for key, each in some.items() if isinstance(each, Tensor)}
    return found


def table_argument(name: str, place: int, x: Tensor) -> bytes:
    """A table of a mask: all but how many rows there are is known to who compiles, unless that is any number."""
    return tensor_argument(place, *((x.shape, x.shape[1:]) if name in ("codes", "order") else (x.shape[:1], ())))


def at(memory: Any, place: int, x: Tensor) -> Tensor:
    """What stands in the place of a tensor."""
    found = torch.from_numpy(memory[place : place + x.numel() * x.element_size()].copy())
    return found.view(x.dtype).view(x.shape)


def by_pairs_of_ctas(architecture: Architecture) -> Architecture:
    """The same, whose forward pass has the kernels of long sequences for all."""
    forward = architecture.passes["forward"]
    long = forward._replace(configure=lambda *given, **more: forward_paired(forward.configure(*given, **more)))
    return architecture._replace(passes=architecture.passes | {"forward": long})


class Interpreted(CuteBackend):
    """The backend, whose forward pass is executed by the interpreter."""

    def __init__(self, *, by_pairs: bool = False, capability: tuple[int, int] = B200, **options: Any):
        """``by_pairs``: with the kernel of long sequences, of any length."""
        architecture = ARCHITECTURES["sm100"].on(capability)
        super().__init__(by_pairs_of_ctas(architecture) if by_pairs else architecture)
        self.options = options
        self._prepare_forward = self.prepare  # type: ignore[assignment]

    def prepare(self, spec: AttentionSpec, q: Any, k: Any, num: int, few: bool, layout: Any, _: Any) -> Any:
        """What ``_plan_forward`` does, without a GPU."""
        shapes = cute_backend._forward_shapes(q, k, num, few, layout)
        plan = plan_forward(self.architecture, spec, shapes, NUM_SMS)
        return cute_backend._Launch(Pass(plan, **self.options), plan, takes_tiles=True)


def execute(
    call: Call,
    draw: random.Random,
    changed: ptx.Program | None = None,
    lagging: ptx.Lagging | None = None,
    *,
    by_pairs: bool = False,
    wide: bool = False,
    capability: tuple[int, int] = B200,
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call; of a changed program instead of its configuration's, if there is one."""
    inputs, spec = as_given(call)
    spec = spec._replace(wide=wide)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(cute_backend, "next_tile", lambda: torch.zeros(4, dtype=torch.int32))
        backend = Interpreted(by_pairs=by_pairs, capability=capability, draw=draw, changed=changed, lagging=lagging)
        return backend._forward(spec, inputs)


def check(
    call: Call,
    draw: random.Random,
    changed: ptx.Program | None = None,
    lagging: ptx.Lagging | None = None,
    *,
    by_pairs: bool = False,
    capability: tuple[int, int] = B200,
) -> None:
    """A call's results against the oracle's, and what stands in the padding."""
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in ("q", "k", "v")})
    out, lse = execute(call, draw, changed, lagging, by_pairs=by_pairs, capability=capability)
    with torch.no_grad():
        expected, low = oracle.attention(call.to(torch.float64)), oracle.attention(call.to(call.q.dtype))
    for name, got, true, yardstick in zip(("out", "lse"), (out, lse), expected, low, strict=True):
        size = max(1.0, true[true.isfinite()].abs().max().item() if true.isfinite().any() else 0.0)
        assert_close(name, got, true, yardstick, 3.0 if call.softcap else 2.0, size)
    real = call.real_rows()[0]
    assert (out[~real] == 0).all(), "padding rows are not zero"
    assert lse.transpose(-1, -2)[~real].isneginf().all(), "lse: padding rows are not -inf"


EVERYTHING: dict[str, Any] = {"softcap": 5.0, "sink": True, "window_size": (100, 3), "seqused": True}
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "d128": ([300], [400], {"packed": False, "head_dim": 128, "nheads": 1}),
    "d128-causal": ([257, 257], [384, 384], {"packed": False, "head_dim": 128, "causal": True, "nheads_k": 1}),
    "d128-short-tiles": ([300], [128], {"packed": False, "head_dim": 128, "nheads": 3}),
    "d128-packed": ([129, 0, 300], [128, 17, 257], {"head_dim": 128, "causal": True}),
    "d128-no-keys": ([257, 256, 257], [128, 0, 0], {"head_dim": 128}),
    "d64-everything": ([200, 1, 30], [300, 129, 0], {"head_dim": 64, **EVERYTHING}),
    "d8": ([140], [130], {"packed": False, "head_dim": 8, "nheads": 1, "causal": True}),
    "d72-float16": ([500], [1], {"packed": False, "head_dim": 72, "dtype": torch.float16}),
    "d192-dv128-causal": ([300, 5], [300, 140], {"head_dim": 192, "head_dim_v": 128, "causal": True, "nheads": 1}),
    "d136-float16": ([260, 200], [300, 128], {"head_dim": 136, "dtype": torch.float16, "nheads": 1}),
    "d256-everything": ([140, 20], [300, 0], {"head_dim": 256, "nheads": 1, **EVERYTHING}),
}


@pytest.mark.parametrize("case", CASES)
def test_forward(case: str, fuzz_seconds: float) -> None:
    """Sequences around tile edges, under schedules drawn at random."""
    lengths_q, lengths_k, options = CASES[case]
    call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, **options})
    for _, draw in draws(case, fuzz_seconds):
        check(call, draw)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "by_pairs", "options"),
    [
        ([129, 20], [200, 140], False, {"head_dim": 64, **EVERYTHING}),
        ([140], [200], False, {"head_dim": 256, "causal": True}),
        ([150], [140], True, {"head_dim": 192, "head_dim_v": 128}),
        ([140], [130], False, {"head_dim": 128, "packed": False, "bias": (1, 1)}),  # no polynomials on either GPU
    ],
    ids=["d64-everything", "d256-causal", "pair-d192-dv128", "d128-bias"],
)
def test_kernels_of_a_b300(lengths_q: list[int], lengths_k: list[int], by_pairs: bool, options: dict[str, Any]) -> None:
    """Which compute all weights without polynomials."""
    call = random_call(lengths_q, lengths_k, **{"nheads": 1, "dtype": torch.bfloat16, **options})
    for seed in range(2):
        check(call, random.Random(seed), by_pairs=by_pairs, capability=B300)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "by_pairs", "options"),
    [
        ([129, 0, 300], [128, 17, 257], False, {"head_dim": 72, "causal": True}),
        ([300], [200], False, {"head_dim": 192, "head_dim_v": 128}),  # O has no place but that of Q
        ([140], [130], False, {"head_dim": 256}),
        ([300, 20], [130, 0], True, {"head_dim": 256}),
    ],
)
def test_a_wide_out_is_what_is_rounded_else(
    lengths_q: list[int], lengths_k: list[int], by_pairs: bool, options: dict[str, Any]
) -> None:
    call = random_call(lengths_q, lengths_k, **{"nheads": 2, "nheads_k": 1, "dtype": torch.bfloat16, **options})
    (out, lse), (wide, lse_beside) = (
        execute(call, random.Random(0), by_pairs=by_pairs, wide=is_wide) for is_wide in (False, True)
    )
    assert wide.dtype == torch.float32
    assert (wide != out).any()
    assert bitwise_equal(wide.bfloat16(), out)
    assert bitwise_equal(lse_beside, lse)


@pytest.mark.parametrize("head_dim", [128, 256])  # O is known to be complete in different ways
def test_references_that_rise_by_much(head_dim: int) -> None:
    """Each block has larger scores than the one before, and some rows' rise while their neighbours' do not."""
    call = random_call([256], [512], packed=False, nheads=1, head_dim=head_dim, dtype=torch.bfloat16)
    with torch.no_grad():
        call.q[:, ::3] *= 8
        call.k *= torch.linspace(4, 0.1, 512, dtype=call.k.dtype)[:, None, None]
    check(call, random.Random(0))


def test_nan_of_a_key_is_seen() -> None:
    """By all queries that see the key, whichever way the weight of its column is computed; and by no others."""
    call = random_call([130], [130], packed=False, nheads=1, head_dim=64, causal=True, dtype=torch.bfloat16)
    with torch.no_grad():
        call.k[:, 14] = torch.nan  # its pair of weights is one that comes from a polynomial
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in ("q", "k", "v")})
    out, lse = execute(call, random.Random(0))
    assert out[:, 14:].isnan().all()
    assert lse[..., 14:].isnan().all()
    assert out[:, :14].isfinite().all()
