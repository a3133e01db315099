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

from torch import Tensor


def check_tensors(**arguments: object) -> None:
    """Checks arguments that are looked at before the package's own functions check them.

    Raises:
        TypeError: one that is no tensor.
    """
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
