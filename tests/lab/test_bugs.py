"""Bugs planted in the Blackwell and Hopper kernels are found, each by what the tables of ``lab.bugs`` say."""

import dataclasses
import functools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.backends.cute.plan import Shapes, plan_backward
from flash_attn_cute.backends.cute.score_layout import score_layout
from flash_attn_cute.backends.packing import over_scores
from flash_attn_cute.kernels.registry import pass_of
from lab.bugs import ALL, IMPLIED, PAGE, TABLES, Bug, Bugs, Code, LeftOut, find, page, waits
from lab.interpreter import FaultError, Lagging, Program, scheduling
from lab.lint import check, lint
from lab.ptx import tree
from tests.lib import masks
from tests.lib.compiled import code_for
from tests.lib.configurations import bias_gradient, chosen, forward_paired, paired
from tests.lib.interpreted import backward, common, forward
from tests.lib.interpreted.backward import Interpreted, execute
from tests.lib.interpreted.bias_gradient import WithGradient, check_dbias
from tests.lib.interpreted.common import B200, H100, dense
from tests.lib.oracle import Call
from tests.lib.tiers import tiered

SEEDS = 16  # schedules, at most, under which a bug is to show


def rising(lengths_q: list[int], lengths_k: list[int], **options: Any) -> Call:
    """A call whose blocks of keys, worked on from the last to the first, have larger scores each time."""
    call = dense(lengths_q, lengths_k, **options)()
    with torch.no_grad():
        call.q[:, ::3] *= 8
        call.k *= torch.linspace(4, 0.1, call.k.shape[1], dtype=call.k.dtype)[:, None, None]
    return call


def plain(lengths_q: list[int], lengths_k: list[int], **options: Any) -> Call:
    return dense(lengths_q, lengths_k, **{"nheads": 1, **options})()


def listed(visible: list[list[int]], **options: Any) -> Call:
    """Under a block mask: of each 128 queries, which blocks of 128 keys they see some keys of."""
    shown = torch.tensor(visible, dtype=torch.bool).repeat_interleave(128, 0).repeat_interleave(128, 1)
    shown[:, 5::7] = False
    call = plain([shown.shape[0]], [shown.shape[1]], **options)
    return dataclasses.replace(call, block_mask=BlockMask.from_dense(shown), shown=shown[None, None])


def listed_causal(queries: int, keys: int) -> Call:
    shown = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return dataclasses.replace(
        plain([queries], [keys]), block_mask=masks.listed(BlockMask.causal(queries, keys)), shown=shown[None, None]
    )


Calls = dict[str, Callable[[], Call]]  # as small as what they show allows


class Forward:
    """The forward kernel; one CTA, or a pair, has all tiles."""

    def __init__(self, bugs: Bugs, calls: Calls, kernel: str = "ForwardSm100", capability: tuple[int, int] = B200):
        self.bugs, self.calls, self.kernel, self.capability = bugs, calls, kernel, capability
        self.by_pairs = kernel == "ForwardPair"

    def configuration(self, call: Call) -> Any:
        """Configuration of a call's kernel."""
        config = forward.planned(call, self.capability)[0]
        return forward_paired(config) if self.by_pairs else config

    def check(self, name: str, call: Call, draw: random.Random, program: Program, lags: Lagging) -> None:
        """The results of a call."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward, "NUM_SMS", 1 + self.by_pairs)
            patch.setattr(scheduling, "_MOST_ROUNDS", 5_000)  # twice what any call takes without a bug
            forward.check(call, draw, program, lags, by_pairs=self.by_pairs, capability=self.capability)


class Backward:
    """A backward kernel; one CTA, or a pair, has all tiles, but where turns are what matters."""

    def __init__(self, bugs: Bugs, calls: Calls, kernel: str, capability: tuple[int, int] = B200):
        self.bugs, self.calls, self.kernel, self.capability = bugs, calls, kernel, capability
        self.by_pairs = kernel.startswith("BackwardPair")

    def configuration(self, call: Call) -> Any:
        """Configuration of a call's kernel."""
        inputs, spec = common.as_given(call)
        layout = score_layout(over_scores(inputs), inputs.bias)
        shapes = Shapes(call.q.shape, call.k.shape, 0, call.q.shape[-3], scores=layout)
        config = plan_backward(common.architecture_of(self.capability), spec, shapes, 1).config
        return paired(config) if self.by_pairs else config

    def check(self, name: str, call: Call, draw: random.Random, program: Program, lags: Lagging) -> None:
        """The results of a call."""
        num_ctas = (1 + self.by_pairs) * (1 + (name == "turns"))
        backend = Interpreted(draw, num_ctas, program, lags, by_pairs=self.by_pairs, capability=self.capability)
        backward.check(call, backend)


class BiasGradient:
    """The kernel of a bias's gradient, alone; a CTA for each tile."""

    kernel = "BiasGradient"

    def __init__(self, bugs: Bugs, calls: Calls):
        self.bugs, self.calls = bugs, calls

    def configuration(self, call: Call) -> Any:
        """Configuration of a call's kernel."""
        backend = WithGradient(random.Random(0), num_sms=1, is_alone=True)
        backend.launches = False
        execute(call, backend, torch.zeros(call.q.shape[:-1]).mT.contiguous(), torch.zeros_like(call.v), None)
        (plan,) = backend.plans
        return plan.config

    def check(self, name: str, call: Call, draw: random.Random, program: Program, lags: Lagging) -> None:
        """The results of a call."""
        check_dbias(call, WithGradient(draw, 1, program, lags, is_alone=True))


of_d128, of_d256 = functools.partial(plain, head_dim=128), functools.partial(plain, head_dim=256)
of_d192 = functools.partial(plain, head_dim=192, head_dim_v=128)
KERNELS: dict[str, Forward | Backward | BiasGradient] = {
    "forward": Forward(
        TABLES["forward"],
        {
            "d64": lambda: rising([130], [200], head_dim=64, nheads=2),
            "one": lambda: rising([130], [100], head_dim=64, nheads=1),
            "short": lambda: rising([130], [100], head_dim=64, nheads=4),  # tiles of one block
            "long": lambda: plain([130], [600]),  # more blocks than stages
            "packed": lambda: plain([130, 20], [130, 300], packed=True),
            "d128": lambda: rising([130], [100], head_dim=128, nheads=1),
            "d192": lambda: rising([130], [100], head_dim=192, head_dim_v=128, nheads=2),
            "d256": lambda: rising([128], [260], head_dim=256, nheads=2),
            "bias": lambda: plain([100], [130], bias=(1, 1)),
        },
    ),
    "masks": Forward(
        TABLES["masks"],
        {
            "lists": lambda: listed([[1, 0, 1], [0, 1, 1]]),
            "many": lambda: listed([[1, 0] * 5, [0, 1] * 5]),  # more blocks than stages of entries
            "blind": lambda: listed([[1, 1], [0, 0]]),
        },
    ),
    "forward pairs": Forward(
        TABLES["forward pairs"],
        {
            "d256": lambda: of_d256([150], [100]),
            "rising": lambda: rising([150], [260], head_dim=256, nheads=2),
            "blocks": lambda: of_d256([150], [500]),  # more blocks than stages
            "tiles": lambda: of_d256([150], [100], nheads=4),  # more tiles than stages
        },
        "ForwardPair",
    ),
    "backward": Backward(
        TABLES["backward"],
        {
            "d64": lambda: plain([130], [100]),
            "steps": lambda: plain([600], [100]),  # more blocks of queries than stages
            "tiles": lambda: plain([130], [600]),  # more tiles of keys than stages
            "turns": lambda: plain([130], [300]),
            "causal": lambda: plain([130], [130], causal=True),
            "d128": lambda: of_d128([300], [100]),
            "d128-tiles": lambda: of_d128([130], [300]),
            "bias": lambda: plain([100], [100], bias=(1, 1)),
        },
        "BackwardCta",
    ),
    "backward under masks": Backward(
        TABLES["backward under masks"],
        {
            "lists": lambda: listed([[1, 0, 1], [0, 1, 1]]),
            "turns": lambda: listed([[1, 1, 1], [0, 1, 1]]),
            "many": lambda: listed([[1]] * 10),  # more blocks of queries than stages of entries
            "causal": lambda: listed_causal(150, 130),  # in each half of a block something else is hidden
        },
        "BackwardCta",
    ),
    "pairs": Backward(
        TABLES["pairs"],
        {
            "one": lambda: of_d128([100], [140]),
            "d128": lambda: of_d128([130], [140]),
            "steps": lambda: of_d128([300], [140]),
            "tiles": lambda: of_d128([20], [700]),  # more tiles of keys than stages
        },
        "BackwardPair",
    ),
    "wide pairs": Backward(
        TABLES["wide pairs"],
        {
            "one": lambda: of_d192([50], [140]),
            "two": lambda: of_d192([70], [140]),
            "steps": lambda: of_d192([150], [140]),
            "tiles": lambda: of_d192([50], [300]),
        },
        "BackwardPair",
    ),
    "two passes": Backward(
        TABLES["two passes"],
        {
            "one": lambda: of_d256([60], [64]),  # a block of queries; dK and dV have rows enough for a narrow bound
            "d256": lambda: of_d256([70], [60]),
            "steps": lambda: of_d256([150], [60]),
            "tiles": lambda: of_d256([60], [150]),
            "lists": lambda: listed([[1, 1]], head_dim=256),
            "many": lambda: listed([[1, 1, 1]], head_dim=256),  # more steps than stages of entries
        },
        "BackwardTwoPass",
    ),
    "pairs in two passes": Backward(
        TABLES["pairs in two passes"],
        {
            "one": lambda: of_d256([50], [140]),
            "two": lambda: of_d256([70], [140]),
            "steps": lambda: of_d256([150], [140]),
            "tiles": lambda: of_d256([50], [300]),
        },
        "BackwardPairTwoPass",
    ),
    "bias": BiasGradient(
        TABLES["bias"],
        {
            "one": lambda: plain([100], [100], nheads=2, bias=(1, 1)),
            "several": lambda: plain([100], [100], nheads=6, bias=(1, 1)),  # more pieces than stages
            "unseen": lambda: plain([150], [150], bias=(1,), causal=True),  # with a piece that is fully masked
            "number": lambda: plain([100], [100], bias=()),
        },
    ),
    "Hopper forward": Forward(
        TABLES["Hopper forward"],
        {
            "long": lambda: plain([130], [700]),  # more blocks than stages
            "tiles": lambda: plain([130], [100], nheads=3),
            "bias": lambda: plain([130], [600], bias=(1, 1)),
        },
        "ForwardSm90",
        H100,
    ),
    "Hopper backward": Backward(
        TABLES["Hopper backward"],
        {
            "steps": lambda: plain([300], [100]),  # more blocks of queries than stages
            "many": lambda: of_d128([330], [100]),  # more than additions that wait to be signalled
            "turns": lambda: plain([130], [300]),
        },
        "BackwardCtaSm90",
        H100,
    ),
    "Hopper clusters": Backward(
        TABLES["Hopper clusters"],
        {"steps": lambda: of_d256([200], [100])},
        "BackwardClusterSm90",
        H100,
    ),
}
PLANTED = [
    (name, kind, bug._replace(call=bug.call or next(iter(kernel.calls))))
    for name, kernel in KERNELS.items()
    for kind, bugs in kernel.bugs.items()
    for bug in bugs
]
# Kernels that a kernel is as but for what it has bugs of its own of.
BASES = {
    "masks": ("forward",),
    "forward pairs": ("forward",),
    "backward under masks": ("backward",),
    "pairs": ("backward",),
    "wide pairs": ("backward", "pairs"),
    "two passes": ("backward", "backward under masks"),
    "pairs in two passes": ("backward", "pairs"),
}
# Bugs that ordinary runs show the lint, or execute if it finds none: the first of each kind, and for each rule, among
# kernels with one base.
SHOWN = list(
    {(BASES.get(kernel, (kernel,))[0], kind, bug.lint): bug for kernel, kind, bug in reversed(PLANTED)}.values()
)
# Calls that are executed with them, and the first of each kernel; the others are rare, and so are other bugs of theirs.
CALLS = {f"{kernel}-{name}": (kernel, name) for kernel in KERNELS for name in KERNELS[kernel].calls}
_EXECUTED = {f"{kernel}-{bug.call}" for kernel, _, bug in PLANTED if bug in SHOWN and not bug.lint}
_FIRST = {f"{kernel}-{next(iter(KERNELS[kernel].calls))}" for kernel in KERNELS}
RARE = CALLS.keys() - _EXECUTED - _FIRST
BUGS = {f"{kernel}: {kind}: {bug.text}": (kernel, bug) for kernel, kind, bug in PLANTED}
_RARE_BUGS = {name for name, (kernel, bug) in BUGS.items() if bug not in SHOWN and f"{kernel}-{bug.call}" in RARE}


@functools.cache
def call_of(kernel: str, name: str) -> Call:
    torch.manual_seed(0)
    return KERNELS[kernel].calls[name]()


@functools.cache
def code(kernel: str, config: Any) -> Code:
    """A kernel's code in a configuration."""
    return Code(code_for(config).ptx, KERNELS[kernel].kernel, pass_of(config).schedule(config))


def code_of(kernel: str, name: str) -> Code:
    """Code of the kernel that a call takes."""
    return code(kernel, KERNELS[kernel].configuration(call_of(kernel, name)))


def lagging(kernel: str, bug: Bug) -> Lagging:
    return bug.lagging(code_of(kernel, bug.call).schedule)


findings = functools.cache(lint)  # of several calls a kernel is the same


def ends_well(kernel: str, name: str, program: Program, seed: int, lags: Lagging) -> bool:
    try:
        KERNELS[kernel].check(name, call_of(kernel, name), random.Random(seed), program, lags)
    except (FaultError, AssertionError):
        return False
    return True


@pytest.mark.parametrize("case", tiered(BUGS, rare=_RARE_BUGS, values=True))
def test_planted(case: tuple[str, Bug], all_bugs: bool) -> None:
    """Each bug can be planted. One of ``SHOWN`` is shown to the lint, up to the expected finding, or executed."""
    kernel, bug = case
    assert bug.lint or bug.shows
    text = code_of(kernel, bug.call).changed(bug.plant)
    if bug.lint and (all_bugs or bug in SHOWN):
        (function,) = tree.parse(text).functions
        assert any(finding.rule == bug.lint for finding in check(function))
    if bug.shows and (all_bugs or (bug in SHOWN and not bug.lint)):
        program = Program(text)
        assert not all(ends_well(kernel, bug.call, program, seed, lagging(kernel, bug)) for seed in range(SEEDS))


@pytest.mark.parametrize("case", tiered(CALLS, rare=RARE, values=True))
def test_without_a_bug(case: tuple[str, str], all_bugs: bool) -> None:
    """Without a bug these calls end well, whichever role lags, and the lint finds nothing."""
    kernel, name = case
    text = code_of(kernel, name).text
    assert not findings(text)
    program = Program(text)
    lags = sorted({lagging(each, bug) for each, _, bug in PLANTED if (each, bug.call) == (kernel, name)}, key=str)
    for slow in lags if all_bugs else lags[:1]:
        KERNELS[kernel].check(name, call_of(kernel, name), random.Random(0), program, slow)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if not kernel.startswith("Hopper")])
def test_every_wait_of_a_schedule_is_left_out(kernel: str) -> None:
    """By a bug, or another wait is said to imply it. Hopper's kernels run on GPUs, too, and have fewer bugs."""
    of = KERNELS[kernel]
    configs = (
        {of.configuration(call_of(kernel, name)) for name in of.calls} if kernel != "bias" else {bias_gradient(64)}
    )
    schedules = [pass_of(config).schedule(config) for config in configs]
    explained: set[tuple[str, str]] = set()
    for each in (kernel, *BASES.get(kernel, ())):
        explained |= IMPLIED.get(each, {}).keys()
        for bug in (bug for bugs in TABLES[each].values() for bug in bugs):
            if isinstance(bug.plant, LeftOut) and bug.plant.found.wait is not None:
                role, barrier = bug.plant.found.wait
                explained.add((role.removeprefix("second ").partition(":")[0], barrier.partition("+")[0]))
    described = {
        (step.role, barrier.replace("odd", "even"))  # an adding warp has the one or the other
        for schedule in schedules
        for step in schedule.steps
        for barrier in re.findall(r"\w+\.(?:full|empty)", step.waits)
    }
    assert described <= explained
    assert IMPLIED.get(kernel, {}).keys() <= described


def test_the_tables() -> None:
    """The page counts them as they are here."""
    assert KERNELS.keys() == TABLES.keys()
    for kernel in KERNELS:
        least = 7 if kernel.startswith("Hopper") else 10
        assert len([bug for each, _, bug in PLANTED if each == kernel]) >= least
    assert len({(kernel, bug.text) for kernel, _, bug in PLANTED}) == len(PLANTED)
    assert {bug.lint for bug in SHOWN} == {bug.lint for _, _, bug in PLANTED}, "each rule of the lint is asked"
    old = PAGE.read_text()
    assert page(old, ALL) == old, "python -m lab.bugs writes it"


def test_what_does_not_fit_is_an_error() -> None:
    """A bug is never planted in another place, or in fewer of them, without anyone's notice."""
    forward_code = code("forward", chosen(128, "right"))  # which other tests compile
    with pytest.raises(ValueError, match=r"tcgen05.dealloc .* of mma: expected 2, got those of lines \[\d+\]"):
        forward_code.changed(find("mma", "tcgen05.dealloc", 2).left_out())
    with pytest.raises(ValueError, match=r"expected a wait, got 'mma k\.full'"):
        Bug.no_waits("mma k.full")
    with pytest.raises(ValueError, match="expected 1, got those of lines \\[\\]"):
        forward_code.changed(waits("softmax", "k.full").left_out())
    with pytest.raises(ValueError, match="128 fits 0 times, not once"):
        forward_code.changed(find("mma", "tcgen05.dealloc").rewritten("128", "256"))
