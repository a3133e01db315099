"""The ranks that share an attention, and how rows travel between them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# Nothing here, in plans or in graphs keeps a group: Gloo's may abort the process if they are still there at its end.
_connected: WeakSet[ProcessGroup] = WeakSet()

# A user's argument for the ranks; None: all of them.
Group = ProcessGroup | DeviceMesh | None


class Ranks(NamedTuple):
    """A grid of ranks: rows of documents are dealt over both dimensions, heads are exchanged within the second one.

    Either is None if it has one rank. Rank (i, j) is number ``i * inner_size + j`` of a sharding.
    """

    outer: ProcessGroup | None
    inner: ProcessGroup | None

    @classmethod
    def of(cls, group: Group) -> "Ranks":
        """The grid of a group: one-dimensional, unless it is a two-dimensional mesh. Errors are ``dimensions``'s."""
        return cls.over(dimensions(group))

    @classmethod
    def over(cls, groups: Sequence[ProcessGroup], *, by_heads: bool = False) -> "Ranks":
        """The grid of a group's one or two dimensions; ``by_heads``: one is the second of the grid, not the first."""
        used = [group if dist.get_world_size(group) > 1 else None for group in groups]
        if len(used) == 2:
            return cls(*used)
        return cls(None, used[0]) if by_heads else cls(used[0], None)

    @property
    def place(self) -> "Place":
        """The place of this process in the grid."""
        return Place(
            rank_in(self.outer) * size_of(self.inner) + rank_in(self.inner), size_of(self.outer), size_of(self.inner)
        )


class Place(NamedTuple):
    """A rank of a grid: everything of the grid that a plan depends on."""

    rank: int
    outer_size: int
    inner_size: int

    @property
    def size(self) -> int:
        """All ranks."""
        return self.outer_size * self.inner_size


def dimensions(group: Group, name: str = "group") -> tuple[ProcessGroup, ...]:
    """One process group, or those of a mesh's two dimensions; ``name`` is that of the user's argument.

    Raises:
        TypeError: neither a process group nor a mesh.
        ValueError: a mesh of more than two dimensions, or one of two that is out of order, or a group that this process
            is not in.
    """
    given: Any = group
    found: list[Any]
    if isinstance(given, DeviceMesh):
        if given.ndim > 2:
            raise ValueError(f"{name}: expected a mesh of one or two dimensions, got {given.ndim}")
        coordinate = given.get_coordinate()
        found = [None] if coordinate is None else [given.get_group(dim) for dim in range(given.ndim)]
        # Each group numbers its processes in ascending order: in others, two processes would be one rank of the grid.
        if given.ndim == 2 and coordinate is not None and [*coordinate] != [dist.get_rank(x) for x in found]:
            raise ValueError(
                f"{name}: expected a mesh of two dimensions to have its processes in ascending order along each, "
                f"got {given.mesh.tolist()}"
            )
    elif given is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to processes that it leaves out
        found = [None]
    elif given is None or isinstance(given, ProcessGroup):
        found = [dist.group.WORLD if given is None else given]
    else:
        raise TypeError(f"{name}: expected a ProcessGroup, a DeviceMesh or None, got {type(given).__name__}")
    for member in found:
        if member is None or dist.get_rank(member) < 0:
            got = (
                "one without it" if dist.is_initialized() else "none: torch.distributed.init_process_group comes first"
            )
            raise ValueError(f"{name}: expected one that this process is in, got {got}")
    return tuple(found)


@torch.compiler.assume_constant_result  # a program that is compiled for one group has a guard on it
def names_of(group: Group) -> list[str]:
    """The names of a group's dimensions in PyTorch's registry of groups. Errors are those of ``dimensions``."""
    return [member.group_name for member in dimensions(group)]


def named(names: Sequence[str]) -> tuple[ProcessGroup, ...]:
    """The dimensions of a group from their names."""
    return tuple(c10d._resolve_process_group(name) for name in names)  # type: ignore[attr-defined,arg-type]


def size_of(group: ProcessGroup | None) -> int:
    """Ranks of a group."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank in a group."""
    return 0 if group is None else dist.get_rank(group)


def weakly(group: ProcessGroup | None) -> Callable[[], ProcessGroup | None]:
    """A function that returns the group while a user holds it, and raises RuntimeError afterwards."""
    if group is None:
        return lambda: None
    reference = ref(group)

    def get() -> ProcessGroup:
        found = reference()
        if found is None:
            raise RuntimeError("the process group of this attention has been destroyed before its backward pass")
        return found

    return get


def connect(group: ProcessGroup | None, device: torch.device) -> None:
    """Runs a first collective over all ranks, which NCCL requires; later messages may leave out some."""
    if group is not None and device.type == "cuda" and group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


def all_gather_rows(x: Tensor, rows: Sequence[int], group: ProcessGroup | None) -> list[Tensor]:
    """The tensors of all ranks of a group, rank s having ``rows[s]`` rows in dimension 0."""
    if group is None:
        return [x]
    # Backends want tensors of one size.
    padded = x.new_zeros((max(rows), *x.shape[1:]))
    padded[: x.shape[0]] = x
    received = [torch.empty_like(padded) for _ in rows]
    # As bytes, since backends lack some dtypes.
    dist.all_gather([r.view(torch.uint8) for r in received], padded.view(torch.uint8), group=group)
    return [r[:n] for r, n in zip(received, rows, strict=True)]


def maximum(x: Tensor, groups: Sequence[ProcessGroup | None]) -> Tensor:
    """The elements' maxima over the ranks of some groups, in x's memory."""
    for group in groups:
        if group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


class Transfer:
    """Messages on their way; none of their tensors may be touched before ``wait``.

    On CUDA they run on the group's own stream, behind what was launched before them and beside what comes after, and
    waiting makes the current stream wait, not the host.
    """

    def __init__(
        self, group: ProcessGroup | None, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Sends tensors to ranks of the group and receives tensors from such, all at once; empty ones do not travel."""
        operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives if x.numel()]
        self._works = dist.batch_isend_irecv(operations) if operations else []
        self._tensors = [operation.tensor for operation in operations]

    def wait(self) -> None:
        """Waits until all messages have arrived."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []
