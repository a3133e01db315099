"""Comparison of all ranks' arguments: a mistake raises one error on every rank, and no rank hangs."""

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flash_attn_cute.distributed.checked_call import PlanRequest, RankCall
from flash_attn_cute.distributed.process_groups import Group, Ranks, size_of
from flash_attn_cute.distributed.sharding import Sharding
from flash_attn_cute.problem.spec import Options
from flash_attn_cute.runtime import settings
from flash_attn_cute.sparsity.block_mask import BlockMask

T = TypeVar("T")

# Everything on which ranks have to agree, in words; or what is wrong with a rank's own arguments.
Statement = Mapping[str, str] | TypeError | ValueError


def check(ranks: Ranks, statement: Statement) -> None:
    """Compares the statements of all ranks. All ranks have to call it; it costs a collective and a wait.

    The grid of the ranks is the same whatever method a rank asks for. Raises TypeError or ValueError, as a rank has
    stated it, or ValueError if ranks disagree.
    """
    row = _gathered(statement, ranks.inner)
    statements: list[Statement] = [s for rows in _gathered(row, ranks.outer) for s in rows]
    for rank, stated in enumerate(statements):
        if isinstance(stated, Exception):
            raise type(stated)(f"rank {rank} of the group: {stated}")
    agreed = [s for s in statements if not isinstance(s, Exception)]
    for name in agreed[0]:
        ranks_of: dict[str, list[int]] = {}
        for rank, stated in enumerate(agreed):
            ranks_of.setdefault(stated[name], []).append(rank)
        if len(ranks_of) > 1:
            found = "; ".join(f"{value} on {_listed(found)}" for value, found in ranks_of.items())
            raise ValueError(f"{name}: expected the same on all ranks of the group, got {found}")


def check_if_asked(group: Group | Ranks, stated: Callable[[], Mapping[str, str]]) -> None:
    """``on_all_ranks`` of arguments from which nothing but a statement is found."""
    on_all_ranks(group, stated, lambda statement: statement)


def on_all_ranks(
    group: Group | Ranks, find: Callable[[], T], stated: Callable[[T], Mapping[str, str]] | None = None
) -> T:
    """Finds something by this rank's arguments and, with ``FLASH_ATTN_CUTE_CHECK=1``, has all ranks raise its errors.

    While a program is compiled no ranks are asked: they compare themselves when it runs.

    Args:
        group: a user's argument, or the grid that it is, as in ``check``.
        find: what is called, or raises TypeError or ValueError for this rank's arguments.
        stated: gives this rank's statement by what has been found, for ``check``; None: ranks that find it call that
            later.
    """
    is_asked = not torch.compiler.is_compiling() and settings.check_data()
    try:
        found = find()
        statement = stated(found) if is_asked and stated is not None else None
    except (TypeError, ValueError) as error:
        if is_asked:
            check(_grid(group), error)
        raise
    if statement is not None:
        check(_grid(group), statement)
    return found


def _grid(group: Group | Ranks) -> Ranks:
    return group if isinstance(group, Ranks) else Ranks.of(group)


def layout_of(sharding: Sharding) -> str:
    """Digest of the documents of a sharding, and of who has which of their rows."""
    return f"layout {_digest(repr((sharding.cu_seqlens, sharding.total, sharding.segments)).encode())}"


def _contents_of(mask: BlockMask, device: torch.device) -> str:
    """Sizes of a block mask, and a digest of what it shows; waits for the device."""
    rows = (x.cpu().numpy().tobytes() for x in mask.tables(device, backward=False).rows)
    return f"{tuple(mask.sizes)} with contents {_digest(*rows)}"


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def statement_of(call: RankCall, request: PlanRequest, options: Options, backend: str | None) -> dict[str, str]:
    """Everything on which ranks have to agree, by name."""
    named = {"q": call.q, "k": call.k, "v": call.v, "learnable_sink": call.sink}
    leaves = [name for name, x in named.items() if x is not None and x.requires_grad]
    numbers = options._asdict() | {"deterministic": options.promise, "return_max_logits": options.max_logits}
    del numbers["packing_invariant"], numbers["max_logits"]  # which are not arguments
    return {
        "method": request.method,
        "heads, d and d_v": str(request.shape[:4]),
        "batch": str(request.batch),
        "dtype": str(call.q.dtype),
        "device": call.q.device.type,
        "sink": "None" if call.sink is None else str(call.sink.dtype),
        "sharding": layout_of(request.queries),
        "sharding_k": layout_of(request.keys or request.queries),
        "seqused_q": str(request.seqused_q),
        "seqused_k": str(request.seqused_k),
        **{name: str(value) for name, value in numbers.items()},
        "backend": str(backend),
        "block_mask": "None" if call.block_mask is None else _contents_of(call.block_mask, call.q.device),
        "inputs that require gradients": ", ".join(leaves if torch.is_grad_enabled() else []) or "none",
    }


def _gathered(x: object, group: ProcessGroup | None) -> list:  # type: ignore[type-arg]
    if group is None:
        return [x]
    found = [None] * size_of(group)
    dist.all_gather_object(found, x, group=group)
    return found


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
