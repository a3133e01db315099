"""Bugs of the forward kernel under masks, where it is not as without."""

from lab.bugs.code import arrivals, find, uncounted
from lab.bugs.table import Bug, Bugs

_EMPTY = ", -2;"
# Iteration over lists: of each part the next entry, set when a pass begins, moved on behind a window; twice, as there
# are two passes.
_NEXT_ENTRIES = find("producer", "st.shared", 8, having=r"\[%r\d+\+(548|684)\]")
_PUBLISHED = find("producer", "st.shared", 3, having=r"\+4(52|56|60)\]")


LISTS: Bugs = {
    "missing wait": Bug.no_waits("softmax entries.full | softmax reads an entry before it is there"),
    "wrong phase": Bug.wrong_phases("softmax entries.full | softmax is a phase late with entries"),
    "wrong stage": (
        Bug("an entry is put a stage further than it is read", _PUBLISHED.further(0, 12)),
        Bug("the parts' entries change places", _PUBLISHED[1].further(0, 4)),
    ),
    "wrong count": (
        Bug(
            "an entry is said to be read when one part's warps have read it",
            uncounted("entries.empty", 4),
            "many",
            lint="arrivals",
            shows=False,
        ),
    ),
    "missing arrival": (
        Bug.no_arrival("the mma warp does not give entries back", "mma", "entries.empty", "many"),
        Bug(
            "softmax does not hand over the part of P that it leaves out",
            arrivals("softmax", "p.full", 3)[2].left_out(),
        ),
    ),
    "list": (
        Bug("a window does not say which entries it has had", (_NEXT_ENTRIES[2:4] + _NEXT_ENTRIES[6:]).left_out()),
    ),
    "left out": (
        Bug(
            "scores of a block are left out though its part sees it",
            find("mma", "tcgen05.mma", 8, having=r"^\S+\s+\[%r\d+\], %rd").left_out(),
        ),
        Bug(
            "outputs of a block are not left out though their part does not see it",
            find("mma", "setp.ne", 2, having=_EMPTY).rewritten(_EMPTY, ", -3;"),
        ),
        Bug(
            "what stands where nothing was multiplied is not left out of O",
            find("epilogue", "setp.neu").rewritten("setp.neu.f32(.*), .*;", r"setp.neu.f32\1, 0fBF800000;"),
            "blind",
        ),
    ),
}
