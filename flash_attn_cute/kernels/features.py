"""Features of a call that change the kernels' code: every flag once, with its name and its meaning.

Backends make ``Features`` from a call, configurations hold them, kernels read them, and ``jit`` prints and parses them.
What changes from call to call without changing code (lengths, strides, scales, window sizes) is an argument instead
(``kernels.arguments``). A new flag is a line here and the lines that read it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

PassName = Literal["forward", "backward", "bias_gradient", "selection", "selection_backward", "column_sums"]


def _flag(meaning: str, *, default: bool = False, only: PassName | None = None) -> Any:
    return field(default=default, metadata={"meaning": meaning, "only": only})


@dataclass(frozen=True)
class Features:
    """The flags of one call. Those that only one pass reads are off in the other's (``of_pass``)."""

    packed: bool = _flag("sequences are concatenated along one dimension of rows")
    seqused_q: bool = _flag("some of a sequence's query rows are padding")
    seqused_k: bool = _flag("some of a sequence's key rows are padding")
    left: bool = _flag("a window bounded to the left; a mask has it in its bits")
    right: bool = _flag("a window bounded to the right; causal is a right of 0; likewise")
    softcap: bool = _flag("scores are capped by tanh")
    sink: bool = _flag("one more logit a head in the denominator", only="forward")
    mask: bool = _flag("a tensor says which scores are hidden; lists of blocks and bits are made of it")
    uniform_mask: bool = _flag("all queries of a sequence see the same keys", only="forward")
    block_mask: bool = _flag("tables list the blocks that tiles see, and hold bits of those that they see in part")
    half_blocks: bool = _flag("many quarters, 64 x 64, of a block mask's blocks are empty", only="forward")
    half_columns: bool = _flag("its lists of queries are of 64 keys each, not of 128", only="backward")
    stored_ds: bool = _flag("dS of a block mask has room in a workspace, of some heads at a time", only="backward")
    intervals: bool = _flag("beside a block mask each query sees keys of one interval alone, and each key so queries")
    bias: bool = _flag("a tensor is added to the scores")
    uniform_bias: bool = _flag("it is the same for all queries")
    float32_bias: bool = _flag("it is float32, not of q's dtype")
    strided_bias: bool = _flag("its keys do not follow each other in memory")
    paired_bias: bool = _flag("its elements of an even key and the next lie in one aligned word")
    tiled_bias: bool = _flag("its rows, and its gradient's, begin at multiples of 16 bytes, for TMA")
    dbias: bool = _flag("every score's gradient is written, as that of a bias of its own", only="backward")
    dbias_of_scores: bool = _flag("likewise, to be summed for a bias that they share", only="backward")
    dbias_of_keys: bool = _flag("the sum of each key's gradients is written, for a uniform bias", only="backward")
    dlse: bool = _flag("lse has a gradient, too", only="backward")
    grouped: bool = _flag("query heads share a key head", only="backward")
    deterministic: bool = _flag("the same inputs give the same bits", only="backward")
    wide: bool = _flag("out, or gradients, are float32: parts, to be merged with those of other calls")
    max_logits: bool = _flag("the largest logit of each head is found, before softcap and bias", only="forward")
    residual: bool = _flag("eight of the bits that out loses by rounding are kept, for an exact delta")
    zero_padding: bool = _flag("rows of padding are zeroed, not left unwritten", default=True)

    @property
    def listed(self) -> bool:
        """Whether tiles iterate over lists (``common.block_lists``), made from a mask or brought by a block mask."""
        return self.mask or self.block_mask

    @property
    def may_mask_keys(self) -> bool:
        """Whether a key may be fully masked, or padding."""
        return self.packed or self.left or self.right or self.listed

    @property
    def hides_last_queries(self) -> bool:
        """Whether keys may have to be hidden from a sequence's last queries, or from rows behind them.

        Else these add nothing as they are. A bias for them may be NaN.
        """
        return self.left or self.bias

    @property
    def caps_or_biases(self) -> bool:
        """Whether scores are not scaled products: max_logits are then searched in the latter."""
        return self.softcap or self.bias

    def of_pass(self, name: PassName) -> "Features":
        """Features without those that the pass ignores, so that calls which differ only in these share a kernel."""
        others = {f.name: f.default for f in fields(self) if f.metadata["only"] not in (None, name)}
        return replace(self, **others)

    @staticmethod
    def format(flags: Mapping[str, bool]) -> str:
        """Flags that are not as by default, a negated one as ``no_<name>``, as ``parse`` reads them."""
        by_default = {f.name: f.default for f in fields(Features)}
        changed = {name: on for name, on in flags.items() if on != by_default.get(name, False)}
        return " ".join(name if on else f"no_{name}" for name, on in changed.items())

    @classmethod
    def parse(cls, chosen: Iterable[str]) -> "Features":
        """Features from words.

        Raises:
            ValueError: a word that is none of ``words``.
        """
        unknown = [word for word in chosen if word not in words()]
        if unknown:
            raise ValueError(f"features: expected some of {', '.join(words())}, got {', '.join(unknown)}")
        return cls(**{word.removeprefix("no_"): not word.startswith("no_") for word in chosen})


def words() -> dict[str, str]:
    """Words that ``Features.parse`` reads, with their meanings.

    Each is a flag, or ``no_`` and a flag that is on by default.
    """
    return {
        f"no_{f.name}" if f.default else f.name: f"not: {f.metadata['meaning']}" if f.default else f.metadata["meaning"]
        for f in fields(Features)
    }


@dataclass(frozen=True)
class Case:
    """A condition on calls, as the tables of configurations have it: all of these features, and none of those."""

    needs: str = ""
    without: str = ""
    rows: int = 0  # of a sequence, at least
    window: int = 0  # keys that a query attends to, at least, if a window bounds both sides

    def fits(self, features: Features, rows: int = 0, window: int | None = None) -> bool:
        """Whether a call with these features and rows fits. A window of None does not bound both sides."""
        needed, unwanted = (all_of.split() for all_of in (self.needs, self.without))
        if rows < self.rows or (window is not None and window < self.window):
            return False
        return all(getattr(features, n) for n in needed) and not any(getattr(features, n) for n in unwanted)
