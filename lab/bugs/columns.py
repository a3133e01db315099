"""Bugs of the backward kernel under masks, where it is not as without."""

from lab.bugs.code import find
from lab.bugs.table import Bug, Bugs

# What the producer publishes of an entry and of a turn, in shared memory; where it reads lists and entries, and where
# threads read bits, 8 bytes each.
_ENTRY, _TURN = (find("producer", "st.shared", 2, having=places) for places in (r"\+69[26]\]", r"\+7(56|60)\]"))
_LISTS = find("producer", "ld.global", 7)
_LIST, _TURN_OF_ENTRY = _LISTS[2:4], _LISTS[6]
_BITS = find("compute", "ld.global.b64")
_TILE = 128 * 128 // 8  # bytes of bits


COLUMNS: Bugs = {
    "missing wait": Bug.no_waits(
        """
        compute entries.full | compute warps read an entry before it is there
        adding turns.full | adding warps read a turn before it is there
        """
    ),
    "wrong phase": Bug.wrong_phases(
        """
        compute entries.full | compute warps are a phase late with entries
        adding turns.full | adding warps are a phase late with turns
        """
    ),
    "wrong stage": (
        Bug("an entry is put a stage further than it is read", _ENTRY.further(0, 8)),
        Bug("a block of dQ and its turn are put a stage further than they are read", _TURN.further(0, 8)),
        Bug("where dQ is added and its turn change places", _TURN[0].further(0, 4)),
    ),
    "list": (
        Bug("a tile takes the list of the next keys", _LIST.further(1, 8)),
        Bug("a turn is that of another entry", _TURN_OF_ENTRY.further(1, 12), "turns"),
    ),
    "bits": (
        Bug("scores are hidden by the bits of another block", _BITS.further(1, _TILE), "causal"),
        Bug("a warpgroup has bits of the other one's queries", _BITS.further(1, _TILE // 2), "causal"),
        Bug.always_branches("scores whose bits are 0 are not hidden", find("compute", "tcgen05.ld", 8)[0]),
    ),
    "wrong count": (
        Bug.counted_short("an entry is said to be read when one warpgroup has read it", "entries.empty", 4, "many"),
    ),
    "missing arrival": (
        Bug.no_arrival("compute warps do not give entries back", "compute", "entries.empty", "many"),
        Bug.no_arrival("a turn is not published", "producer", "turns.full"),
    ),
}
