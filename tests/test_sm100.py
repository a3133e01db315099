"""The Blackwell forward kernel, executed on the CPU from its PTX (``tests.ptx``), against the oracle."""

import dataclasses
import functools
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_attn_cute.backends.cute.plan import FEW_QUERIES, Shapes, plan_forward
from flash_attn_cute.kernels.registry import ARCHITECTURES
from flash_attn_cute.kernels.sm100.config import PART_ROWS, SHARED_MEMORY
from flash_attn_cute.spec import AttentionInputs, AttentionSpec, Options
from tests import oracle, ptx
from tests.checks import assert_close, draws, random_call
from tests.oracle import Call

NUM_SMS = 2


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


def text_of(config: Any, folder: Path) -> str:
    """The PTX of a configuration's kernel."""
    cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    compiler = pytest.importorskip("cutlass.base_dsl.compiler")
    compile_module = pytest.importorskip("flash_attn_cute.jit.compile")
    text: str = compile_module.compile_kernel(config, cute.KeepPTX, compiler.DumpDir(str(folder))).artifacts.PTX
    return text


@functools.cache
def program(config: Any, folder: Path) -> ptx.Program:
    return ptx.Program(text_of(config, folder))


def as_given(call: Call) -> tuple[AttentionInputs, AttentionSpec]:
    """A call as backends are given it; autograd knows nothing of its q, k and v."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "learnable_sink", "mask", "bias")
    fields: dict[str, Any] = {name: getattr(call, name) for name in names}
    fields |= {name: getattr(call, name).detach() for name in ("q", "k", "v")}
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
    shapes = Shapes(call.q.shape, call.k.shape, 0, FEW_QUERIES + 1)
    config, numbers, _ = plan_forward(ARCHITECTURES["sm100"], spec, shapes, NUM_SMS)
    return config, numbers


def execute(
    call: Call,
    folder: Path,
    draw: random.Random,
    changed: ptx.Program | None = None,
    lagging: ptx.Lagging | None = None,
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call; of a changed program instead of its configuration's, if there is one."""
    packed = call.cu_seqlens_q is not None
    config, numbers = planned(call)
    code = program(config, folder) if changed is None else changed
    memory, heads = Memory(), call.q.shape[-2]
    out = torch.empty(*call.q.shape[:-1], call.v.shape[-1], dtype=call.q.dtype)
    lse = torch.empty((heads, call.q.shape[0]) if packed else (call.q.shape[0], heads, call.q.shape[1]))
    places = [memory.put(x) for x in (call.q, call.k, call.v, out, lse)]
    params, tensors = [bytes(32)] * 2, {}
    boxes = PART_ROWS, config.tile_n, config.tile_n, PART_ROWS
    for x, place, box in zip((call.q, call.k, call.v, out), places[:4], boxes, strict=True):
        batch, strides = (0, x.stride()) if packed else (x.stride(0), x.stride()[1:])
        tensors[len(params)] = ptx.Rows(
            place // 2, x.shape[-3], x.shape[-1], x.shape[-2], strides[0], strides[1], batch, box
        )
        params += [bytes(128), bytes(code.param_sizes[len(params) + 1])]
    order = [0, 2, 1] if packed else [1, 3, 2, 0]  # rows, columns, heads, batch
    by_rows, numbers_by_rows = out.permute(order), lse.permute([1, 0] if packed else [2, 1, 0])
    params.append(tensor_argument(places[3], by_rows.shape, (by_rows.stride(0), *by_rows.stride()[2:])))
    params.append(tensor_argument(places[4], numbers_by_rows.shape, numbers_by_rows.stride()[1:]))
    for x, place in zip((call.q, call.k, call.v, out, lse), places, strict=True):
        params.append(tensor_argument(place, x.shape, x.stride()[:-1]))
    sink = None if call.learnable_sink is None else call.learnable_sink.float()
    for vector in (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k, sink):
        if vector is not None:
            params.append(tensor_argument(memory.put(vector), vector.shape, ()))
    counter = memory.put(torch.zeros(4, dtype=torch.int32))
    params.append(tensor_argument(counter, (4,), ()))
    given = [x for x in numbers if x is not None]
    params += [struct.pack("<f" if isinstance(x, float) else "<i", x) for x in given]
    rest = call.softcap or numbers.softmax_scale
    tanh = numbers.softmax_scale / call.softcap if call.softcap else 1.0
    params += [struct.pack("<f", x) for x in (tanh, 1.0, rest * math.log2(math.e))]
    params = [param + bytes(size - len(param)) for param, size in zip(params, code.param_sizes, strict=True)]
    tiles = -(-call.q.shape[-3] // config.tile_m) * heads * (1 if packed else call.q.shape[0])
    if call.cu_seqlens_q is not None:
        tiles = (call.q.shape[0] // config.tile_m + len(call.cu_seqlens_q) + 1) * heads
    everything = memory.bytes()
    ptx.run(code, params, everything, tensors, min(tiles, NUM_SMS), draw, SHARED_MEMORY, lagging)
    assert not everything[counter : counter + 4].any(), "the counter of tiles is not left as it was"
    for x, place in ((out, places[3]), (lse, places[4])):
        found = torch.from_numpy(everything[place : place + x.numel() * x.element_size()])
        x.copy_(found.view(x.dtype).view(x.shape))
    return out, lse


def check(
    call: Call,
    folder: Path,
    draw: random.Random,
    changed: ptx.Program | None = None,
    lagging: ptx.Lagging | None = None,
) -> None:
    """A call's results against the oracle's, and what stands in the padding."""
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in ("q", "k", "v")})
    out, lse = execute(call, folder, draw, changed, lagging)
    with torch.no_grad():
        expected, low = oracle.attention(call.to(torch.float64)), oracle.attention(call)
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
    "d72-float16": ([500], [1], {"packed": False, "head_dim": 72, "dtype": torch.float16}),
    "d192-dv128-causal": ([300, 5], [300, 140], {"head_dim": 192, "head_dim_v": 128, "causal": True, "nheads": 1}),
    "d136-float16": ([260, 200], [300, 128], {"head_dim": 136, "dtype": torch.float16, "nheads": 1}),
    "d256-everything": ([140, 20], [300, 0], {"head_dim": 256, "nheads": 1, **EVERYTHING}),
}


@pytest.mark.parametrize("case", CASES)
def test_forward(case: str, tmp_path: Path, fuzz_seconds: float) -> None:
    """Sequences around tile edges, under schedules drawn at random."""
    lengths_q, lengths_k, options = CASES[case]
    call = random_call(lengths_q, lengths_k, **{"dtype": torch.bfloat16, **options})
    for _, draw in draws(case, fuzz_seconds):
        check(call, tmp_path, draw)


@pytest.mark.parametrize("head_dim", [128, 256])  # O is known to be complete in different ways
def test_references_that_rise_by_much(head_dim: int, tmp_path: Path) -> None:
    """Each block has larger scores than the one before, and some rows' rise while their neighbours' do not."""
    call = random_call([256], [512], packed=False, nheads=1, head_dim=head_dim, dtype=torch.bfloat16)
    with torch.no_grad():
        call.q[:, ::3] *= 8
        call.k *= torch.linspace(4, 0.1, 512, dtype=call.k.dtype)[:, None, None]
    check(call, tmp_path, random.Random(0))


def test_nan_of_a_key_is_seen(tmp_path: Path) -> None:
    """By all queries that see the key, whichever way the weight of its column is computed; and by no others."""
    call = random_call([130], [130], packed=False, nheads=1, head_dim=64, causal=True, dtype=torch.bfloat16)
    with torch.no_grad():
        call.k[:, 14] = torch.nan  # its pair of weights is one that comes from a polynomial
    call = dataclasses.replace(call, **{name: getattr(call, name).detach() for name in ("q", "k", "v")})
    out, lse = execute(call, tmp_path, random.Random(0))
    assert out[:, 14:].isnan().all()
    assert lse[..., 14:].isnan().all()
    assert out[:, :14].isfinite().all()
