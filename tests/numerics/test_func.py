"""The transforms of torch.func: gradients and maps against a loop over plain calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch

SIZE = 3
Loss = Callable[..., Tensor]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flash_attn_func(q, k, v, causal=True)
    return out.square().sum()


def with_seqused(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
    out, lse = flash_attn_func(q, k, v, seqused_q=used, seqused_k=used, softcap=2.0, return_lse=True)
    return out.square().sum() + lse.clamp(min=-9).square().sum()


def with_everything(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    out, lse = flash_attn_func(q, k, v, learnable_sink=sink, bias=bias, mask=mask, return_lse=True)
    return out.square().sum() + lse.square().sum()


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out: Tensor = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7)
    return out.square().sum()


def masked(mask: BlockMask) -> Loss:
    """Attention under a block mask, which all slices of a map have in common."""

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, block_mask=mask).square().sum()

    return loss


def qkv(device: str) -> list[Tensor]:
    return [torch.randn(SIZE, 2, 5, heads, 8, device=device) for heads in (4, 2, 2)]


def cases(device: str) -> dict[str, tuple[Loss, list[Tensor]]]:
    """Each function with its arguments, SIZE of each."""
    used = torch.tensor([[5, 2], [0, 5], [3, 4]], dtype=torch.int32, device=device)
    cu = torch.tensor([[0, 3, 10], [0, 5, 10], [0, 4, 9]], dtype=torch.int32, device=device)
    extras = [torch.randn(SIZE, 4, device=device), torch.randn(SIZE, 4, 1, 5, device=device)]
    mask = torch.rand(SIZE, 2, 1, 5, 5, device=device) < 0.7
    selected = torch.randint(-1, 3, (1, 2, 5, 2), device=device)
    return {
        "dense": (dense, qkv(device)),
        "block mask": (masked(BlockMask.from_dense(mask[0, :1, 0]).build()), qkv(device)),
        "block mask of each entry": (masked(BlockMask.from_dense(mask[0]).build()), qkv(device)),
        "selection": (masked(BlockMask.from_selection(selected, block=2, seqlen_k=5)), qkv(device)),
        "seqused": (with_seqused, [*qkv(device), used]),
        "everything": (with_everything, [*qkv(device), *extras, mask]),
        "packed": (packed, [*qkv(device), cu]),
    }


def differentiable(arguments: list[Tensor]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(arguments) if x.is_floating_point())


def plain_grads(loss: Loss, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    arguments = [x.detach().requires_grad_(x.is_floating_point()) for x in arguments]
    return torch.autograd.grad(loss(*arguments), [arguments[i] for i in differentiable(arguments)])


@pytest.mark.parametrize("case", cases("cpu"))
def test_maps_of_nothing(case: str, device: str) -> None:
    """A dimension of size 0 gives results of the same shapes as another one, and gradients."""
    loss, arguments = cases(device)[case]
    empty, wanted = [x[:0] for x in arguments], differentiable(arguments)
    assert torch.vmap(loss)(*empty).shape == (0,)
    for function in (
        torch.vmap(torch.func.grad(loss, wanted)),
        torch.func.grad(lambda *x: torch.vmap(loss)(*x).sum(), wanted),
        lambda *x: plain_grads(lambda *y: torch.vmap(loss)(*y).sum(), list(x)),
    ):
        assert [x.shape for x in function(*empty)] == [empty[i].shape for i in wanted]


@pytest.mark.parametrize("case", cases("cpu"))
def test_grad(case: str, device: str) -> None:
    loss, arguments = cases(device)[case]
    arguments = [x[0] for x in arguments]
    got = torch.func.grad(loss, differentiable(arguments))(*arguments)
    torch.testing.assert_close(got, plain_grads(loss, arguments))


@pytest.mark.parametrize(
    ("case", "unmapped"),
    [(case, i) for case, (_, arguments) in cases("cpu").items() for i in (None, *range(len(arguments)))],
)
def test_maps(case: str, unmapped: int | None, device: str) -> None:
    """Maps the function and its gradient over the first dimension of all arguments, or of all but one."""
    loss, arguments = cases(device)[case]
    in_dims = tuple(None if i == unmapped else 0 for i in range(len(arguments)))
    arguments = [x if dim == 0 else x[0] for x, dim in zip(arguments, in_dims, strict=True)]
    each = [[x[i] if dim == 0 else x for x, dim in zip(arguments, in_dims, strict=True)] for i in range(SIZE)]
    torch.testing.assert_close(torch.vmap(loss, in_dims)(*arguments), torch.stack([loss(*x) for x in each]))
    got = torch.vmap(torch.func.grad(loss, differentiable(arguments)), in_dims)(*arguments)
    expected = zip(*[plain_grads(loss, x) for x in each], strict=True)
    torch.testing.assert_close(got, tuple(torch.stack(x) for x in expected))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes of the portable backend, noted as they run."""
    passes: list[str] = []

    class Counting(PortableBackend):
        def forward(self, *args: Any) -> Any:
            passes.append("forward")
            return super().forward(*args)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            passes.append("backward")
            return super().backward(*args, **kwargs)

    monkeypatch.setitem(dispatch.BACKENDS, "portable", Counting())
    return passes


# Dense batches are mapped at once, all else in a loop.
TIMES = dict.fromkeys(cases("cpu"), SIZE) | {"dense": 1, "seqused": 1}


def test_a_dense_batch_is_mapped_at_once(calls: list[str]) -> None:
    for case, times in TIMES.items():
        loss, arguments = cases("cpu")[case]
        calls.clear()
        torch.vmap(torch.func.grad(loss))(*arguments)
        assert sorted(calls) == ["backward"] * times + ["forward"] * times


def test_any_dimension_and_nested_maps(device: str) -> None:
    q, k, v = (torch.randn(SIZE, 2, 2, 5, 2, 8, device=device) for _ in range(3))
    expected = torch.stack([torch.stack([dense(q[i, j], k[i, j], v[i, j]) for j in range(2)]) for i in range(SIZE)])
    function = torch.vmap(torch.vmap(dense, in_dims=(2, 0, 0)), in_dims=(0, 0, 1))
    torch.testing.assert_close(function(q.movedim(1, 3), k, v.transpose(0, 1)), expected)


def test_jacobian_and_vjp(device: str) -> None:
    q, k, v = (x[0, :1, :2].double() for x in qkv(device))

    def function(q: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v)
        return out

    expected = torch.autograd.functional.jacobian(function, q)
    torch.testing.assert_close(torch.func.jacrev(function)(q), expected)
    pulled: Any = torch.func.vjp(function, q)
    out, pull_back = pulled
    dout = torch.randn_like(out)
    torch.testing.assert_close(pull_back(dout)[0], torch.einsum("bqhd,bqhdxyzw->xyzw", dout, expected))


def test_autograd_outside(device: str) -> None:
    """Leaves that are recorded outside of a map, and a pull-back that is mapped there."""
    leaves = [x.requires_grad_() for x in qkv(device)]
    got = torch.autograd.grad(torch.vmap(dense)(*leaves).sum(), leaves)
    expected = torch.autograd.grad(torch.stack([dense(*x) for x in zip(*leaves, strict=True)]).sum(), leaves)
    torch.testing.assert_close(got, expected)
    out = flash_attn_func(*(x[0] for x in leaves))
    douts = torch.randn(SIZE, *out.shape, device=device)
    (batched,) = torch.autograd.grad(out, leaves[:1], douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, leaves[0], dout, retain_graph=True)[0] for dout in douts]
    torch.testing.assert_close(batched, torch.stack(each))


def test_tracing_a_gradient_finds_both_operators() -> None:
    q, k, v = (x[0] for x in qkv("cpu"))
    graph = make_fx(torch.func.grad(dense, (0, 1, 2)))(q, k, v)
    torch.testing.assert_close(graph(q, k, v), plain_grads(dense, [q, k, v]))
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"flash_attn_cute.forward.default", "flash_attn_cute.backward.default"} <= names


@pytest.mark.parametrize("case", ["dense", "seqused", "everything", "packed"])
def test_compiled_maps(case: str, calls: list[str]) -> None:
    torch._dynamo.reset()
    loss, arguments = cases("cpu")[case]
    compiled = torch.compile(torch.vmap(loss), backend="aot_eager", fullgraph=True)
    got = plain_grads(lambda *x: compiled(*x).sum(), arguments)
    assert sorted(calls) == ["backward"] * TIMES[case] + ["forward"] * TIMES[case]
    torch.testing.assert_close(got, plain_grads(lambda *x: torch.vmap(loss)(*x).sum(), arguments))
    torch.testing.assert_close(compiled(*arguments), torch.vmap(loss)(*arguments))


def test_what_is_missing_is_said_in_a_sentence() -> None:
    q, k, v = (x[0] for x in qkv("cpu"))

    def loss(q: Tensor) -> Tensor:
        return dense(q, k, v)

    def grad_sum(q: Tensor) -> Tensor:
        return torch.func.grad(loss)(q).sum()

    with pytest.raises(NotImplementedError, match=r"^flash_attn_cute: second derivatives of attention are not"):
        torch.func.grad(grad_sum)(q)
    for forward_mode in (torch.func.jacfwd(loss), torch.func.hessian(loss)):
        with pytest.raises(NotImplementedError, match=r"^flash_attn_cute: forward-mode derivatives of attention are"):
            forward_mode(q)
    with pytest.raises(NotImplementedError, match=r"^flash_attn_cute: .* derivatives of attention are not"):
        torch.func.jvp(torch.func.grad(loss), (q,), (q,))
