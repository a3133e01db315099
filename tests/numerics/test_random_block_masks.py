"""Fuzz: any block mask beside any mixture of features, dense and packed, against the oracle."""

import random
import time
from dataclasses import replace
from typing import Any

import torch

from tests.lib import checks
from tests.lib.checks import assert_matches_oracle, random_call
from tests.lib.masks import random_mask

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200, 257, 300)


def random_options(rng: random.Random) -> dict[str, Any]:
    nheads_k, group = rng.randint(1, 2), rng.randint(1, 3)
    flags = [None, (1, 1, 1), (1, 0, 1), (1, 1), (0,)]
    return {
        "nheads": nheads_k * group,
        "nheads_k": nheads_k,
        "head_dim": rng.choice([1, 8, 24]),
        "head_dim_v": rng.choice([None, 16]),
        "dtype": rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        "causal": rng.random() < 0.3,
        "window_size": (rng.choice([None, None, 0, 90]), rng.choice([None, None, 3, 150])),
        "softcap": rng.choice([0.0, 0.0, 2.0]),
        "sink": rng.random() < 0.3,
        "mask": rng.choice(flags),
        "bias": rng.choice(flags),
        "seqused": rng.random() < 0.4,
        "packed": rng.random() < 0.5,
    }


def check(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    options = random_options(rng)
    batch = rng.randint(1, 3)
    if options["packed"] or options["seqused"]:
        lengths_q, lengths_k = ([rng.choice(LENGTHS) for _ in range(batch)] for _ in range(2))
    else:
        lengths_q, lengths_k = [rng.choice(LENGTHS)] * batch, [rng.choice(LENGTHS)] * batch
    call = random_call(lengths_q, lengths_k, **options)
    sets = (1 if options["packed"] else batch, rng.choice([options["nheads"], options["nheads_k"]]))
    mask, shown = random_mask(call.q.shape[-3], call.k.shape[-3], rng, sets)
    assert_matches_oracle(replace(call, block_mask=mask, shown=shown), through_lse=rng.random() < 0.5)


def test_random_block_masks(fuzz_seconds: float) -> None:
    first, start, cases = checks.fuzz_seed << 20, time.monotonic(), 0
    while time.monotonic() < start + 2 * fuzz_seconds or cases < 6:  # a busy machine may be slow
        try:
            check(first + cases)
        except Exception as error:
            raise AssertionError(f"check({first + cases}) fails after {cases} others: {error}") from error
        cases += 1
