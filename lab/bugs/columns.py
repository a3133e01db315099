"""Bugs of the backward kernel under masks, where it is not as without."""

from lab.bugs.code import BACKWARD_WARPS, PARITY, PRODUCER, arrivals, find, uncounted, waits
from lab.bugs.table import Bug, Bugs

_COMPUTE, _ADD = (BACKWARD_WARPS[name][0] for name in ("compute", "adding"))

# What the producer publishes of an entry and of a turn, in shared memory; where it reads lists and entries, and where
# threads read bits, 8 bytes each.
_ENTRY, _TURN = (find(PRODUCER, "st.shared", 2, having=places) for places in (r"\+69[26]\]", r"\+7(56|60)\]"))
_LISTS = find(PRODUCER, "ld.global", 7)
_LIST, _TURN_OF_ENTRY = _LISTS[2:4], _LISTS[6]
_BITS = find(_COMPUTE, "ld.global.b64")
_TILE = 128 * 128 // 8  # bytes of bits


COLUMNS: Bugs = {
    "missing wait": (
        Bug(
            "compute warps read an entry before it is there",
            waits(_COMPUTE, "entries.full").left_out(),
            "lists",
            frozenset({PRODUCER}),
        ),
        Bug(
            "adding warps read a turn before it is there",
            waits(_ADD, "turns.full").left_out(),
            "lists",
            frozenset({PRODUCER}),
        ),
    ),
    "wrong phase": (
        Bug("compute warps are a phase late with entries", waits(_COMPUTE, "entries.full").flipped(PARITY), "lists"),
        Bug("adding warps are a phase late with turns", waits(_ADD, "turns.full").flipped(PARITY), "lists"),
        Bug(
            "the producer waits for entries as if stages began full",
            waits(PRODUCER, "entries.empty").flipped(PARITY),
            "lists",
        ),
        Bug(
            "the producer waits for turns as if stages began full",
            waits(PRODUCER, "turns.empty").flipped(PARITY),
            "lists",
        ),
    ),
    "wrong stage": (
        Bug("an entry is put a stage further than it is read", _ENTRY.further(0, 8), "lists"),
        Bug("a block of dQ and its turn are put a stage further than they are read", _TURN.further(0, 8), "lists"),
        Bug("where dQ is added and its turn change places", _TURN[0].further(0, 4), "lists"),
    ),
    "list": (
        Bug("a tile takes the list of the next keys", _LIST.further(1, 8), "lists"),
        Bug("a turn is that of another entry", _TURN_OF_ENTRY.further(1, 12), "turns"),
        Bug("a turn is that of a block of the same number", _TURN_OF_ENTRY.further(1, -8), "turns"),
    ),
    "bits": (
        Bug("scores are hidden by the bits of another block", _BITS.further(1, _TILE), "causal"),
        Bug("a warpgroup has bits of the other one's queries", _BITS.further(1, _TILE // 2), "causal"),
        Bug("a thread has the bits of the next key", _BITS.further(1, 8), "causal"),
        Bug(
            "scores whose bits are 0 are not hidden",
            find(_COMPUTE, "tcgen05.ld", 8)[0].ahead("bra").rewritten(r"@%p\d+ ", ""),
            "lists",
        ),
    ),
    "wrong count": (
        Bug(
            "an entry is said to be read when one warpgroup has read it",
            uncounted("entries.empty", 4),
            "many",
            lint="arrivals",
        ),
        Bug(
            "a turn is said to be read when one adding warp has read it",
            uncounted("turns.empty", 1),
            "many",
            lint="arrivals",
        ),
        Bug(
            "all threads of a warp say that they have read an entry",
            arrivals(_COMPUTE, "entries.empty").ahead("bra").left_out(),
            "many",
            lint="arrivals",
        ),
    ),
    "missing arrival": (
        Bug(
            "compute warps do not give entries back",
            arrivals(_COMPUTE, "entries.empty").left_out(),
            "many",
            lint="arrivals",
        ),
        Bug("adding warps do not give turns back", arrivals(_ADD, "turns.empty").left_out(), "many", lint="arrivals"),
        Bug("an entry is not published", arrivals(PRODUCER, "entries.full").left_out(), "lists", lint="arrivals"),
        Bug("a turn is not published", arrivals(PRODUCER, "turns.full").left_out(), "lists", lint="arrivals"),
    ),
}
