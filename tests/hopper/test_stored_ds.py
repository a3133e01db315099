"""Backward passes of Hopper that store dS, executed on the CPU by the interpreter of PTX."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.backends.cute import plan
from flash_attn_cute.backends.cute.backend import Launch
from flash_attn_cute.kernels.sm90.backward.backward_config import BackwardStoredDSConfig
from flash_attn_cute.problem import block_tables
from tests.lib.checks import Case, random_call
from tests.lib.interpreted.backward import Interpreted, check
from tests.lib.interpreted.common import H100
from tests.lib.masks import spread
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

# Queries, keys, batch entries, and options of a call.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "plain": (130, 130, 1, {}),
    "late-loads": (200, 300, 1, {"lagging": "loads"}),
    "late-stores": (200, 200, 1, {"lagging": "stores"}),
    "late-products": (300, 200, 1, {"lagging": "warpgroups"}),
    "d104": (200, 200, 1, {"head_dim": 104, "dtype": torch.float16}),
    "dv64": (192, 200, 1, {"head_dim_v": 64}),
    "lse": (192, 200, 1, {"through_lse": True}),
    "softcap-sink": (130, 200, 1, {"nheads": 2, "nheads_k": 1, "softcap": 5.0, "sink": True}),
    "order": (200, 200, 1, {"order": "spt"}),
    "nothing": (70, 130, 1, {"share": 0.0}),
    # Of blocks of 128 deterministic passes store dS, too.
    "of-128": (200, 300, 1, {"size": 128}),
    "of-100-causal": (230, 230, 1, {"size": 100, "causal": True, "softcap": 5.0}),
}


def call_of(
    queries: int,
    keys: int,
    batch: int,
    options: Case,
    change: Callable[[torch.Tensor], object] = lambda visible: None,
) -> Call:
    """A call whose mask shows some blocks of ``size``, 64 x 64 by default; ``change`` may change which."""
    defaults: dict[str, Any] = {"dtype": torch.bfloat16, "nheads": 1, "head_dim": 128}
    options = defaults | options
    size = options.pop("size", 64)
    visible = torch.rand(batch, options["nheads"], -(-queries // size), -(-keys // size)) < options.pop("share", 0.4)
    change(visible)
    mask = BlockMask.from_blocks(visible, size, seqlen_q=queries, seqlen_k=keys)
    shown = spread(visible, size, size, queries, keys)
    if options.pop("causal", False):
        mask = mask & BlockMask.causal(queries, keys)
        shown = shown & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if "order" in options:
        mask = mask.with_order(options.pop("order"))
    call = random_call([queries] * batch, [keys] * batch, packed=False, **options)
    return dataclasses.replace(call, block_mask=mask, shown=shown)


class Stored(Interpreted):
    """The interpreted backend, of which each pass stores dS."""

    def prepare(self, *given: Any) -> Launch:
        """Plans, and looks at the plan."""
        launch = super().prepare(*given)
        assert isinstance(launch.plan.config, BackwardStoredDSConfig)
        return launch


@pytest.mark.parametrize("case", tiered(CASES, "plain", rare=["d104", "lse", "of-100-causal"]))
def test_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tables, "_TENTHS_STORED", 10)
    queries, keys, batch, options = CASES[case]
    options = dict(options)
    lagging, through_lse = options.pop("lagging", None), options.pop("through_lse", False)
    lags = None if lagging is None else frozenset({lagging})
    deterministic = options.get("size", 64) != 64
    interpreted = Stored(random.Random(0), capability=H100, lagging=lags, deterministic=deterministic)
    check(call_of(queries, keys, batch, options), interpreted, through_lse=through_lse)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "cells"), [pytest.param(64, 0, marks=pytest.mark.rare), (128, 0), (128, 1 << 17)])
def test_fields_of_a_step_stay_until_it_is_stored(head_dim: int, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far loads and products are ahead: with as many steps of a tile as they can be, and more."""
    monkeypatch.setattr(plan, "_CELLS", cells)
    call = call_of(450, 70, 1, {"head_dim": head_dim, "share": 1.1})
    check(call, Interpreted(random.Random(0), capability=H100, lagging=frozenset({"stores"})))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "nheads", "nheads_k", "share"),
    [
        (2, 4, 2, 0.7),
        (1, 7, 7, 1.0),  # all cells of all chunks are used: the last head would begin one more
    ],
)
def test_chunks_of_heads(batch: int, nheads: int, nheads_k: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all of dS has room, heads come in chunks; some may be empty, and the last head sees nothing."""
    monkeypatch.setattr(plan, "_CELLS", 50)
    interpreted, chunks = Interpreted(random.Random(0), capability=H100), []
    prepare = interpreted.prepare

    def noted(*given: Any) -> Any:
        launch = prepare(*given)
        assert isinstance(launch.plan.config, BackwardStoredDSConfig)
        chunks.append(launch.plan.numbers.num_chunks)
        return launch

    interpreted.launch_of = noted  # type: ignore[assignment]
    options = {"nheads": nheads, "nheads_k": nheads_k, "share": share}
    check(call_of(200, 130, batch, options, lambda visible: visible[-1, -1].fill_(False)), interpreted)
    assert chunks[0] > 1


@pytest.mark.slow
def test_same_bits() -> None:
    """Whatever the order in which warps run, and however many CTAs there are."""
    call = call_of(200, 200, 1, {"nheads": 2})
    found = []
    for num_ctas in (1, 3):
        torch.manual_seed(0)  # of dout
        found.append(check(call, Interpreted(random.Random(num_ctas), num_ctas, capability=H100)))
    assert all(torch.equal(found[1][name], x) for name, x in found[0].items())
