"""Planted bugs, and the tables of ``docs/blackwell-checks.md``."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flash_attn_cute.kernels.schedule import Schedule
from lab.bugs.code import Change, Found, LeftOut, arrivals, both, commits, find, uncounted, waits, warps_of
from lab.bugs.launches import LaunchBug
from lab.interpreter import Lagging, Name

PAGE = Path(__file__).parents[2] / "docs" / "blackwell-checks.md"
_ENGINES = ("loads", "stores", "products", "arrivals", "warpgroups")
_EACH = slice(None)


class Bug(NamedTuple):
    """A bug, and what finds it. Functions of the class make those that several kernels have."""

    text: str  # what is wrong
    plant: Change
    call: str = ""  # that shows it, by its name; "": the kernel's first
    lags: str = ""  # an engine or a role that is to lag for it to show; "": who arrives where a wait is left out
    lint: str = ""  # the rule that finds it; "": none
    shows: bool = True  # whether the call ends in a fault, in a deadlock or with wrong numbers

    def lagging(self, schedule: Schedule) -> Lagging:
        """Engines and warps that lag, in the kernel of a schedule."""
        if self.lags in _ENGINES:
            return frozenset({self.lags})
        if self.lags:
            rank, warps = warps_of(schedule, self.lags)
            return frozenset(warps if rank is None else ((rank, warp) for warp in warps))
        if not isinstance(self.plant, LeftOut) or self.plant.found.wait is None:
            return frozenset()
        name, side = self.plant.found.wait[1].partition("+")[0].split(".")
        pipeline = schedule.pipeline(name)
        if side == "full" and pipeline.num_bytes:
            return frozenset({"loads"})
        found: set[Name] = set()
        for each in pipeline.full if side == "full" else pipeline.empty:
            role = schedule.role(each.role)
            found |= {"products"} if each == role.commit() else {*role.warps}
        return frozenset(found)

    @staticmethod
    def no_waits(table: str) -> tuple["Bug", ...]:
        """Roles that do not wait for an mbarrier: a line each.

        A line such as "softmax added.full*4[1] in d256, products lag | what is wrong" is about the second of softmax's
        four waits. What follows the barrier's name may be absent: one wait, all of several, the kernel's first call,
        those that arrive there. What is wrong may be in a line of its own, which is indented.
        """
        return tuple(Bug(text, found.left_out(), call, lags) for found, call, lags, text in _waits(table))

    @staticmethod
    def wrong_phases(table: str) -> tuple["Bug", ...]:
        """Roles that wait for an mbarrier's other phase, in lines such as those of ``no_waits``."""
        return tuple(Bug(text, found.flipped("parity"), call, lags) for found, call, lags, text in _waits(table))

    @staticmethod
    def no_arrival(text: str, by: str, barrier: str, call: str = "", *, count: int = 1) -> "Bug":
        """Threads of a warp do not arrive at an mbarrier, in each of ``count`` places."""
        return Bug(text, arrivals(by, barrier, count).left_out(), call, lint="arrivals")

    @staticmethod
    def no_commit(
        text: str, barrier: str, call: str = "", *, count: int = 1, which: int | slice = _EACH, lint: str = ""
    ) -> "Bug":
        """Products do not arrive at an mbarrier when they are done, in some or each of ``count`` places."""
        return Bug(f"{text}: there is no commit", commits(barrier, count)[which].left_out(), call, lint=lint)

    @staticmethod
    def all_arrive(text: str, by: str, barrier: str, call: str = "") -> "Bug":
        """All threads of a warp arrive at an mbarrier, not the elected one alone."""
        return Bug(text, arrivals(by, barrier).ahead("bra").left_out(), call, lint="arrivals")

    @staticmethod
    def counted_short(text: str, barrier: str, number: int, call: str = "", lags: str = "") -> "Bug":
        """An mbarrier counts so many arrivals too few."""
        return Bug(text, uncounted(barrier, number), call, lags, lint="arrivals")

    @staticmethod
    def no_fence_before(between: str, arrival: Found, call: str = "") -> "Bug":
        """No fence of tensor memory ahead of an arrival."""
        left_out = arrival.ahead("tcgen05.fence::before").left_out()
        text = f"no tcgen05.fence::before_thread_sync between {between}"
        return Bug(text, left_out, call, lint="fence-before", shows=False)

    @staticmethod
    def no_fence_after(between: str, wait: Found, call: str = "") -> "Bug":
        """No fence of tensor memory behind a wait."""
        left_out = wait.behind("tcgen05.fence::after").left_out()
        text = f"no tcgen05.fence::after_thread_sync between {between}"
        return Bug(text, left_out, call, lint="fence-after", shows=False)

    @staticmethod
    def no_load_wait(text: str, load: Found, call: str = "") -> "Bug":
        """No wait behind a load from tensor memory."""
        return Bug(text, load.behind("tcgen05.wait::ld").left_out(), call, lint="load-wait")

    @staticmethod
    def no_store_wait(text: str, store: Found, call: str = "", lags: str = "") -> "Bug":
        """No wait behind a store to tensor memory."""
        return Bug(text, store.behind("tcgen05.wait::st").left_out(), call, lags, lint="store-wait")

    @staticmethod
    def no_warp_sync(text: str, signal: Found, call: str = "") -> "Bug":
        """An elected thread does not wait for its warp ahead of an arrival or a copy."""
        return Bug(text, signal.ahead("bar.warp.sync").left_out(), call, lint="warp", shows=False)

    @staticmethod
    def always_branches(text: str, behind: Found, call: str = "") -> "Bug":
        """The branch ahead of an instruction is always taken."""
        return Bug(text, behind.ahead("bra").rewritten(r"@%p\d+ ", ""), call)

    @staticmethod
    def wrong_bytes(text: str, barrier: str, number: int, call: str = "", lags: str = "") -> "Bug":
        """The producer expects another number of bytes at an mbarrier than TMA loads."""
        return Bug(text, arrivals("producer", barrier).ending_with(number), call, lags)

    @staticmethod
    def no_bytes(
        text: str, by: str, barrier: str, call: str = "", lags: str = "", *, count: int = 1, lint: str = ""
    ) -> "Bug":
        """A warp arrives at an mbarrier and expects no bytes, in each of ``count`` places."""
        without = arrivals(by, barrier, count).rewritten(r"\.expect_tx(.*), %r\d+;", r"\1, 1;")
        return Bug(text, without, call, lags, lint=lint)

    @staticmethod
    def no_proxy_fence(text: str, fence: Found, call: str = "") -> "Bug":
        """No fence between accesses to shared memory by threads and by TMA or tensor cores."""
        return Bug(text, fence.left_out(), call, lint="proxy")

    @staticmethod
    def columns_not_freed(call: str = "") -> tuple["Bug", ...]:
        """Columns of tensor memory that are allocated, and not freed or too few."""
        fewer = [find("mma", f"tcgen05.{x}").ahead("mov.b32").rewritten("512", "256") for x in ("alloc", "dealloc")]
        return (
            Bug("tensor memory is not freed", find("mma", "tcgen05.dealloc").left_out(), call, lint="columns"),
            Bug("half the columns are freed", fewer[1], call, lint="columns"),
            Bug("fewer columns are allocated and freed than products write", both(*fewer), call),
        )

    @staticmethod
    def wrong_registers(text: str, by: str, number: int, other: int, call: str = "") -> "Bug":
        """A warp asks for another number of registers per thread."""
        change = find(by, "setmaxnreg").rewritten(str(number), str(other))
        return Bug(text, change, call, lint="registers")


_WAIT = re.compile(
    r"\s*([\w: ]+?) (\w+\.[\w+]+)(?:\*(\d))?(?:\[(\d)(?::(\d))?\])?(?: in ([\w-]+))?(?:, ([\w: ]+) lags?)? \| (.+)"
)


def _waits(table: str) -> Iterator[tuple[Found, str, str, str]]:
    for line in re.sub(r"\|\n\s+", "| ", table).strip().splitlines():
        found = _WAIT.fullmatch(line)
        if found is None:
            raise ValueError(f"expected a wait, got {line.strip()!r}")
        by, barrier, count, first, end, call, lags, text = (x or "" for x in found.groups())
        places = slice(int(first), int(end or int(first) + 1)) if first else _EACH
        yield waits(by, barrier, int(count or 1))[places], call, lags, text


Bugs = Mapping[str, tuple[Bug, ...]]  # by what kind of bug they are
AnyBugs = Mapping[str, tuple[Bug | LaunchBug, ...]]


def listed(bugs: AnyBugs) -> Iterator[str]:
    """A line for each bug: its kind, what is wrong, and the checks that find it."""
    for kind, some in bugs.items():
        for bug in some:
            finders = [f"lint {bug.lint}"] * bool(bug.lint) + ["execution"] * bug.shows
            yield f"{kind}: {bug.text} [{', '.join(finders)}]"


def _row(first: str, bugs: Sequence[Bug | LaunchBug]) -> str:
    counts = (len(bugs), sum(bool(bug.lint) for bug in bugs), sum(bug.shows for bug in bugs))
    return f"| {first} | {' | '.join(str(n) for n in counts)} |\n"


def by_kernel(tables: Mapping[str, AnyBugs]) -> str:
    """Table of kernels: how many bugs have been planted in each, and how many of them each check finds."""
    rows = {kernel: [bug for some in bugs.values() for bug in some] for kernel, bugs in tables.items()}
    rows["all"] = [bug for some in rows.values() for bug in some]
    head = "| kernel | bugs | found by the lint | by execution |\n|---|---|---|---|\n"
    return head + "".join(_row(kernel, some) for kernel, some in rows.items())


def by_kind(tables: Mapping[str, AnyBugs]) -> str:
    """Table of kinds of bugs: the first one of each, how many there are, and how many of them each check finds."""
    kinds: dict[str, list[Bug | LaunchBug]] = {}
    for bugs in tables.values():
        for kind, some in bugs.items():
            kinds.setdefault(kind, []).extend(some)
    head = (
        "| kind | such as | rules of the lint | bugs | found by the lint | by execution |\n|---|---|---|---|---|---|\n"
    )
    rules = {kind: ", ".join(sorted({f"`{bug.lint}`" for bug in some if bug.lint})) for kind, some in kinds.items()}
    return head + "".join(_row(f"{kind} | {some[0].text} | {rules[kind]}", some) for kind, some in kinds.items())


def page(old: str, tables: Mapping[str, AnyBugs]) -> str:
    """The page with its two tables anew."""
    new = {"kernel": by_kernel(tables), "kind": by_kind(tables)}
    return re.sub(r"^\| (kernel|kind) \| .*?\n(?=\n)", lambda each: new[each[1]], old, flags=re.MULTILINE | re.DOTALL)
