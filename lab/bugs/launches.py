"""Bugs of the code that launches kernels, planted in what it launches."""

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lab.interpreter import Launch, address_of

# What is launched, and where tensors are in global memory, by their names, to what a bug launches.
Change = Callable[[list[Launch], Mapping[str, int]], list[Launch]]


class LaunchBug(NamedTuple):
    """A bug of the launching code."""

    text: str  # what is wrong
    call: str  # that shows it, by its name
    change: Change
    lint: str = ""  # which sees none of it
    shows: bool = True


def _changed(kernel: str, change: Callable[[Launch, Mapping[str, int]], Launch]) -> Change:
    """Changes the kernels that have this in their names."""
    return lambda launches, places: [change(x, places) if kernel in x.name else x for x in launches]


def _with(kernel: str, field: str, change: Callable[[Any], Any]) -> Change:
    """Changes a field of a kernel's launch."""
    return _changed(kernel, lambda launch, _: launch._replace(**{field: change(getattr(launch, field))}))


def _fewer_ctas(kernel: str) -> Change:
    return _with(kernel, "grid", lambda grid: (grid[0] - 1, 1, 1))


def _less_shared(kernel: str) -> Change:
    return _with(kernel, "shared", lambda size: size - 1024)


def _alone(kernel: str) -> Change:
    return _with(kernel, "cluster", lambda _: (1, 1, 1))


def _with_param(launch: Launch, number: int, param: bytes) -> Launch:
    assert param != launch.params[number]
    return launch._replace(params=[*launch.params[:number], param, *launch.params[number + 1 :]])


def _maps(launch: Launch) -> list[int]:
    """Which parameters are tensor maps."""
    return [i for i, param in enumerate(launch.params) if len(param) == 128]


def _map(kernel: str, number: int, form: str, at: int, change: Callable[[int], int]) -> Change:
    """A number of a kernel's tensor map, at some byte of it."""

    def with_map(launch: Launch, _: Mapping[str, int]) -> Launch:
        which = _maps(launch)[number]
        made = bytearray(launch.params[which])
        struct.pack_into(form, made, at, change(*struct.unpack_from(form, made, at)))
        return _with_param(launch, which, bytes(made))

    return _changed(kernel, with_map)


def _map_of(kernel: str, number: int, other: int) -> Change:
    """A tensor map in the place of another one."""
    return _changed(
        kernel, lambda launch, _: _with_param(launch, _maps(launch)[number], launch.params[_maps(launch)[other]])
    )


def _in_workspace(kernel: str, number: int, by: int) -> Change:
    """The address of a part of the workspace, by so many bytes further."""

    def with_address(launch: Launch, places: Mapping[str, int]) -> Launch:
        first = address_of(places["mWorkspace"])
        parts = [
            i for i, param in enumerate(launch.params) if len(param) > 16 and first <= _address(param) < first + 2**20
        ]
        param = launch.params[parts[number]]
        return _with_param(launch, parts[number], struct.pack("<Q", _address(param) + by) + param[8:])

    return _changed(kernel, with_address)


def _address(param: bytes) -> int:
    return int.from_bytes(param[:8], "little")


def _without(kernel: str) -> Change:
    return lambda launches, _: [launch for launch in launches if kernel not in launch.name]


def _last(kernel: str) -> Change:
    """A kernel behind all others."""
    return lambda launches, _: sorted(launches, key=lambda launch: kernel in launch.name)


_MAIN, _PAIR, _FORWARD, _FORWARD_PAIR = "BackwardCta", "BackwardPair", "ForwardSm100", "ForwardPair"
_KIND, _STRIDES, _SIZES, _BOX = 8, 12, 32, 55  # of a tensor map: at which byte they are

LAUNCHES: dict[str, tuple[LaunchBug, ...]] = {
    "grid": (
        LaunchBug("preprocessing has a CTA less", "backward", _fewer_ctas("Preprocess")),
        LaunchBug("a CTA has a warp less", "forward", _with(_FORWARD, "block", lambda _: (480, 1, 1))),
    ),
    "cluster": (
        LaunchBug("a pair of the forward pass is launched without its cluster", "forward pair", _alone(_FORWARD_PAIR)),
        LaunchBug("a pair of the backward pass is launched without its cluster", "pair", _alone(_PAIR)),
    ),
    "shared memory": (
        LaunchBug("the forward kernel has 1 KB less", "forward", _less_shared(_FORWARD)),
        LaunchBug("the backward kernel has 1 KB less", "backward", _less_shared(_MAIN)),
    ),
    "tensor map": (
        LaunchBug("boxes of Q have half their rows", "forward", _map(_FORWARD, 0, "<B", _BOX + 1, lambda n: n // 2)),
        LaunchBug("K is not swizzled", "forward", _map(_FORWARD, 1, "<I", _KIND, lambda kind: kind & ~(3 << 13))),
        LaunchBug(
            "rows of K have the stride of rows of another tensor",
            "forward",
            _map(_FORWARD, 1, "<I", _STRIDES, lambda n: n // 2),
        ),
        LaunchBug("K has a row more than there is", "forward", _map(_FORWARD, 1, "<I", _SIZES + 4, lambda n: n + 1)),
        LaunchBug("Q is loaded as dO is", "backward", _map_of(_MAIN, 0, 1)),
    ),
    "workspace": (
        LaunchBug(
            "the backward kernel reads lse and delta 128 bytes further", "backward", _in_workspace(_MAIN, 0, 128)
        ),
        LaunchBug("sums of dQ begin where lse and delta are", "backward", _in_workspace(_MAIN, 1, -512)),
    ),
    "order": (
        LaunchBug("preprocessing comes behind the backward kernel", "backward", _last("Preprocess")),
        LaunchBug("preprocessing is not launched", "backward", _without("Preprocess")),
        LaunchBug("a mask is cut into tiles behind the lists of these", "mask", _last("MaskTiles")),
        LaunchBug("sums of a bias's gradient are not added up", "split bias", _without("add_up")),
    ),
}
