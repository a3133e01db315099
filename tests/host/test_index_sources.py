"""Sources of masks of selected blocks: the caller's tensors, of any dtype.

``BlockMask.from_indices`` takes them with counts or without, ``BlockMask.from_selection`` without.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func
from tests.lib.checks import needs_kernels
from tests.lib.kept_things import ROWS, Sources, inputs
from tests.lib.modes import Operators

CASES = [
    pytest.param(dtype, kind, id=f"{str(dtype).removeprefix('torch.')}-{kind}")
    for dtype in (torch.int32, torch.int64)
    for kind in ("all", "counts", "selection")
]
each_case = pytest.mark.parametrize(("dtype", "kind"), CASES)


def sources_of(step: int, dtype: torch.dtype, kind: str, device: str = "cpu") -> Sources:
    """Arguments of ``from_indices``; both tensors differ from step to step."""
    blocks = [[0, 1], [step, (step + 1) % 3], [2, 1]]
    found = {"indices": torch.tensor([[blocks]], dtype=dtype, device=device)}
    if kind == "selection":  # by each query of a block
        found["indices"] = found["indices"].repeat_interleave(ROWS // 3, 2)
    if kind == "counts":
        found["counts"] = torch.tensor([[[1, 1, 1 + step % 2]]], dtype=dtype, device=device)
    return found


def mask_of(sources: Sources) -> BlockMask:
    if sources["indices"].shape[2] == ROWS:
        return BlockMask.from_selection(sources["indices"], block=ROWS // 3, seqlen_k=ROWS)
    return BlockMask.from_indices(sources["indices"], sources.get("counts"), seqlen_k=ROWS)


def attend(mask: BlockMask, device: str = "cpu") -> Tensor:
    return call(mask, *inputs(device, grad=False))


def call(mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, block_mask=mask)


def attend_all(dtype: torch.dtype, kind: str, device: str = "cpu") -> list[tuple[Sources, Tensor]]:
    """Sources of three steps, and the output under the mask of each; no two are equal."""
    steps = [sources_of(step, dtype, kind, device) for step in range(3)]
    outs = [attend(mask_of(sources), device) for sources in steps]
    assert not any(torch.equal(outs[i], outs[i - 1]) for i in range(3))
    return list(zip(steps, outs, strict=True))


def write(buffers: Sources, sources: Sources) -> None:
    for name, x in sources.items():
        buffers[name].copy_(x)


USES: dict[str, Callable[[BlockMask], Any]] = {
    "call": attend,
    "joined": lambda mask: attend(mask & BlockMask.causal(ROWS, ROWS)),
    "build": lambda mask: mask.build(),
    "to": lambda mask: mask.to("meta"),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@each_case
def test_written_before_use(dtype: torch.dtype, kind: str, use: Callable[[BlockMask], Any]) -> None:
    """The error names the tensor that has been written to."""
    if kind == "selection" and use is USES["joined"]:
        pytest.skip("selections do not combine")
    for name in sources_of(0, dtype, kind):
        sources = sources_of(0, dtype, kind)
        mask = mask_of(sources)
        sources[name].zero_()
        with pytest.raises(ValueError, match=f"^{name}: expected what it was when the BlockMask was made of it"):
            use(mask)


@pytest.mark.parametrize(("dtype", "kind"), CASES[::2])  # each dtype, and each kind
def test_captured_and_compiled_calls_read_anew(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with one mask that was made before, whose sources change between them."""
    steps = attend_all(dtype, kind)
    buffers = sources_of(0, dtype, kind)
    mask = mask_of(buffers)
    x = inputs("cpu", grad=False)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for sources, out in steps:
        write(buffers, sources)
        assert torch.equal(compiled(mask, *x), out)
    monkeypatch.setattr("flash_attn_cute.runtime.kept.is_captured", lambda device: True)
    for sources, out in steps:
        write(buffers, sources)
        assert torch.equal(attend(mask), out)


@each_case
def test_making_a_mask_launches_nothing(dtype: torch.dtype, kind: str) -> None:
    sources = sources_of(0, dtype, kind)
    with Operators() as mode:
        mask = mask_of(sources)
        assert not mode.seen
        attend(mask)
        assert mode.seen


@needs_kernels
@each_case
def test_graphs_read_indices_anew(dtype: torch.dtype, kind: str) -> None:
    """Replays read buffers again, of a mask that is made before the capture or in it."""
    steps = attend_all(dtype, kind, "cuda")
    x = inputs("cuda", grad=False)
    buffers = sources_of(0, dtype, kind, "cuda")
    before = mask_of(buffers)
    for make in (lambda: before, lambda: mask_of(buffers)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(make(), *x)
        for sources, expected in steps:
            write(buffers, sources)
            graph.replay()
            assert torch.equal(out, expected)
