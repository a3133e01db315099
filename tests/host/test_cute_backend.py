"""Arguments of compiled code, as the kernels' backend hands them to a kernel that only looks: no GPU, no compiler."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import BlockMask, explain
from flash_attn_cute.backends.base import BackwardCall
from flash_attn_cute.backends.cute import CuteBackend, plan
from flash_attn_cute.backends.cute import backend as cute_backend
from flash_attn_cute.backends.cute.repeated import RepeatedBackward, RepeatedForward
from flash_attn_cute.explanation import Explanation
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.arguments import Argument, described
from flash_attn_cute.kernels.registry import ARCHITECTURES, pass_of
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from tests.lib.launches import Launched


def backend_for(
    inputs: AttentionInputs, window_right: int | None = None, precise: bool = False
) -> tuple[CuteBackend, AttentionSpec]:
    options = Options(window_right=window_right, precise_gradients=precise)
    return CuteBackend(ARCHITECTURES["sm90"]), AttentionSpec.of(inputs, options)


def gradient_of_the_bias(inputs: AttentionInputs, window_right: int | None = None) -> Tensor:
    """Runs a backward pass alone; the gradient has the shape and dtype of the bias."""
    backend, spec = backend_for(inputs, window_right)
    lse = torch.randn(inputs.lse_shape)
    dbias = backend.backward(BackwardCall(spec, inputs, inputs.q, lse, inputs.q, need_dbias=True)).dbias
    assert dbias is not None
    assert inputs.bias is not None
    assert (dbias.shape, dbias.dtype) == (inputs.bias.shape, inputs.bias.dtype)
    return dbias


def both_passes(
    inputs: AttentionInputs, window_right: int | None = None, dlse: Tensor | None = None, dbias: bool = False
) -> tuple[Any, Any]:
    """Forward and backward of a new backend; the results, of which nothing has been computed."""
    backend, spec = backend_for(inputs, window_right)
    out, lse, *_ = backend.forward(spec, inputs)
    sink = inputs.learnable_sink is not None
    grads = backend.backward(BackwardCall(spec, inputs, out, lse, torch.randn_like(out), dlse, None, dbias, sink))
    return (out, lse), grads


def inputs_of(*shapes: tuple[int, ...], **others: Any) -> AttentionInputs:
    q, k, v = (torch.randn(shape).to(torch.bfloat16) for shape in shapes)
    none: dict[str, Any] = dict.fromkeys(AttentionInputs._fields[3:-2])
    bounds = {"max_seqlen_q": q.shape[-3], "max_seqlen_k": k.shape[-3]}
    return AttentionInputs(q, k, v, **none | bounds | others)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def causal(seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    return {"block_mask": BlockMask.causal(seqlen_q, seqlen_k).tables(torch.device("cpu"), backward=True)}


DENSE = ((2, 70, 8, 64), (2, 90, 2, 64), (2, 90, 2, 64))
PACKED = ((140, 8, 64), (180, 2, 64), (180, 2, 64))
OFFSETS = {"cu_seqlens_q": ints(0, 70, 140), "cu_seqlens_k": ints(0, 100, 180)}
CALLS = {
    "dense": inputs_of(*DENSE),
    "packed": inputs_of(*PACKED, **OFFSETS),
    "padded": inputs_of(*DENSE, seqused_q=ints(3, 70), seqused_k=ints(90, 0)),
    "padded keys": inputs_of(*PACKED, **OFFSETS, seqused_k=ints(3, 4)),
    "sink": inputs_of(*PACKED, **OFFSETS, learnable_sink=torch.randn(8, dtype=torch.bfloat16)),
    "one query": inputs_of((3, 1, 8, 64), *[(3, 90, 2, 64)] * 2, seqused_q=ints(1, 0, 1)),
    "few queries": inputs_of((3, 5, 8, 64), *[(3, 90, 2, 64)] * 2),
    "mask": inputs_of(*DENSE, mask=torch.ones(2, 1, 1, 90, dtype=torch.bool)),
    "bias": inputs_of(*DENSE, bias=torch.randn(8, 70, 90, dtype=torch.bfloat16)),
    "packed, mask and bias": inputs_of(
        *PACKED,
        **OFFSETS,
        mask=torch.ones(140, 100, dtype=torch.bool).mT.contiguous().mT,
        bias=torch.randn(8, 1, 100, dtype=torch.bfloat16),
        max_seqlen_k=100,
    ),
    "padded, bias": inputs_of(*DENSE, seqused_q=ints(3, 70), bias=torch.randn(2, 1, 70, 90)),
    "block mask": inputs_of(*DENSE, **causal(70, 90)),
    "block mask of nothing": inputs_of(
        *DENSE,
        block_mask=BlockMask.from_dense(torch.zeros(70, 90, dtype=torch.bool)).tables(
            torch.device("cpu"), backward=True
        ),
        bias=torch.randn(8, 70, 90, dtype=torch.bfloat16),
    ),
    "packed, block mask": inputs_of(
        *PACKED, **OFFSETS, seqused_k=ints(3, 4), learnable_sink=torch.randn(8), **causal(140, 180)
    ),
    "padded, block mask": inputs_of(*DENSE, seqused_q=ints(3, 70), **causal(70, 90)),
    "narrow values": inputs_of((2, 70, 8, 192), (2, 90, 8, 192), (2, 90, 8, 128)),
    "strided": inputs_of(
        *PACKED,
        **{name: strided(x) for name, x in OFFSETS.items()},
        seqused_q=strided(ints(7, 8)),
        learnable_sink=torch.randn(1).expand(8),
    ),
    "unaligned": inputs_of((2, 70, 8, 64), (2, 90, 8, 64), (2, 90, 8, 64))._replace(
        q=torch.randn(2, 70, 8, 65).to(torch.bfloat16)[..., 1:]
    ),
}


full_and_causal = pytest.mark.parametrize("window_right", [None, 0], ids=["full", "causal"])
with_and_without_dlse = pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])


def described_tensors(arguments: Any) -> Iterator[tuple[str, Argument, Any]]:
    """Name, description and value of all tensors, of tuples among the arguments too."""
    for name, described_as in described(type(arguments)).items():
        value = getattr(arguments, name)
        if not isinstance(described_as, type):
            yield name, described_as, value
        elif name != "numbers":
            yield from described_tensors(value)


@full_and_causal
@with_and_without_dlse
@pytest.mark.parametrize("inputs", CALLS.values(), ids=CALLS)
def test_arguments_are_those_of_the_configuration(
    inputs: AttentionInputs, with_dlse: bool, window_right: int | None, launches: list[Launched]
) -> None:
    """A kernel is given what its configuration takes, and nothing else, in layouts that compiled code takes."""
    dlse = torch.randn(inputs.lse_shape) if with_dlse else None
    (out, lse), grads = both_passes(inputs, window_right, dlse)
    assert out.shape == (*inputs.q.shape[:-1], inputs.v.shape[-1])
    assert lse.shape == inputs.lse_shape
    assert [x.shape for x in grads[:3]] == [x.shape for x in inputs[:3]]
    assert [launched.config.pass_name for launched in launches] == ["forward", "backward"]
    for config, arguments in launches:
        assert type(arguments.numbers) is described(type(arguments))["numbers"]
        assert type(arguments) is pass_of(config).arguments
        for name, argument, value in described_tensors(arguments):
            assert (value is not None) == argument.is_given(config), name
            if not isinstance(value, Tensor):
                continue
            size = value.element_size()
            loses_one = argument.rank > 1 and config.features.packed and not argument.of_scores
            assert value.ndim == argument.rank - loses_one, name
            strided = attrgetter(argument.strided)(config) if isinstance(argument.strided, str) else argument.strided
            assert strided or value.stride(-1) == 1, name
            if argument.rank > 1:  # the workspace is a GPU's allocator's business
                assert value.data_ptr() % (argument.align or size) == 0, name
            assert all(stride * size % (argument.align or size) == 0 for stride in value.stride()[:-1]), name


# Those whose passes are prepared for calls that look alike; causal ones with fewer keys are split, or packed.
REPEATED = {"dense", "packed", "padded keys", "few queries", "narrow values"}


def looks(tensors: Iterable[Tensor | None]) -> list[Any]:
    return [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]


def assert_launched_alike(a: Launched, b: Launched, given: list[Tensor]) -> None:
    """Configuration, numbers and tensors of the user are the same; other tensors have the same layout."""
    assert a.config == b.config
    assert a.arguments.numbers == b.arguments.numbers
    memory = {x.data_ptr() for x in given}
    for (name, _, x), (_, _, y) in zip(*(described_tensors(z.arguments) for z in (a, b)), strict=True):
        assert isinstance(x, Tensor) == isinstance(y, Tensor), name
        if isinstance(x, Tensor):
            assert looks([x]) == looks([y]), name
            assert x.data_ptr() == y.data_ptr() or not {x.data_ptr(), y.data_ptr()} & memory, name


@full_and_causal
@with_and_without_dlse
@pytest.mark.parametrize("precise", [False, True], ids=["", "precise"])
@pytest.mark.parametrize(("name", "inputs"), CALLS.items(), ids=CALLS)
def test_repeated_calls_are_launched_like_others(
    name: str,
    inputs: AttentionInputs,
    precise: bool,
    with_dlse: bool,
    window_right: int | None,
    launches: list[Launched],
) -> None:
    backend, spec = backend_for(inputs, window_right, precise)
    results = backend.forward(spec, inputs)
    forward = backend.forward_for(spec, inputs)
    assert isinstance(forward, RepeatedForward) == (name in REPEATED)
    assert looks(results) == looks(forward(inputs))
    dlse, dout = torch.randn(inputs.lse_shape) if with_dlse else None, torch.randn_like(results.out)
    sink = inputs.learnable_sink is not None
    call = BackwardCall(spec, inputs, results.out, results.lse, dout, dlse, results.residual, False, sink)
    grads = backend.backward(call)
    backward = backend.backward_for(call)
    # Offsets of queries and keys differ in all packed calls here.
    is_split = inputs.packed and window_right is not None
    assert isinstance(backward, RepeatedBackward) == (name in REPEATED and not is_split)
    assert looks(grads) == looks(backward(call))
    given = [x for x in inputs[:10] if x is not None]
    assert_launched_alike(launches[0], launches[1], given)
    given += [x for x in (results.out, results.lse, results.residual, dout, dlse) if x is not None]
    assert_launched_alike(launches[2], launches[3], given)


@full_and_causal
@pytest.mark.parametrize("name", sorted(REPEATED))
def test_the_backward_kernel_is_known_ahead(
    name: str, window_right: int | None, launches: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that another process may compile it: only where there will be gradients."""
    known: list[Any] = []

    def beside(needed_next: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
        known.append(needed_next())
        return contextlib.nullcontext()

    monkeypatch.setattr(cache, "compiling_beside", beside)
    inputs = CALLS[name]
    backend, spec = backend_for(inputs, window_right)
    backend.forward_for(spec, inputs)
    assert not known
    backend.forward_for(spec, inputs._replace(k=inputs.k.detach().requires_grad_()))
    both_passes(inputs, window_right)
    assert known == [launches[-1].config]


@pytest.mark.usefixtures("launches")
def test_split_sequences_that_look_like_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks do not say whether offsets of queries and keys are the same memory: the general pass serves those."""
    cu = ints(0, 70, 140)
    inputs = inputs_of((140, 8, 64), *[(140, 2, 64)] * 2, cu_seqlens_q=cu, cu_seqlens_k=cu)
    backend, spec = backend_for(inputs, 0)
    out, lse, *_ = backend.forward(spec, inputs)
    call = BackwardCall(spec, inputs, out, lse, torch.randn_like(out))
    backward = backend.backward_for(call)
    assert isinstance(backward, RepeatedBackward)
    general: list[BackwardCall] = []
    monkeypatch.setattr(backward, "_general", general.append)
    backward(call)
    assert not general
    backward(call._replace(inputs=inputs._replace(cu_seqlens_k=cu.clone())))
    assert len(general) == 1


def test_repeated_calls_look_at_addresses(launches: list[Launched]) -> None:
    """Tensors that begin between 16 bytes are copied, though they look like others that do not."""
    inputs = CALLS["dense"]
    backend, spec = backend_for(inputs)

    def moved(x: Tensor) -> Tensor:
        y = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
        assert y.data_ptr() % 16
        return y

    others = inputs._replace(q=moved(inputs.q), k=moved(inputs.k), v=moved(inputs.v))
    out, lse, *_ = backend.forward_for(spec, inputs)(others)
    dout = torch.randn_like(out.normal_())
    backward = backend.backward_for(BackwardCall(spec, inputs, out, lse, dout))
    backward(BackwardCall(spec, others, moved(out), lse, moved(dout)))
    first, second = (launched.arguments for launched in launches)
    for x, y in zip((*first[:3], *second[:3], second.mO, second.mdO), (*inputs[:3] * 2, out, dout), strict=True):
        assert x.data_ptr() % 16 == 0
        assert torch.equal(x, y)


BIASES = {
    "own": ((2, 8, 70, 90), {}, ["backward"]),
    "batch": ((8, 70, 90), {}, ["backward", "bias_gradient"]),
    "heads": ((2, 1, 70, 90), {}, ["backward", "bias_gradient"]),
    "float32": ((2, 8, 70, 90), {"dtype": torch.float32}, ["backward", "bias_gradient"]),
    "padded": ((2, 8, 70, 90), {"seqused_k": ints(90, 3)}, ["backward"]),
    "padded, batch": ((8, 70, 90), {"seqused_q": ints(70, 3)}, ["backward", "bias_gradient"]),
    "odd": ((2, 8, 70, 90), {"mask": (2, 1, 1, 90)}, ["backward"]),
    "row": ((8, 1, 90), {}, ["backward", "bias_gradient"]),
    "number": ((), {}, ["backward", "bias_gradient"]),
}


@pytest.mark.parametrize(("shape", "others", "passes"), BIASES.values(), ids=BIASES)
def test_gradient_of_a_bias(
    shape: tuple[int, ...], others: dict[str, Any], passes: list[str], launches: list[Launched]
) -> None:
    """Where each score has an element the backward kernel writes it."""
    mask = torch.ones(others.pop("mask"), dtype=torch.bool) if "mask" in others else None
    bias = torch.randn(shape, dtype=others.pop("dtype", torch.bfloat16))
    inputs = inputs_of(*DENSE, mask=mask, bias=bias, **others)
    dbias = gradient_of_the_bias(inputs)
    assert [launched.config.pass_name for launched in launches] == passes
    arguments = launches[-1].arguments
    assert arguments.mdBias.data_ptr() == dbias.data_ptr()
    assert arguments.mBias.data_ptr() == bias.data_ptr()
    assert arguments.mBias.shape == (2, 8, 70, 90)
    if mask is not None:
        assert arguments.mMask.data_ptr() == mask.data_ptr()
    if passes[-1] == "bias_gradient":
        numbers = arguments.numbers
        sizes = [1] * (4 - bias.ndim) + list(shape)
        assert [numbers.sums_batch, numbers.sums_queries, numbers.sums_keys] == [sizes[i] == 1 for i in (0, 2, 3)]
        padded = not others.keys().isdisjoint({"seqused_q", "seqused_k"})
        assert (numbers.entries, numbers.sequences_an_entry) == ((2, 1) if padded else (0, 0))


def test_what_no_kernel_writes_of_a_gradient_is_zero(launches: list[Launched]) -> None:
    """Padded sequences have elements in which the backward kernel never comes."""
    bias = torch.randn(2, 8, 70, 96, dtype=torch.bfloat16)
    dbias = gradient_of_the_bias(inputs_of(*DENSE, bias=bias, seqused_q=ints(70, 3)))
    assert launches[0].config.features.tiled_bias
    assert not dbias.any()


SHARED = {
    "own": ((2, 8, 70, 96), None, ("dbias", True)),
    "batch": ((8, 70, 96), None, ("dbias", True)),
    "heads": ((2, 1, 70, 96), None, ("dbias", True)),
    "batch, causal": ((8, 70, 96), 0, ("bias_gradient", True)),  # where the window hides scores, none would be written
    "odd rows": ((8, 70, 92), None, ("bias_gradient", False)),
    "queries": ((8, 1, 96), 0, ("dbias_of_keys", False)),
    "all but keys": ((92,), None, ("dbias_of_keys", False)),
    "keys": ((8, 70, 1), None, ("bias_gradient", False)),
    "number": ((), None, ("bias_gradient", False)),
}


@pytest.mark.parametrize(("shape", "right", "expected"), SHARED.values(), ids=SHARED)
def test_what_a_gradient_is_summed_from(
    shape: tuple[int, ...], right: int | None, expected: tuple[str, bool], launches: list[Launched]
) -> None:
    """The backward kernel writes a gradient for every score or every key, or the gradient's own kernel follows."""
    keys = shape[-1] if shape and shape[-1] > 1 else 96
    bias = torch.randn(shape, dtype=torch.bfloat16)
    inputs = inputs_of((2, 70, 8, 64), *[(2, keys, 8, 64)] * 2, bias=bias)
    gradient_of_the_bias(inputs, right)
    by, tiled = expected
    features = launches[0].config.features
    assert (features.dbias, features.dbias_of_keys) == (by == "dbias", by == "dbias_of_keys")
    assert features.tiled_bias == tiled
    assert [launched.config.pass_name for launched in launches[1:]] == ["bias_gradient"] * (by == "bias_gradient")


def test_sums_of_stored_gradients(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored gradients are summed in float32 over all that shares the bias; more than 2 GiB are not stored."""
    monkeypatch.setattr(cute_backend, "_room_for_gradient", lambda _, inputs: torch.full_like(inputs.bias, 1 + 2**-7))
    bias = torch.zeros(70, 96, dtype=torch.bfloat16)
    inputs = inputs_of((3, 70, 8, 64), *[(3, 96, 8, 64)] * 2, bias=bias)
    dbias = gradient_of_the_bias(inputs)
    assert torch.equal(dbias, torch.full_like(bias, 24 * (1 + 2**-7)))
    monkeypatch.setattr(plan, "_BYTES_OF_GRADIENTS", 2 * 24 * 70 * 96 - 1)
    gradient_of_the_bias(inputs)
    assert [launched.config.pass_name for launched in launches] == ["backward", "backward", "bias_gradient"]


def test_gradient_of_a_bias_of_queries_that_see_nothing(launches: list[Launched]) -> None:
    """More queries than keys under a causal mask: each entry is packed as two sequences, and so are its slots."""
    bias = torch.randn(8, 90, 70, dtype=torch.bfloat16)
    inputs = inputs_of((2, 90, 8, 64), *[(2, 70, 2, 64)] * 2, bias=bias)
    dbias = gradient_of_the_bias(inputs, 0)
    arguments = launches[-1].arguments
    assert arguments.mdBias.data_ptr() == dbias.data_ptr()
    numbers = arguments.numbers
    assert (numbers.entries, numbers.sequences_an_entry, numbers.rows_a_slot) == (2, 2, 90)
    assert arguments.mCuSeqlensQ.tolist() == [0, 20, 90, 110, 180]


@pytest.mark.parametrize(
    ("layout", "strided", "paired", "uniform"),
    [
        (lambda x: x, False, True, False),
        (lambda x: x.mT.contiguous().mT, True, False, False),
        (lambda x: x[..., 1:], False, False, False),  # odd addresses
        (lambda x: x[..., 1:, :-1], False, False, False),  # odd rows
        (lambda x: x[:1, :, :1], False, False, True),  # rows behind the only one are odd
        (lambda x: x[..., :1].expand(-1, -1, -1, 90), True, False, False),
    ],
    ids=["contiguous", "transposed", "address", "rows", "one row", "expanded"],
)
def test_layout_of_a_bias(
    layout: Callable[[Tensor], Tensor], strided: bool, paired: bool, uniform: bool, launches: list[Launched]
) -> None:
    odd = paired is False and not strided
    whole = torch.ones(2, 8, 71, 91 if odd else 90, dtype=torch.bfloat16)
    bias = layout(whole)[..., :70, :]
    keys = bias.shape[-1]
    inputs = inputs_of(DENSE[0], *[(2, keys, 2, 64)] * 2, bias=bias)
    backend, spec = backend_for(inputs)
    backend.forward(spec, inputs)
    features = launches[0].config.features
    assert (features.strided_bias, features.paired_bias, features.uniform_bias) == (strided, paired, uniform)
    assert launches[0].arguments.mBias.data_ptr() == bias.data_ptr()


@pytest.mark.parametrize(
    ("shape", "lists"),
    [((), 1), ((300,), 1), ((2, 1, 1, 300), 2), ((8, 1, 300), 8), ((300, 300), 1), ((2, 8, 300, 300), 16)],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_lists_of_a_mask(shape: tuple[int, ...], lists: int, causal: bool, launches: list[Launched]) -> None:
    """A mask has a list for each entry, head and tile of queries that attend differently; under a window all do."""
    mask = torch.ones(shape, dtype=torch.bool)
    inputs = inputs_of((2, 300, 8, 64), *[(2, 300, 2, 64)] * 2, mask=mask)
    both_passes(inputs, 0 if causal else None)
    assert len(launches) == 2
    for launched in launches:
        numbers, features = launched.arguments.numbers, launched.config.features
        rows = 300 if causal or (mask.ndim > 1 and mask.shape[-2] > 1) else 1
        tiles = -(-rows // launched.config.mask_tile.queries)
        assert numbers.lists_batch * numbers.lists_heads * numbers.lists_tiles == lists * tiles
        assert not features.right
        assert features.uniform_mask == (launched.config.pass_name == "forward" and rows == 1)
        assert launched.arguments.mMask.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize(("queries", "has_bias", "tiles"), [(100, True, 2), (128, True, 1), (100, False, 1)])
def test_last_queries_have_lists_of_their_own(
    queries: int, has_bias: bool, tiles: int, launches: list[Launched]
) -> None:
    """In the backward pass, beside a bias: rows behind them have to be hidden, of which no bias is in shared memory."""
    bias = torch.randn(8, queries, 90, dtype=torch.bfloat16) if has_bias else None
    mask = torch.ones(2, 1, 1, 90, dtype=torch.bool)
    both_passes(inputs_of((2, queries, 8, 128), *[(2, 90, 2, 128)] * 2, mask=mask, bias=bias))
    forward, backward = (launched.arguments.numbers for launched in launches[:2])
    assert (forward.lists_batch, forward.lists_tiles) == (2, 1)
    assert (backward.lists_batch, backward.lists_tiles) == (2, tiles)


MASK = torch.ones(2, 1, 70, 92, dtype=torch.bool)
EXPLAINED = {name: inputs for name, inputs in CALLS.items() if inputs.block_mask is None} | {
    "mask": inputs_of(*DENSE, mask=MASK[..., :90]),
    "mask from an odd element on": inputs_of(*DENSE, mask=MASK[..., 1:91]),
    "transposed mask": inputs_of(*DENSE, mask=torch.ones(90, 70, dtype=torch.bool).t()),
    "mask and padding": inputs_of(*DENSE, mask=MASK[:, :, :1, :90], seqused_k=ints(90, 0)),
    "float32 bias": inputs_of(*PACKED, **OFFSETS, bias=torch.zeros(8, 1, 180), max_seqlen_k=180),
    "its gradient": inputs_of(*PACKED, **OFFSETS, bias=torch.zeros(8, 1, 180).requires_grad_(), max_seqlen_k=180),
    "a gradient that the backward kernel writes": inputs_of(
        *DENSE, bias=torch.zeros(2, 8, 70, 90, dtype=torch.bfloat16).requires_grad_()
    ),
    "no keys": inputs_of(*PACKED, cu_seqlens_q=ints(0, 140), cu_seqlens_k=ints(0, 0))._replace(
        k=torch.zeros(0, 2, 64, dtype=torch.bfloat16), v=torch.zeros(0, 2, 64, dtype=torch.bfloat16), max_seqlen_k=0
    ),
    "no sequences": inputs_of(*PACKED, cu_seqlens_q=ints(0), cu_seqlens_k=ints(0)),
    "fewer keys": inputs_of((2, 140, 8, 64), *[(2, 90, 2, 64)] * 2),
    "wide": inputs_of((2, 70, 8, 256), *[(2, 90, 4, 256)] * 2),
}


@full_and_causal
@pytest.mark.parametrize("inputs", EXPLAINED.values(), ids=EXPLAINED)
def test_what_is_explained_is_what_is_launched(
    inputs: AttentionInputs, window_right: int | None, launches: list[Launched]
) -> None:
    packed = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, inputs.max_seqlen_k)
    explained = explain(
        *inputs[:3],
        *(packed if inputs.packed else ()),
        seqused_q=inputs.seqused_q,
        seqused_k=inputs.seqused_k,
        learnable_sink=inputs.learnable_sink,
        mask=inputs.mask,
        bias=inputs.bias,
        causal=window_right == 0,
        gpu="sm90",
    )
    assert_launched_as_explained(explained, inputs, window_right, launches)


def assert_launched_as_explained(
    explained: Explanation, inputs: AttentionInputs, window_right: int | None, launches: list[Launched]
) -> None:
    both_passes(inputs, window_right, dbias=inputs.bias is not None and inputs.bias.requires_grad)
    assert explained.backend == "sm90"
    planned_passes = [planned for planned in (explained.forward, explained.backward) if planned is not None]
    of_both = [launched for launched in launches if launched.config.pass_name != "bias_gradient"]
    for planned, launched in zip(planned_passes, of_both, strict=True):
        assert planned.config == launched.config
        assert planned.numbers == launched.arguments.numbers
        assert planned.persistent == hasattr(launched.arguments.mNextTile, "shape")
    if explained.backward is not None:
        assert explained.backward.workspace_bytes == launches[1].arguments.mWorkspace.numel()


@pytest.mark.parametrize("sets", [(1, 1), (2, 1), (1, 2), (2, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_block_masks_are_launched_as_explained(sets: tuple[int, int], head_dim: int, launches: list[Launched]) -> None:
    """With room for their bits, whatever the kernel's tiles are."""
    q, k, v = inputs_of((2, 70, 8, head_dim), *[(2, 290, 2, head_dim)] * 2)[:3]
    blocks = torch.rand(*sets, 1, 3) < 0.7
    mask = BlockMask.from_blocks(blocks, seqlen_q=70, seqlen_k=290).with_order("spt", group=4 if sets[1] == 8 else 1)
    tables = mask.tables(q.device, backward=True)
    inputs = inputs_of(q.shape, k.shape, v.shape, block_mask=tables)
    assert_launched_as_explained(explain(q, k, v, block_mask=mask, gpu="sm90"), inputs, None, launches)
    for launched in launches:
        assert launched.arguments.blocks.mBits.numel() == max(1, len(tables.rows.tiles)) * 512
    assert launches[1].arguments.numbers.lists_group == 8 // sets[1]


def test_tables_too_large_are_refused(monkeypatch: pytest.MonkeyPatch, launches: list[Launched]) -> None:
    monkeypatch.setattr("flash_attn_cute.backends.cute.block_arguments._MAX_TABLE", 512)
    with pytest.raises(ValueError, match="block_mask: expected fewer than"):
        both_passes(inputs_of(*DENSE, **causal(70, 90)))


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("is_moved", [False, True], ids=["strided", "moved"])
@pytest.mark.parametrize("name", ["dense", "packed", "padded"])
def test_saved_tensors_may_have_any_layout(
    name: str, is_moved: bool, is_repeated: bool, launches: list[Launched]
) -> None:
    """Hooks of saved tensors return what they like; kernels get what compiled code takes, with the same elements."""
    inputs = CALLS[name]
    backend, spec = backend_for(inputs, precise=True)
    out, lse, _, residual = backend.forward(spec, inputs)
    assert residual is not None
    residual.copy_(torch.randint_like(residual, 100))
    out.normal_()
    lse.normal_()
    call = BackwardCall(spec, inputs, out, lse, torch.randn_like(out), None, residual)
    saved: dict[str, Any] = {name: layout(x, is_moved) for name, x in inputs._asdict().items() if isinstance(x, Tensor)}
    out, lse, residual = (layout(x, is_moved) for x in (out, lse, residual))
    others = call._replace(inputs=inputs._replace(**saved), out=out, lse=lse, residual=residual)
    backward = backend.backward_for(call if is_moved else others) if is_repeated else backend.backward
    launches.clear()
    backend.backward(call)
    backward(others)
    (config, expected), (_, given) = launches
    for name, argument, x in described_tensors(given):
        y, align = getattr(expected, name, None), argument.align
        if (
            isinstance(x, Tensor)
            and isinstance(y, Tensor)
            and name not in ("mdQ", "mdK", "mdV", "mWorkspace", "mNextTile")
        ):
            assert torch.equal(x, y), name
            assert x.stride(-1) == 1, name
            assert not align or x.data_ptr() % align == 0, name
            assert all(step * x.element_size() % (align or 1) == 0 for step in x.stride()[:-1]), name
    assert config.features.residual


def layout(x: Tensor, is_moved: bool) -> Tensor:
    """A copy with elements between its own, or at an address that is a multiple of an element's size alone."""
    if is_moved:
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x)
    return strided(x)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_no_keys(packed: bool, launches: list[Launched]) -> None:
    """No backward kernel: zeros, and for a sink the gradients of lse of the queries that are real."""
    sink = torch.tensor([1.0, -2.0])
    if packed:
        inputs = inputs_of((5, 2, 64), (0, 2, 64), (0, 2, 64), cu_seqlens_q=ints(0, 3), cu_seqlens_k=ints(0, 0))
        lse = torch.tensor([[1.0, 1, 1, -torch.inf, -torch.inf], [-2.0, -2, -2, -torch.inf, -torch.inf]])
        expected = [3.0, 6.0]
    else:
        inputs = inputs_of((1, 5, 2, 64), (1, 0, 2, 64), (1, 0, 2, 64))
        lse = sink[:, None].expand(2, 5)[None]
        expected = [5.0, 10.0]
    inputs = inputs._replace(learnable_sink=sink)
    dlse = torch.tensor([1.0, 2.0])[:, None].expand(2, 5).clone()
    dlse = dlse if packed else dlse[None]
    dlse[lse.isneginf()] = torch.nan
    dout = torch.full_like(inputs.q, torch.nan)
    backend, spec = backend_for(inputs)
    grads = backend.backward(BackwardCall(spec, inputs, dout, lse, dout, dlse, need_dsink=True))
    assert not launches
    assert all((x == 0).all() for x in grads[:3])
    assert grads.dsink is not None
    assert grads.dsink.tolist() == expected
