"""How DTensors are sharded over attention: by batch entries or by heads, without communication.

The operators of ``ops`` have these rules as soon as this is imported. Other placements, such as rows in shards, are
redistributed first, to whichever of the two takes the least communication.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from flash_attn_cute.calls import dispatch
from flash_attn_cute.calls.torch_modes import is_transformed
from flash_attn_cute.problem.block_tables import BlockTables
from flash_attn_cute.problem.spec import AttentionInputs, check_plain

_BATCH, _HEADS = 0, 1  # the two dimensions that can be sharded
# Where they are in tensors of dense batches, and in those of packed sequences.
_DIMS: dict[str, tuple[tuple[int | None, int | None], tuple[int | None, int | None]]] = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "residual"), ((0, 2), (None, 1))),
    **dict.fromkeys(("lse", "dlse", "sums"), ((0, 1), (None, 0))),
    **dict.fromkeys(("seqused_q", "seqused_k"), ((0, None), (None, None))),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ((None, None), (None, None))),
    "learnable_sink": ((None, 0), (None, 0)),
}
# Where they are in what may have one of size 1 for all, or none: masks and biases, counted from the back, and the
# tables of a block mask, whose entries and tiles all ranks need.
_BROADCAST: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("mask", "bias"), (-4, -3)),
    **dict.fromkeys(("row_spans", "contributors", "order", "selected"), (0, 1)),
    **dict.fromkeys(("real_q", "real_k"), (0, None)),
    "column_spans": (1, 2),
    **dict.fromkeys(("row_entries", "tiles", "column_entries"), (None, None)),
}
_GRADIENTS = ("q", "k", "v", "bias", "learnable_sink")


def alike(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs of which all tensors are DTensors if q is one; those that were none are the same on every rank.

    Offsets and lengths, masks, biases and the tables of block masks are often made by each rank for itself.
    """
    q = _untransformed(inputs.q)
    for name, x in inputs._asdict().items():
        if isinstance(x, Tensor):
            check_beside("block_mask" if name == "selected" else name, x, q, is_shared=name not in ("k", "v"))
    if not isinstance(q, DTensor):
        return inputs

    def replicated(x: Any) -> Any:
        return beside(x, q) if isinstance(x, Tensor) else x

    tables = inputs.block_mask
    if tables is not None:
        real = () if tables.real is None else tuple(map(replicated, tables.real))
        tables = BlockTables.of_flat(tuple(map(replicated, tables.flat())), real)
    others = {name: replicated(x) for name, x in inputs._asdict().items() if name not in ("k", "v", "block_mask")}
    return inputs._replace(**others, block_mask=tables)


def beside(x: Tensor, q: Tensor) -> Tensor:
    """The tensor as a DTensor if q is one, where every rank has the same one."""
    q = _untransformed(q)
    if not isinstance(q, DTensor) or isinstance(_untransformed(x), DTensor):
        return x
    mesh = q.device_mesh
    # A transform would look for a derivative of what makes it a DTensor.
    with temporarily_clear_interpreter_stack() if is_transformed() else nullcontext():
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def check_beside(name: str, x: Tensor, q: Tensor, *, is_shared: bool = False) -> None:
    """Checks that a tensor is a DTensor if q is one, and only then, or raises TypeError.

    If ``is_shared``, it may be a plain tensor that is the same on every rank, but none of a transform of torch.func.
    """
    x, given, q = _untransformed(x), x, _untransformed(q)
    if not isinstance(q, DTensor):
        check_plain(name, x, ", as q is one")
    elif not (isinstance(x, DTensor) or (is_shared and x is given)):
        raise TypeError(
            f"{name}: expected a DTensor, as q is one, got a plain tensor; "
            "DTensor.from_local makes one, ahead of transforms of torch.func"
        )


def _untransformed(x: Tensor) -> Tensor:
    """Takes off what transforms of torch.func have wrapped a tensor in.

    Dynamo cannot read that, and shows a DTensor for what it is.
    """
    while not torch.compiler.is_dynamo_compiling() and is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _register(operator: Any, results: Callable[[dict[str, Any], int | None], list[Any]]) -> None:
    """Registers the acceptable ways to shard an operator over one dimension of a mesh.

    Args:
        operator: the operator.
        results: the placements of its results, from its arguments by name and what is sharded.
    """
    names = [argument.name for argument in operator._schema.arguments]

    def ways(*given: Any) -> list[tuple[list[Any], list[Any]]]:
        arguments = dict(zip(names, given, strict=True))
        tensors = {name: x for name, x in arguments.items() if hasattr(x, "placements")}
        return [
            (
                results(arguments, axis),
                [_placement(name, tensors, axis) if name in tensors else None for name in names],
            )
            for axis in _axes(tensors)
        ]

    register_sharding(operator)(ways)


def _forward(arguments: dict[str, Any], axis: int | None) -> list[Any]:
    max_logits: Any = Replicate()
    if arguments["max_logits"] and axis is not None:
        max_logits = Shard(0) if axis == _HEADS else Partial("max")
    keeps = arguments["precise_gradients"] and dispatch.BACKENDS[arguments["backend"]].has_residual
    residual = _placement("residual", arguments, axis) if keeps else Replicate()
    return [*(_placement(name, arguments, axis) for name in ("out", "lse")), max_logits, residual]


def _backward(arguments: dict[str, Any], axis: int | None) -> list[Any]:
    needed = {**arguments, "need_dq": True, "need_dk": True, "need_dv": True}
    placements = []
    for name in _GRADIENTS:
        is_needed = needed["need_dsink" if name == "learnable_sink" else f"need_d{name}"]
        placement = _placement(name, arguments, axis) if is_needed else Replicate()
        # What every rank reads has a part of its gradient from each.
        is_shared = is_needed and axis is not None and placement == Replicate()
        placements.append(Partial() if is_shared else placement)
    return placements


def _column_sums(arguments: dict[str, Any], axis: int | None) -> list[Any]:
    return [_placement("sums", arguments, axis)]


def _axes(tensors: dict[str, Any]) -> list[int | None]:
    """Dimensions that can be sharded; None, for none, is first, as PyTorch takes the first of equally good ways."""
    axes: list[int | None] = [None]
    if not all(name in _DIMS or name in _BROADCAST for name in tensors):
        return axes
    if "cu_seqlens_q" not in tensors:
        axes.append(_BATCH)
    # Ranks need whole groups of heads, whatever dimensions of the mesh PyTorch chooses to divide heads among. It does
    # not choose one on which all tensors are replicated, or sharded by entries of the batch.
    ranks = 1
    for dim, size in enumerate(tensors["q"].mesh.shape):
        stays = (x.placements[dim] in (Replicate(), _placement(name, tensors, _BATCH)) for name, x in tensors.items())
        ranks *= 1 if all(stays) else size
    if tensors["k"].shape[-2] % ranks == 0:
        axes.append(_HEADS)
    return axes


def _placement(name: str, tensors: dict[str, Any], axis: int | None) -> Any:
    """Where a tensor has entries of the batch, or heads."""
    if axis is None:
        return Replicate()
    is_packed = tensors.get("cu_seqlens_q") is not None
    if name in _BROADCAST:
        x, dim = tensors[name], _BROADCAST[name][axis]
        if dim is not None and dim < 0:
            dim = dim + x.ndim if dim + x.ndim >= 0 else None
        if dim is not None and (x.shape[dim] == 1 or (is_packed and axis == _BATCH)):
            dim = None
    else:
        dim = _DIMS[name][is_packed][axis]
    return Replicate() if dim is None else Shard(dim)


_register(torch.ops.flash_attn_cute.forward.default, _forward)
_register(torch.ops.flash_attn_cute.backward.default, _backward)
_register(torch.ops.flash_attn_cute.column_sums.default, _column_sums)
