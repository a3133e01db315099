"""Which cases of a test a plain ``pytest`` runs; the others wait for CI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

# The files of all tests that a run has collected, among which its option -m then chooses.
COLLECTED = pytest.StashKey[set[Path]]()


def tiered(cases: Mapping[str, Any], *quick: str, values: bool = False) -> list[Any]:
    """Parameters of a test; all but the quick ones are marked ``slow``.

    Args:
        cases: cases by name.
        quick: names of the cases that a plain ``pytest`` runs.
        values: the test gets the cases themselves, not their names.
    """
    unknown = set(quick) - cases.keys()
    if unknown:
        raise ValueError(f"quick: expected names of cases, got {sorted(unknown)}")
    return [
        pytest.param(case if values else name, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, case in cases.items()
    ]
