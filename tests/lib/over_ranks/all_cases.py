"""All cases, layouts and methods."""

import random
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flash_attn_cute.distributed import Sharding, rank_of
from tests.lib.over_ranks.cases import WAYS, Case, Leaves, alone, assert_same, cases, expected_here, shardings, together


def every_case() -> None:
    """All cases, layouts and methods, on the ranks that there are; on four and more a layout a case, by turns."""
    num_ranks = dist.get_world_size()
    draw = random.Random(num_ranks)
    meshes = [init_device_mesh("cpu", (n, num_ranks // n)) for n in range(2, num_ranks) if num_ranks % n == 0]
    checked = 0
    for number, case in enumerate(cases(draw)):
        torch.manual_seed(num_ranks)
        leaves = Leaves.of(case)
        everything = alone(case, leaves)
        layouts = list(shardings(case, draw, num_ranks))
        for layout, sharding, sharding_k in layouts if num_ranks < 4 else layouts[number % 3 :][:1]:
            ways: list[dict[str, Any]] = [{"method": "all_gather"}, {"method": "ring"}]
            if layout == "balanced":
                ways += [{"method": "auto"}, *({"method": "auto", "group": mesh} for mesh in meshes)]
            if layout == "random":
                ways += [{"method": "all_to_all"}, *({**way, "group": mesh} for way in ways[:2] for mesh in meshes)]
            for way in ways:
                if not refusal(case, num_ranks, way):
                    got = together(case, leaves, sharding, sharding_k, **way)
                    expected = expected_here(case, everything, sharding, sharding_k, rank_of(way.get("group")))
                    assert_same(got, expected, (case, layout, way))
                    checked += 1
    assert checked > (100 if num_ranks < 4 else 30)


def layers_of_several_windows() -> None:
    """One layout, in balance under each window, serves them all."""
    num_ranks, documents = dist.get_world_size(), [70, 3, 230, 0, 41]
    windows = [(16, 0), (None, 0), (50, 7)]
    sharding = Sharding.balanced([0, *accumulate(documents)], num_ranks, window_sizes=windows, total=350)
    for window in windows:
        case = Case(documents, documents, {"window_size": window}, sink=True, through_lse=True, padding=6)
        leaves = Leaves.of(case)
        everything = alone(case, leaves)
        for way in (*WAYS, {"method": "auto"}):
            if not refusal(case, num_ranks, way):
                got = together(case, leaves, sharding, None, **way)
                expected = expected_here(case, everything, sharding, None, dist.get_rank())
                assert_same(got, expected, (case, way))


def refusal(case: Case, num_ranks: int, way: dict[str, Any]) -> bool:
    """Whether ranks cannot trade rows for heads."""
    size = num_ranks if way["method"] == "all_to_all" else way["group"].size(1) if "group" in way else 1
    return case.nheads % size != 0 or (case.nheads_k % size != 0 and size % case.nheads_k != 0)
