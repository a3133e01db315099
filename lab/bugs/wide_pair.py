"""Bugs of the backward kernel of pairs of CTAs at (192, 128), where it is not as at d = 128."""

from lab.bugs.code import find
from lab.bugs.table import Bug, Bugs

# Products, four steps each: of dK in the loop over steps, and behind it.
_PRODUCTS = find("mma", "tcgen05.mma", 28)
_OF_DK = _PRODUCTS[4:8] + _PRODUCTS[20:24]
_LOADS_OF_K = find("producer", "cp.async.bulk.tensor", 4, "k_columns.full")
_LOADS_OF_Q = find("producer", "cp.async.bulk.tensor", 3, "q_columns.full")
_LANES = find("drain", "setp.gt.u32", 4, having=", 95;")


WIDE_PAIR: Bugs = {
    "missing wait": Bug.no_waits(
        """
        mma dq.empty*2[0] in steps | dQ overwrites the last step's, which drain warps have not read
        mma dq.empty*2[1] in two | a tile's last dQ overwrites that before it, which drain warps have not read
        mma p.full in two | the next scores overwrite those that compute warps have not read
        """
    ),
    "wrong place": (
        Bug("a CTA puts out all columns of dQ that it computes", _LANES.rewritten(", 95;", ", 127;")),
        Bug(
            "the second CTA adds where the first one's columns end that it computes",
            find("adding", "mul.lo.s32", having=", 6144;").rewritten("6144", "8192"),
        ),
        Bug(
            "dQ is rounded from parts of 64 columns",
            find("compute", "mul.wide.u32", having=", 6144;").rewritten("6144", "4096"),
        ),
        Bug("the last columns of K are put where those before them are", _LOADS_OF_K[1].further(0, -32768)),
        Bug("the last 32 columns of Q are put where those before them are", _LOADS_OF_Q[2].further(0, -4096)),
    ),
    "wrong descriptor": (
        Bug("Q by columns is said to be swizzled in 128 bytes", _OF_DK.flipped("b.swizzle", 4 ^ 2)),
        Bug("32 columns of Q are looked for at half the distance to them", _OF_DK.flipped("b.leading", 0x100 ^ 0x80)),
    ),
    "wrong bytes": (
        Bug.wrong_bytes("the bytes of half of K by columns are expected", "k_columns.full", 65536, "tiles"),
    ),
}
