"""Bugs of the backward kernel of pairs of CTAs at (192, 128), where it is not as at d = 128."""

from lab.bugs.code import find
from lab.bugs.table import Bug, Bugs

# Products, four steps each: of dK and dQ in the loop over steps, and behind it.
_PRODUCTS = find("mma", "tcgen05.mma", 28)
_OF_DV, _OF_DK = _PRODUCTS[16:20], _PRODUCTS[4:8] + _PRODUCTS[20:24]
_OF_DQ = _PRODUCTS[12:16] + _PRODUCTS[24:]
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
        Bug("K by columns is loaded from column 0 on by both CTAs", _LOADS_OF_K[:1].rewritten(r"\{%r\d+", "{0")),
        Bug("the last 32 columns of Q are put where those before them are", _LOADS_OF_Q[2].further(0, -4096)),
        Bug("dQ takes the place of scores", _OF_DQ.flipped("target", 448), "two"),
        Bug("dV takes the second half of P from behind the first", _OF_DV[2:].flipped("a", 48)),
    ),
    "wrong descriptor": (
        Bug("Q by columns is said to be swizzled in 128 bytes", _OF_DK.flipped("b.swizzle", 4 ^ 2)),
        Bug("dS is said to be swizzled in 128 bytes", _OF_DQ.flipped("b.swizzle", 4 ^ 2)),
        Bug("32 columns of Q are looked for at half the distance to them", _OF_DK.flipped("b.leading", 0x100 ^ 0x80)),
        Bug("the last 64 columns of K are looked for at the place of the first", _OF_DQ.flipped("a.leading", 0x800)),
        Bug("products of dQ are said to have the queries of one CTA", _OF_DQ.flipped("columns", 8 ^ 4)),
        Bug("products of dQ are said to have the columns of one CTA", _OF_DQ.flipped("rows", 16 ^ 8)),
    ),
    "wrong bytes": (
        Bug.wrong_bytes("the bytes of half of K by columns are expected", "k_columns.full", 65536, "tiles"),
        Bug(
            "the adding warp adds a piece of 64 columns",
            find("adding", "cp.reduce.async.bulk", 4).ending_with(4096),
            "tiles",
        ),
    ),
}
