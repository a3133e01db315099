"""Whether all ranks ask for the same: one error on every rank, and no rank that waits for another in vain."""

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup

from flash_attn_cute.distributed.process_groups import Ranks, size_of

# Everything on which ranks have to agree, in words; or what is wrong with a rank's own arguments.
Statement = Mapping[str, str] | TypeError | ValueError


def check(ranks: Ranks, statement: Statement) -> None:
    """Compares the statements of all ranks, which all have to come here; it costs a collective and a wait.

    Args:
        ranks: the grid of the group, the same whatever method a rank asks for.
        statement: of this rank.

    Raises:
        TypeError: what a rank has stated; likewise ValueError.
        ValueError: ranks disagree.
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


def _gathered(x: object, group: ProcessGroup | None) -> list:  # type: ignore[type-arg]
    if group is None:
        return [x]
    found = [None] * size_of(group)
    dist.all_gather_object(found, x, group=group)
    return found


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
