"""Calls as other libraries write them, served by ``flash_attn_cute``: change an import, keep the call.

- ``integrations.flash_attn``: the functions of flash-attn 2.
- ``integrations.flash_attn_interface``: those of flash-attn 3, which has them in a module of that name.
- ``integrations.bert_padding``: flash-attn's helpers for padded batches.
- ``integrations.sdpa``: ``torch.nn.functional.scaled_dot_product_attention``.
- ``integrations.varlen``: ``torch.nn.attention.varlen.varlen_attn``, which torchtitan calls, too.
- ``integrations.transformer_engine``: Transformer Engine's ``thd`` format.
- ``integrations.transformers``: ``attn_implementation="flash_attn_cute"`` for models of Hugging Face transformers.

What we cannot do is refused with a ValueError that names the argument. Of the package itself only
``distributed.context_parallel`` imports from here, which puts ``sdpa`` in the place of PyTorch's attention.
Which calls are served and which refused: docs/migrating.md in the repository.
"""

from numbers import Real

import torch
from torch import Tensor

from flash_attn_cute import api


def check_tensors(**arguments: object) -> None:
    """Checks arguments that are looked at before the package's own functions check them.

    Raises:
        TypeError: one that is no tensor, or a nested or sparse one.
    """
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError(
                f"{name}: expected a dense tensor, got a nested one; flash_attn_cute.flash_attn_func takes those "
                "of the jagged layout"
            )
        api.check_layout(name, x)


def check_flags(**arguments: object) -> None:
    """Checks arguments that say yes or no, likewise.

    Raises:
        TypeError: one that is no bool.
    """
    for name, x in arguments.items():
        if not isinstance(x, (bool, torch.SymBool)):  # the latter of a traced comparison of lengths
            raise TypeError(f"{name}: expected a bool, got {x!r}")


def check_zero(name: str, x: object, expected: str, hint: str = "") -> None:
    """Checks a number that can only be 0.

    Args:
        name: the user's name of the argument.
        x: the argument.
        expected: what the error says was expected, and why.
        hint: how it ends.

    Raises:
        ValueError: another number, or none.
    """
    if not isinstance(x, Real) or x != 0:
        got = x if isinstance(x, Real) else type(x).__name__
        raise ValueError(f"{name}: expected {expected}, got {got}{hint}")
