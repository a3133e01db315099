"""Which cases of a test a plain ``pytest`` runs, which wait for CI, and which for a run of all."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lib.configurations import DESCRIBED

# The files of all tests that a run has collected, among which its option -m then chooses.
COLLECTED = pytest.StashKey[set[Path]]()


RARE = pytest.mark.slow, pytest.mark.rare


def tiered(cases: Mapping[str, Any], *quick: str, rare: Collection[str] = (), values: bool = False) -> list[Any]:
    """Parameters of a test; all but the quick ones are marked ``slow``.

    Args:
        cases: cases by name.
        quick: names of the cases that a plain ``pytest`` runs.
        rare: names of those that CI does not run either, as it has each of their features, and each of their edges, in
            another case.
        values: the test gets the cases themselves, not their names.
    """
    unknown = {*quick, *rare} - cases.keys()
    if unknown:
        raise ValueError(f"quick, rare: expected names of cases, got {sorted(unknown)}")
    marks = dict.fromkeys(cases, (pytest.mark.slow,)) | dict.fromkeys(rare, RARE) | dict.fromkeys(quick, ())
    return [pytest.param(case if values else name, id=name, marks=marks[name]) for name, case in cases.items()]


def compiled(
    config: pytest.Config,
    cases: Mapping[str, Any],
    *quick: str,
    few: Mapping[str, Any] | None = None,
    shared: Collection[str] = (),
) -> list[Any]:
    """Parameters of a test that compiles kernels: all with ``--all-configurations``, else a covering of few.

    It begins with configurations that are compiled for their schedules, or for interpreted calls, too.

    Args:
        config: of the run.
        cases: configurations of kernels, by name.
        quick: names of those that a plain ``pytest`` compiles.
        few: those of which CI takes a covering; all by default.
        shared: names of those that interpreted calls compile anyway.
    """
    if config.getoption("--all-configurations"):
        return tiered(cases, *quick, values=True)
    few, described = few or cases, set(DESCRIBED.values())
    first = [name for name, c in few.items() if name in quick or name in shared or c in described]
    return tiered(covering(few, first), *quick, values=True)


def covering(cases: Mapping[str, Any], first: Iterable[str] = ()) -> dict[str, Any]:
    """Few configurations that have all values of each size of tiles, and of each feature, that the given ones have.

    Args:
        cases: configurations of kernels, by name.
        first: names of those that are wanted in any case.
    """
    facts = {name: _facts(c) for name, c in cases.items()}
    chosen = list(first)
    missing = set().union(*facts.values()).difference(*(facts[name] for name in chosen))
    while missing:
        chosen.append(max(facts, key=lambda name: len(facts[name] & missing)))
        missing -= facts[chosen[-1]]
    return {name: c for name, c in cases.items() if name in chosen}


def _facts(config: Any) -> set[Any]:
    """Each feature of a configuration, and each other field, with its value."""
    fields = dataclasses.asdict(config)
    features = fields.pop("features")
    return {(type(config), *fact) for fact in (*features.items(), *fields.items())}
