"""Random calls of a backend, both passes against the oracle, for as long as one likes.

Of Blackwell's kernels on a Hopper GPU, with delays of up to 20 us, ten processes for five minutes; of some kinds:

    python -m lab.emulator --jitter-us 20 -- -m tests.lib.random_calls --seconds 300 --processes 10
    python -m lab.emulator --b300 -- -m tests.lib.random_calls --kinds '^d128 .*mask' --calls 50

Of Hopper's own kernels, and of plain PyTorch, anywhere:

    python -m tests.lib.random_calls --backend sm90 --kinds '^d256'
    python -m tests.lib.random_calls --backend portable --longest 300

A kind is a pair of head dimensions and a feature; lengths, heads, strides, scales, dtypes, padding and masks vary. The
padding of q, k, v and of the gradient of out holds NaN and infinities, unwritten memory NaN, and the
padding of results has to be zero. Every seventh call of a kind, the first one among them, asks for determinism, and has
to give the same bits three times, whatever is in the padding of that gradient.

What is drawn follows from seed, kind and number, which a failure prints; delays, and what CTAs run when, do not. In the
end there is a line for each kind; the exit code is 1 if a call failed.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm100.backward.backward_config import backward_config
from flash_attn_cute.kernels.sm100.forward_config import forward_config
from tests.lib.checks import (
    DEVICES,
    LAYOUTS,
    assert_matches_oracle,
    bitwise_equal,
    drawn_call,
    padded_results,
    random_lengths,
)
from tests.lib.masks import with_block_mask
from tests.lib.oracle import Call

Options = dict[str, Any]
Counts = dict[str, list[int]]  # of a kind: calls, those of them that were repeated, those that failed

REPEATED = 7  # one call in so many


def _causal(draw: random.Random) -> Options:
    return {"causal": draw.random() < 0.5}


def _window(draw: random.Random) -> Options:
    return {"window_size": (draw.choice([None, 0, 50, 300, 900]), draw.choice([None, 0, 20, 200]))}


def _softcap(draw: random.Random) -> Options:
    return {"softcap": draw.choice([0.0, 0.0, 3.0, 20.0])} | draw.choice([_causal, _window])(draw)


def tensors(draw: random.Random, *names: str, packed: bool | None = None) -> Options:
    """A mask or a bias of any broadcast shape and strides, or both; packed, they have no dimension of batch entries."""
    packed = draw.random() < 0.5 if packed is None else packed
    options: Options = {"packed": packed, "bias_dtype": draw.choice([None, torch.float32])}
    for name in names:
        options[name] = [draw.choice([0, 1, 1]) for _ in range(draw.randint(0, 3 if packed else 4))]
        options[f"{name}_layout"] = draw.choice(LAYOUTS)
    return options


HEADS: dict[str, Options] = {
    "d32": {"head_dim": 32},
    "d64": {"head_dim": 64},
    "d96": {"head_dim": 96},
    "d128": {"head_dim": 128},
    "d192x128": {"head_dim": 192, "head_dim_v": 128},
    "d192": {"head_dim": 192},
    "d256": {"head_dim": 256},
}
# Options of ``random_call``, and whether there is a block mask.
FEATURES: dict[str, Callable[[random.Random], Options]] = {
    "dense": lambda draw: {"packed": False, "seqused": False},
    "packed": lambda draw: {"packed": True, "seqused": True},
    "causal": lambda draw: {"causal": True},
    "window": _window,
    "gqa": lambda draw: {"nheads": draw.choice([4, 6]), "nheads_k": draw.choice([1, 2])} | _causal(draw),
    "softcap": lambda draw: _softcap(draw) | {"softcap": draw.choice([3.0, 20.0])},
    "sink": lambda draw: {"sink": True} | _causal(draw),
    "mask": lambda draw: tensors(draw, "mask") | _softcap(draw),
    "bias": lambda draw: tensors(draw, "bias") | _softcap(draw),
    "mask, bias": lambda draw: tensors(draw, "mask", "bias") | _softcap(draw),
    "block mask": lambda draw: {"block_mask": True} | _softcap(draw),
    "block mask, bias": lambda draw: (
        {"block_mask": True, "seqused": False, "softcap": draw.choice([0.0, 0.0, 3.0])}
        | tensors(draw, "bias", packed=False)
    ),
}
KINDS = {f"{heads} {feature}": (heads, feature) for heads in HEADS for feature in FEATURES}


def other_kernels_from(options: Options) -> list[int]:
    """The lengths from which on Blackwell has other kernels for such calls, those of pairs of CTAs."""
    left, right = options.get("window_size", (None, None))
    tensors = {name: name in options for name in ("mask", "block_mask", "bias")}
    features = Features(left=left is not None, right=right is not None or options.get("causal", False), **tensors)
    window = None if left is None or right is None else left + right + 1
    d: int = options["head_dim"]
    d_v: int = options.get("head_dim_v") or d

    def kernels(length: int) -> tuple[Any, Any]:
        forward = forward_config("bfloat16", d, d_v, features, queries=length, window=window)
        return forward, backward_config("bfloat16", d, d_v, features, keys=length, window=window)

    return [length for length in (256, 512, 1024, 2048) if kernels(length) != kernels(length - 1)]


def drawn(kind: str, draw: random.Random, device: str, longest: int) -> Call:
    """A call of a kind, every other one long enough for pairs of CTAs, if there are any, or for block lists."""
    heads, feature = KINDS[kind]
    options: Options = {"head_dim_v": draw.choice([None, None, 16])} | HEADS[heads] | FEATURES[feature](draw)
    edges = other_kernels_from(options)
    has_block_mask = options.pop("block_mask", False)
    at_least = draw.choice(edges or [1024 * has_block_mask]) if draw.random() < 0.5 else 0
    if at_least:  # the oracle has all scores of a sequence in memory
        options = {"nheads": 2, "nheads_k": draw.choice([1, 2])} | options

    def lengths(draw: random.Random, batch: int, *, equal: bool) -> tuple[list[int], list[int]]:
        lengths_q, lengths_k = random_lengths(draw, batch, equal=equal)
        if at_least:
            more = [draw.choice([0, 1, 127, 129, draw.randint(0, 300)]) for _ in range(min(batch, 2))]
            lengths_k = [at_least + x for x in (more[:1] * len(more) if equal else more)]
            lengths_q = lengths_q[: len(more)] if draw.random() < 0.3 else lengths_k
        return [min(x, longest) for x in lengths_q], [min(x, longest) for x in lengths_k]

    call = drawn_call(draw, lengths, device=device, **options)
    if has_block_mask and call.q.shape[-3] and call.k.shape[-3]:
        sets = 1 if call.cu_seqlens_q is not None else len(call.q), draw.choice([1, call.q.shape[-2], call.k.shape[-2]])
        call = with_block_mask(call, draw, sets=sets, any_order=True)
    return call


def check(kind: str, number: int, seed: int, backend: str, longest: int) -> None:
    """Runs one call and compares; raises where something is wrong."""
    draw = random.Random(f"{seed} {kind} {number}")
    torch.manual_seed(draw.randrange(2**31))
    call = drawn(kind, draw, DEVICES.get(backend, "cuda"), longest)
    is_repeated = number % REPEATED == 0
    asked: Options = {"backend": backend, "deterministic": is_repeated or draw.random() < 0.5}
    flags = {name: draw.random() < 0.3 for name in ("through_lse", "return_max_logits", "precise_gradients")}
    assert_matches_oracle(call, **flags, **asked)
    if is_repeated:
        first, *others = (padded_results(call, padding, **asked) for padding in (torch.nan, torch.inf, -torch.inf))
        differ = [name for name, x in first.items() if not all(bitwise_equal(x, other[name]) for other in others)]
        assert not differ, f"not the same bits three times: {', '.join(differ)}"


def problem(kind: str, number: int, chosen: argparse.Namespace) -> tuple[str, bool]:
    """Errors of a call or of what emulated kernels did, if anything, and whether the GPU is lost by it."""
    found: list[str] = []
    try:
        check(kind, number, chosen.seed, chosen.backend, chosen.longest)
    except Exception:
        found.append(traceback.format_exc())
    if DEVICES.get(chosen.backend) == "cpu":
        return "\n".join(found), False
    from lab.emulator.mailbox import mailbox

    is_lost = False
    try:
        torch.cuda.synchronize()
    except Exception as error:  # nothing more can run in this process
        is_lost, found = True, [*found, str(error)]
    return "\n".join([*found, *dict.fromkeys(map(str, mailbox().take_faults()))]), is_lost


def run(chosen: argparse.Namespace) -> Counts:
    """The kinds in turn, those calls of them that are this process's, until all are done or the time is over."""
    counts: Counts = {kind: [0, 0, 0] for kind in chosen.kinds}
    stop = time.monotonic() + chosen.seconds
    for turn in itertools.count(chosen.worker or 0, chosen.processes):
        later, which = divmod(turn, len(chosen.kinds))
        if later >= chosen.calls or time.monotonic() > stop:
            break
        kind, number = chosen.kinds[which], chosen.first + later
        wrong, is_lost = problem(kind, number, chosen)
        counts[kind] = sums([counts[kind], [1, number % REPEATED == 0, bool(wrong)]])
        if wrong:
            again = f"--kinds '^{kind}$' --seed {chosen.seed} --first {number} --calls 1 --processes 1"
            print(f"FAILED: {kind}, {number}\n{wrong}\nagain: the same command with {again}", file=sys.stderr)
        if is_lost:
            break
    return counts


def run_by_processes(chosen: argparse.Namespace) -> Counts:
    """Runs calls in many processes, each of which is this one's command, emulation included."""
    command = [*sys.orig_argv, "--seed", str(chosen.seed), "--worker"]
    workers = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(chosen.processes)]
    found: list[Counts] = []
    for i, worker in enumerate(workers):
        lines = worker.communicate()[0].splitlines()
        found.append(json.loads(lines[-1]) if worker.returncode == 0 else {f"exit code {worker.returncode}": [0, 0, 1]})
        print(f"process {i}: {in_words(found[-1].values())}", flush=True)
    return {kind: sums(x[kind] for x in found if kind in x) for kind in dict.fromkeys(itertools.chain(*found))}


def sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """Numbers of calls, of repeated ones and of failures."""
    return list(map(sum, zip(*counts, strict=True)))


def in_words(counts: Iterable[Sequence[int]]) -> str:
    """The sums of counts, in words."""
    return "{} calls, {} three times, {} failed".format(*sums(counts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.lib.random_calls", description=__doc__, formatter_class=style)
    parser.add_argument("--kinds", default="", help=f"a regular expression: {', '.join(HEADS)}; {', '.join(FEATURES)}")
    parser.add_argument("--seconds", type=float, help="how long calls are begun (60, or with --calls without end)")
    parser.add_argument("--calls", type=float, default=math.inf, help="at most so many of each kind")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="(random)")
    parser.add_argument("--first", type=int, default=0, help="the number of each kind's first call")
    parser.add_argument("--processes", type=int, default=1, help="how many share the GPU")
    parser.add_argument("--backend", default="sm100", help="which computes (%(default)s)")
    parser.add_argument("--longest", type=int, default=4096, help="no sequence is longer")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # which of the processes this one is
    chosen = parser.parse_args(arguments)
    chosen.kinds = [kind for kind in KINDS if re.search(chosen.kinds, kind)]
    if not chosen.kinds:
        parser.error(f"--kinds: expected some of {list(KINDS)}")
    if chosen.seconds is None:
        chosen.seconds = 60 if chosen.calls == math.inf else math.inf
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # unwritten memory is NaN
    if chosen.worker is not None:
        torch.set_num_threads(1)
        print(json.dumps(run(chosen)))
        return 0
    print(f"seed {chosen.seed}", flush=True)
    counts = run_by_processes(chosen) if chosen.processes > 1 else run(chosen)
    for kind, those in counts.items():
        print(f"{kind}: {in_words([those])}")
    return int(sum(failed for *_, failed in counts.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
