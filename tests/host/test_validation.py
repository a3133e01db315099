"""Every complaint: the argument's name, what was expected and what came, as ValueError or TypeError."""

import ast
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.cute import backend as cute
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch, validate
from flash_attn_cute.calls.attention_call import AttentionCall
from flash_attn_cute.problem import lengths
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Feature, Options
from flash_attn_cute.runtime import settings
from flash_attn_cute.score_statistics import column_sums
from tests.lib.refusals import assert_refused, pairs, refusals


def dense() -> dict[str, Any]:
    """A valid dense call: batch 2, 6 queries, 8 keys, 4 heads on 2."""
    return {"q": torch.randn(2, 6, 4, 8), "k": torch.randn(2, 8, 2, 8), "v": torch.randn(2, 8, 2, 16)}


def packed() -> dict[str, Any]:
    """A valid packed call: 10 queries and 12 keys of 2 sequences."""
    return {
        "q": torch.randn(10, 4, 8),
        "k": torch.randn(12, 2, 8),
        "v": torch.randn(12, 2, 16),
        "cu_seqlens_q": torch.tensor([0, 4, 10], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 12], dtype=torch.int32),
        "max_seqlen_q": 6,
        "max_seqlen_k": 7,
    }


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def shown(*shape: int) -> BlockMask:
    return BlockMask.from_dense(torch.ones(shape, dtype=torch.bool))


FLEX = create_block_mask(noop_mask, 1, 1, 6, 8, device="cpu")
SELECTED = BlockMask.from_selection(torch.zeros(1, 1, 6, 2, dtype=torch.int32), block=4, seqlen_k=8)
META = torch.device("meta")


class Negated(torch.Tensor):
    """Means something else than it stores, as it has a function of its own."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, kinds, args, kwargs)


SCALE = "softmax_scale: expected None or a number up to 2**127 in magnitude (float32), got"
SOFTCAP = "softcap: expected 0 for none, or a number from 2**-126 to 2**127 (float32), got"

# What is changed of the valid calls above.
BOTH = f"""
causal=1
    TypeError: causal: expected a bool, got 1
deterministic=1
    TypeError: deterministic: expected a bool or "invariant", got 1
deterministic="yes"
    ValueError: deterministic: expected a bool or "invariant", got 'yes'
return_lse=None
    TypeError: return_lse: expected a bool, got None
zero_padding=0
    TypeError: zero_padding: expected a bool, got 0
dropout_p=0.1
    ValueError: dropout_p: expected 0.0, dropout is not supported, got 0.1
backend=3
    TypeError: backend: expected None or a str, got 3
backend="sm75"
    ValueError: backend: expected None or one of ['sm90', 'portable', 'sm100'], got 'sm75'
softmax_scale="1"
    TypeError: {SCALE} '1'
softmax_scale=True
    TypeError: {SCALE} True
softmax_scale=float("inf")
    ValueError: {SCALE} inf
softcap=None
    TypeError: {SOFTCAP} None
softcap=float("nan")
    ValueError: {SOFTCAP} nan
softcap=-1.0
    ValueError: {SOFTCAP} -1.0
softcap=1e+39
    ValueError: {SOFTCAP} 1e+39
softcap=1e-39
    ValueError: {SOFTCAP} 1e-39
softmax_scale=-1e+39
    ValueError: {SCALE} -1e+39
window_size=3
    TypeError: window_size: expected a pair (left, right), each an int or None, got 3
window_size=(1,)
    ValueError: window_size: expected a pair (left, right), each an int or None, got (1,)
window_size=(1, 2.0)
    TypeError: window_size: expected a pair
window_size=(True, 2)
    TypeError: window_size: expected a pair
window_size=torch.ones(2)
    TypeError: window_size: expected a pair
window_size=np.ones(2)
    TypeError: window_size: expected a pair
window_size=(np.ones(2), None)
    TypeError: window_size: expected a pair
dropout_p=np.zeros(2)
    ValueError: dropout_p: expected 0.0, dropout is not supported, got [0. 0.]
dropout_p=torch.zeros(2)
    ValueError: dropout_p: expected 0.0, dropout is not supported, got tensor
q=None
    TypeError: q: expected a torch.Tensor, got NoneType
k=[1]
    TypeError: k: expected a torch.Tensor, got list
k=lambda x: x.to(META)
    ValueError: k: expected the device of q, cpu, got meta
v=lambda x: x.to_sparse()
    TypeError: v: expected a strided tensor, got torch.sparse_coo
v=lambda x: x.as_subclass(Negated)
    TypeError: v: expected a plain tensor, got Negated, a subclass with
softmax_scale=10 ** 400
    ValueError: {SCALE} 1000
q=lambda x: x.int()
    TypeError: q: expected float16, bfloat16, float32 or float64, got torch.int32
k=lambda x: x.half()
    TypeError: k: expected the dtype of q, torch.float32, got torch.float16
v=lambda x: x.double()
    TypeError: v: expected the dtype of q, torch.float32, got torch.float64
q=lambda x: x[..., :7]
    ValueError: k: expected the head dimension of q, 7, got shape
q=lambda x: x[..., :0], k=lambda x: x[..., :0]
    ValueError: q: expected at least one head and a head
v=lambda x: x[..., :0, :]
    ValueError: v: expected at least one head and a head dimension
v=lambda x: x[..., ::2]
    ValueError: v: expected a contiguous last dimension (stride 1), got strides
v=lambda x: x[..., :1, :]
    ValueError: v: expected the shape of k but for the last dimension
q=lambda x: x[..., :3, :]
    ValueError: k: expected a number of heads that divides the 3 heads of q, got 2
learnable_sink=1.0
    TypeError: learnable_sink: expected a torch.Tensor, got float
learnable_sink=torch.zeros(3)
    ValueError: learnable_sink: expected shape (nheads,) = (4,), got shape (3,)
learnable_sink=torch.zeros(4, 1)
    ValueError: learnable_sink: expected shape (nheads,) = (4,)
learnable_sink=torch.zeros(4).half()
    TypeError: learnable_sink: expected float32 or the dtype of q, torch.float32, got torch.float16
mask=torch.ones(())
    TypeError: mask: expected bool (True = may attend), got torch.float32
mask=[True]
    TypeError: mask: expected a torch.Tensor, got list
mask=torch.ones(5, 1, 1, 1, 1, dtype=torch.bool)
    ValueError: mask: expected a shape that broadcasts to
bias=torch.zeros(1, dtype=torch.int64)
    TypeError: bias: expected float32 or the dtype of q
bias=torch.zeros(1, device=META)
    ValueError: bias: expected the device of q, cpu, got meta
seqused_q=int32(1, 2, 3)
    ValueError: seqused_q: expected shape (batch,) = (2,), got shape (3,)
seqused_k=torch.tensor([1, 2])
    TypeError: seqused_k: expected int32, got torch.int64
seqused_k=int32(1, 2).to(META)
    ValueError: seqused_k: expected the device of q, cpu, got meta
seqused_q=(1, 2)
    TypeError: seqused_q: expected a torch.Tensor, got tuple
block_mask=torch.ones(6, 8, dtype=torch.bool)
    TypeError: block_mask: expected a flash_attn_cute.BlockMask, got Tensor; BlockMask.from_dense, from_blocks and
block_mask=FLEX
    TypeError: ... ; BlockMask.from_flex takes
block_mask=3
    TypeError: block_mask: expected a flash_attn_cute.BlockMask, got int
"""
DENSE = """
q=torch.randn(6, 4, 8)
    ValueError: q: expected shape (batch, seqlen_q, nheads, d), got shape (6, 4, 8)
v=torch.randn(8, 2, 16)
    ValueError: v: expected shape (batch, seqlen_k, nheads_k, d_v), got shape
q=torch.randn(3, 6, 4, 8)
    ValueError: k: expected the batch size of q, 3, got shape (2, 8, 2, 8)
mask=torch.ones(6, 7, dtype=torch.bool)
    ValueError: ... (batch, nheads, seqlen_q, seqlen_k) = (2, 4, 6, 8)
bias=torch.zeros(3, 1, 1, 1)
    ValueError: bias: expected a shape that broadcasts to
seqused_q=int32(1, 7)
    ValueError: seqused_q: expected 0 to 6 rows for sequence 1, got 7
seqused_k=int32(-1, 7)
    ValueError: seqused_k: expected 0 to 8 rows for sequence 0, got -1
block_mask=BlockMask.causal(6, 6)
    ValueError: block_mask: expected one over (seqlen_q, seqlen_k) = (6, 8), got one over (6, 6)
block_mask=SELECTED, mask=torch.ones(8, dtype=torch.bool)
    ValueError: mask: expected None beside BlockMask.from_selection, got a tensor
block_mask=SELECTED, bias=torch.zeros(8)
    ValueError: bias: expected None beside BlockMask.from_selection, got a tensor
block_mask=shown(1, 1, 6, 8), deterministic="invariant"
    ValueError: block_mask: expected None, a window or documents with deterministic="invariant"
block_mask=shown(3, 1, 6, 8)
    ValueError: block_mask: expected a batch of 1 or 2, got 3
block_mask=shown(1, 3, 6, 8)
    ValueError: ... expected 1, nheads = 4 or nheads_k = 2 heads, got 3
block_mask=shown(1, 4, 6, 8).with_order("spt")
    ValueError: block_mask: expected an order for each of the 2 key heads, or one for all, got 4;
        with_order(..., group=2)
block_mask=BlockMask.from_dense(torch.ones(6, 8, dtype=torch.bool, device=META))
    ValueError: block_mask: expected the device of q, cpu, got meta
"""
PACKED = """
q=torch.randn(1, 10, 4, 8)
    ValueError: q: expected shape (total_q, nheads, d), got shape (1, 10, 4, 8)
cu_seqlens_q=[0, 10]
    TypeError: cu_seqlens_q: expected a torch.Tensor, got list
cu_seqlens_k=None
    TypeError: cu_seqlens_k: expected a torch.Tensor, got NoneType
cu_seqlens_q=torch.tensor([0, 4, 10])
    TypeError: cu_seqlens_q: expected int32, got torch.int64
cu_seqlens_q=int32()
    ValueError: cu_seqlens_q: expected shape (batch + 1,), got shape (0,)
cu_seqlens_q=int32(3)[0]
    ValueError: cu_seqlens_q: expected shape (batch + 1,), got shape ()
cu_seqlens_k=int32(0, 12)
    ValueError: cu_seqlens_k: expected shape (batch + 1,) = (3,), got shape (2,)
cu_seqlens_k=int32(0, 5, 12).to(META)
    ValueError: cu_seqlens_k: expected the device of q, cpu, got meta
max_seqlen_q=6.0
    TypeError: max_seqlen_q: expected an int or a 0-d tensor, got 6.0
max_seqlen_k=True
    TypeError: max_seqlen_k: expected an int or a 0-d tensor, got True
max_seqlen_k=-1
    ValueError: max_seqlen_k: expected 0 to 2147483647, got -1
softmax_scale=np.float32("nan")
    ValueError: softmax_scale: expected None or a number up to 2**127 in magnitude (float32), got nan
max_seqlen_k=np.int64(-1)
    ValueError: max_seqlen_k: expected 0 to 2147483647, got -1
max_seqlen_q=2 ** 63
    ValueError: max_seqlen_q: expected 0 to 2147483647, got 9223372036854775808
max_seqlen_k=torch.tensor(7), mask=torch.ones(0, dtype=torch.bool)
    ValueError: mask: expected a last dimension of at least 7, the longest sequence of keys, got shape (0,)
max_seqlen_q=torch.zeros(1)
    ValueError: max_seqlen_q: expected an int or a 0-d int32 or int64 tensor
mask=torch.ones(10, 8, dtype=torch.bool)
    ValueError: ... (nheads, total_q, max_seqlen_k) = (4, 10, 7), got
bias=torch.zeros(2, 4, 10, 7)
    ValueError: bias: expected a shape that broadcasts to
cu_seqlens_q=int32(0, 5, 3)
    ValueError: cu_seqlens_q: expected offsets that never decrease, got [5, 3] at 1
cu_seqlens_q=int32(-1, 4, 10)
    ValueError: ... within the 10 rows of q, got a range from -1 to 10
cu_seqlens_k=int32(0, 4, 13), max_seqlen_k=12
    ValueError: ... within the 12 rows of k, got a range from 0
seqused_k=int32(5, 8)
    ValueError: seqused_k: expected 0 to 7 rows for sequence 1, got 8
max_seqlen_q=5
    ValueError: max_seqlen_q: expected an upper bound on the sequence lengths, got 5
max_seqlen_k=torch.tensor(7), mask=torch.ones(10, 6, dtype=torch.bool)
    ValueError: mask: expected a last dimension of at least 7, the longest sequence of keys, got shape (10, 6)
block_mask=BlockMask.causal(6, 7)
    ValueError: ... (total_q, total_k) = (10, 12), got one over (6, 7)
block_mask=shown(2, 1, 10, 12)
    ValueError: block_mask: expected a batch of 1, got 2
"""


def change(call: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return call | {
        name: value(call[name]) if callable(value) and not isinstance(value, torch.Tensor) else value
        for name, value in changes.items()
    }


def dense_call(**changes: Any) -> torch.Tensor:
    return flash_attn_func(**change(dense(), changes))


def packed_call(**changes: Any) -> torch.Tensor:
    return flash_attn_varlen_func(**change(packed(), changes))


@refusals(BOTH + DENSE)
def test_dense_errors(call: str, error: str) -> None:
    assert_refused(f"dense_call({call})", error, globals())


@refusals(BOTH + PACKED)
def test_packed_errors(call: str, error: str) -> None:
    assert_refused(f"packed_call({call})", error, globals())


def test_the_unchanged_calls_are_valid() -> None:
    assert flash_attn_func(**dense()).shape == (2, 6, 4, 16)
    assert flash_attn_varlen_func(**packed()).shape == (10, 4, 16)


def raises_of(module: ModuleType) -> dict[tuple[str, int], int]:
    """Each line that belongs to a raise statement of a module, with the line on which the statement starts."""
    path = str(module.__file__)
    nodes = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.Raise)]  # prose: ok
    return {(path, line): node.lineno for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def test_every_check_has_a_test() -> None:
    """Each raise statement of the checks is reached by some case above."""
    lines = raises_of(validate) | raises_of(lengths)
    unreached = {(path, start) for (path, _), start in lines.items()}
    calls = [f"dense_call({call})" for call, _ in pairs(BOTH + DENSE)]
    calls += [f"packed_call({call})" for call, _ in pairs(BOTH + PACKED)]
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            eval(call)
        where = traceback.extract_tb(caught.value.__traceback__)[-1]
        if (where.filename, where.lineno or 0) in lines:
            unreached.discard((where.filename, lines[where.filename, where.lineno or 0]))
    assert not unreached


@pytest.mark.parametrize(
    ("function", "arguments", "options", "said"),
    [
        (flash_attn_func, [*dense().values(), 0.0, None, True], {}, "takes 3 positional arguments but 6 were given"),
        (flash_attn_func, dense().values(), {"is_causal": True}, "got an unexpected keyword argument 'is_causal'"),
        (flash_attn_varlen_func, packed().values(), {"block_table": None}, "an unexpected keyword argument 'block_t"),
        (flash_attn_varlen_func, list(packed().values())[:5], {}, "missing 2 required positional arguments"),
    ],
)
def test_arguments_of_other_libraries_are_named_with_their_replacement(
    function: Any, arguments: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=f"{said}.*; flash_attn_cute.integrations has functions with the arguments of"):
        function(*arguments, **options)
    with pytest.raises(TypeError) as raised:  # about an argument that there is
        function(**(dense() if function is flash_attn_func else packed()) | {"q": None})
    assert str(raised.value) == "q: expected a torch.Tensor, got NoneType"


@pytest.mark.parametrize("window_size", [(None, None), (-1, -1), (-1, None), [None, -7], (2**63, 2**31)])
def test_negative_and_none_mean_unbounded(window_size: Any) -> None:
    call = dense()
    assert torch.equal(flash_attn_func(**call, window_size=window_size), flash_attn_func(**call))
    causal = flash_attn_func(**call, causal=True)
    assert torch.equal(flash_attn_func(**call, causal=True, window_size=window_size), causal)
    assert torch.equal(flash_attn_func(**call, window_size=(-1, 0)), causal)


def test_max_seqlen_may_stay_on_the_device() -> None:
    """A 0-d tensor is not read: on the meta device there is nothing to read."""
    call = packed()
    expected = flash_attn_varlen_func(**call)
    for bound in (torch.tensor(7), torch.tensor(3), torch.empty((), dtype=torch.int32, device=META)):
        assert torch.equal(flash_attn_varlen_func(**call | {"max_seqlen_q": bound, "max_seqlen_k": bound}), expected)


@pytest.mark.usefixtures("_settings_reread")
@pytest.mark.parametrize(
    ("function", "call", "said"),
    [
        (flash_attn_varlen_func, packed() | {"cu_seqlens_q": int32(0, 11, 10)}, "cu_seqlens_q: expected offsets that"),
        (
            flash_attn_func,
            dense() | {"seqused_k": int32(3, 9)},
            "seqused_k: expected 0 to 8 rows for sequence 1, got 9",
        ),
        (
            column_sums,
            {"q": dense()["q"], "k": dense()["k"], "lse": torch.zeros(2, 4, 6), "seqused_q": int32(7, 3)},
            "seqused_q: expected 0 to 6 rows for sequence 0, got 7",
        ),
    ],
)
def test_check_variable(function: Any, call: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLASH_ATTN_CUTE_CHECK=1 verifies offsets and lengths before the backend runs."""
    backend = PortableBackend()
    monkeypatch.setitem(dispatch.BACKENDS, "portable", backend)
    for name in ("forward", "column_sums"):
        monkeypatch.setattr(backend, name, mock.Mock(side_effect=AssertionError("launched")), raising=False)
    monkeypatch.setattr(backend, "has_column_sums", True, raising=False)
    with pytest.raises(AssertionError, match="launched"):
        function(**call)
    monkeypatch.setenv("FLASH_ATTN_CUTE_CHECK", "1")
    settings.check_data.cache_clear()
    with pytest.raises(ValueError, match=said):
        function(**call)


@pytest.mark.parametrize(
    ("variable", "setting", "expected"),
    [
        ("FLASH_ATTN_CUTE_CHECK", settings.check_data, "0 or 1"),
        ("FLASH_ATTN_CUTE_NVTX", settings.nvtx, "0 or 1"),
        ("FLASH_ATTN_CUTE_SELFCHECK", settings.selfcheck, "0, 1 or force"),
    ],
)
def test_other_values_of_variables(variable: str, setting: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=f"{variable}: expected {expected}, got 'yes'"):
        setting.__wrapped__()


class Narrow(PortableBackend):
    """A backend that can do little, for the sake of the messages."""

    name = "narrow"
    features = frozenset({Feature.PACKED, Feature.WINDOW})

    def limits(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
        return () if spec.dtype == torch.bfloat16 else (f"{spec.dtype} inputs",)


@pytest.fixture
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BACKENDS", {"narrow": Narrow(), "portable": PortableBackend()})


@pytest.mark.usefixtures("_narrow")
def test_a_requested_backend_runs_or_says_all_it_lacks() -> None:
    call = packed() | {"learnable_sink": torch.zeros(4), "softcap": 1.0, "causal": True}
    with pytest.raises(
        ValueError, match=r"got 'narrow', which cannot: softcap; learnable_sink; torch\.float32 inputs$"
    ):
        flash_attn_varlen_func(**call, backend="narrow")
    assert flash_attn_varlen_func(**call, backend="portable").shape == (10, 4, 16)
    low = change(packed(), dict.fromkeys("qkv", torch.Tensor.bfloat16))
    assert flash_attn_varlen_func(**low, causal=True, backend="narrow").shape == (10, 4, 16)


@pytest.mark.usefixtures("_narrow")
def test_without_a_request_the_first_that_can_is_chosen() -> None:
    inputs = validate.check(AttentionCall(**dense()))
    spec = AttentionSpec.of(inputs, Options(window_right=0, deterministic=True))
    selection = dispatch.select(spec, inputs)
    assert selection.name == "portable"
    assert selection.passed_over == {"narrow": ("deterministic=True", "torch.float32 inputs")}


def test_no_backend_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BACKENDS", {"narrow": Narrow()})
    with pytest.raises(
        ValueError,
        match=r"at least one that can serve this call, but none can \(narrow cannot: torch\.float32 inputs\)",
    ):
        flash_attn_func(**dense())


def test_without_its_compiler_a_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "_HAS_COMPILER", False)
    with pytest.raises(
        ValueError,
        match=r"got 'sm90', which cannot: tensors on cpu; .*; the package nvidia-cutlass-dsl is not installed$",
    ):
        flash_attn_func(**dense(), backend="sm90")


def low(*shape: int) -> torch.Tensor:
    """A bfloat16 tensor that takes no memory, however large."""
    return torch.zeros(shape[-1], dtype=torch.bfloat16).expand(shape)


ROWS, SQUARE = 2**30, (2**10, 2**20)
PACKED_TO = f"{ROWS} rows of q, which are packed for this call (expected fewer than 2^30)"


@pytest.mark.parametrize(
    ("function", "rows_q", "rows_k", "options", "reason"),
    [
        (flash_attn_varlen_func, (ROWS - 1,), (ROWS - 1,), {}, ""),
        (flash_attn_varlen_func, (ROWS,), (8,), {}, f"{ROWS} rows of total_q (expected fewer than 2^30)"),
        (flash_attn_varlen_func, (8,), (ROWS + 1,), {}, f"{ROWS + 1} rows of total_k (expected fewer than 2^30)"),
        (flash_attn_func, SQUARE, SQUARE, {}, ""),
        (flash_attn_func, SQUARE, SQUARE, {"causal": True}, ""),
        (flash_attn_func, SQUARE, SQUARE, {"seqused_k": torch.zeros(2**10, dtype=torch.int32)}, PACKED_TO),
        (flash_attn_func, SQUARE, (2**10, 2**20 - 1), {"causal": True}, PACKED_TO),  # some queries see no key
    ],
)
def test_rows_of_the_kernels(
    function: Any, rows_q: tuple[int, ...], rows_k: tuple[int, ...], options: dict[str, Any], reason: str
) -> None:
    """Packed rows, and those of dense batches that kernels see packed, are fewer than 2^30."""
    tensors = {name: low(*(rows_q if name == "q" else rows_k), 1, 8) for name in "qkv"}
    call = (packed() if function is flash_attn_varlen_func else {}) | tensors | options
    with pytest.raises(ValueError, match="got 'sm90', which cannot: tensors on cpu") as caught:
        function(**call, backend="sm90")
    assert ("2^30" in str(caught.value)) == bool(reason)
    assert reason in str(caught.value)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64])
def test_numbers_of_numpy(kind: Any) -> None:
    """They are taken for what they are; no operator and no cache ever sees them."""
    given: dict[str, Any] = {"softmax_scale": 2, "softcap": 3}
    if issubclass(kind, np.integer):
        given |= {"max_seqlen_q": 6, "max_seqlen_k": 7, "window_size": (3, 2)}
    of_numpy = {name: (kind(3), kind(2)) if name == "window_size" else kind(x) for name, x in given.items()}
    call = packed()
    assert torch.equal(flash_attn_varlen_func(**call | of_numpy), flash_attn_varlen_func(**call | given))
    assert type(validate._as_float("softcap", kind(3), "")) is float
    if issubclass(kind, np.integer):
        assert type(validate.check_max_seqlen("max_seqlen_q", kind(6))) is int
        assert [*map(type, validate._check_window((kind(3), kind(2))))] == [int, int]


def test_factors_at_the_ends_of_float32() -> None:
    """The largest and smallest ones that are taken leave out and gradients finite."""
    call = dense()
    tensors = [call[name].requires_grad_() for name in "qkv"]
    plain = flash_attn_func(*tensors)
    for softcap in (2.0**127, 2.0**-126):
        out = flash_attn_func(*tensors, softcap=softcap)
        assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), tensors)))
        assert (softcap > 1) == torch.allclose(out, plain, atol=1e-4)


@pytest.mark.parametrize("wrong", [np.bool_(True), np.array(2), np.array([2]), "2", 2j], ids=repr)
def test_what_is_no_number_to_numpy_is_none_here(wrong: Any) -> None:
    for name in ("softmax_scale", "softcap"):
        with pytest.raises(TypeError, match=f"{name}: expected"):
            flash_attn_func(**dense(), **{name: wrong})
    with pytest.raises(TypeError, match="window_size: expected"):
        flash_attn_func(**dense(), window_size=(wrong, None))
    with pytest.raises(TypeError, match="max_seqlen_k: expected an int"):
        flash_attn_varlen_func(**packed() | {"max_seqlen_k": wrong})
