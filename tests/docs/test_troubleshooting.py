"""docs/troubleshooting.md and docs/environment.md: messages that users can get, variables that are read."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from flash_attn_cute import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.backends.portable import PortableBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.integrations import flash_attn
from flash_attn_cute.integrations import transformers as hf
from flash_attn_cute.jit import disk
from flash_attn_cute.runtime import nvtx, settings
from flash_attn_cute.selfcheck import gate

DOCS = Path(__file__).parents[2] / "docs"
MESSAGES: list[str] = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)

attend: Any = flash_attn_func  # for wrong calls, which no type checker would let pass
q = torch.randn(2, 6, 4, 16)
k = torch.randn(2, 9, 2, 16)
packed = torch.randn(12, 4, 16)
offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
layer: Any = SimpleNamespace(is_causal=True)


def second_derivative() -> None:
    x = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(flash_attn_func(x, x, x).sum(), x, create_graph=True)
    gradient.sum().backward()


def bloom() -> None:
    hf.register()
    config = transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1)
    transformers.AutoModelForCausalLM.from_config(config, attn_implementation=hf.NAME)


def written_mask() -> None:
    visible = torch.ones(6, 9, dtype=torch.bool)
    mask = BlockMask.from_dense(visible)
    visible[0] = False
    flash_attn_func(q, k, k, block_mask=mask)


def fallback() -> None:
    class Kernels(PortableBackend):
        name = "kernels"
        limits = staticmethod(lambda spec, inputs: ("torch.float32",))
        is_made_for = staticmethod(lambda device: True)

    class Portable(PortableBackend):
        is_made_for = staticmethod(lambda device: False)

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        patched.setattr(dispatch, "BACKENDS", {"kernels": Kernels(), "portable": Portable()})
        patched.setattr(dispatch, "_has_warned", False)
        warnings.simplefilter("error")
        flash_attn_func(q, k, k)


def traced_without_verdict() -> None:
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        patched.setattr(gate, "_has_warned", False)
        warnings.simplefilter("error")
        gate._without_verdict(gate._TRACED)


def shared_folder(path: Path) -> None:
    path.chmod(0o777)
    disk.Folder(path)


def no_nvtx() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(settings, "nvtx", lambda: True)
        patched.setattr(torch.cuda.nvtx, "range_push", _no_range)
        with nvtx.span("x"):
            pass


def _no_range(name: str) -> None:
    raise RuntimeError("NVTX functions not installed.")


PROVOKED: dict[str, Callable[[], object]] = {
    "alibi_slopes: expected shape": lambda: flash_attn.flash_attn_varlen_func(
        packed, packed, packed, offsets, offsets, 7, 7, alibi_slopes=torch.rand(2, 4)
    ),
    "attention_mask: expected None or four dimensions": lambda: hf.attend(layer, q, q, q, torch.ones(2, 4)),
    "attn_implementation: expected 'eager' or 'sdpa'": bloom,
    "backend: expected one that can serve this call": lambda: attend(q, k, k, backend="sm90"),
    "bias: expected float32 or the dtype of q": lambda: attend(q, k, k, bias=torch.zeros(6, 9).double()),
    "cu_seqlens_q: expected int32": lambda: flash_attn_varlen_func(
        packed, packed, packed, offsets.long(), offsets, 7, 7
    ),
    "dropout: expected 0.0": lambda: hf.attend(layer, q, q, q, None, dropout=0.1),
    "dropout_p: expected 0.0": lambda: attend(q, k, k, dropout_p=0.1),
    "flash_attn_cute: a call on": fallback,
    "flash_attn_cute: a compiled program gets the backend": traced_without_verdict,
    "flash_attn_cute: forward-mode derivatives of attention are not implemented": lambda: torch.func.jvp(
        lambda x: flash_attn_func(x, x, x), (q,), (q,)
    ),
    "flash_attn_cute: second derivatives of attention are not implemented": second_derivative,
    "flash_attn_func() got an unexpected keyword argument": lambda: attend(q, k, k, alibi_slopes=None),
    "flash_attn_func() takes 3 positional arguments": lambda: attend(q, k, k, 0.0, None, True),
    "FLASH_ATTN_CUTE_NVTX: expected 0": no_nvtx,
    "k: expected a number of heads that divides": lambda: attend(*(x.transpose(1, 2).contiguous() for x in (q, k, k))),
    "k: expected the dtype of q": lambda: attend(q.bfloat16(), k, k.bfloat16()),
    "mask: expected a shape that broadcasts": lambda: attend(q, q, q, mask=torch.ones(2, 6, dtype=torch.bool)),
    "mask: expected bool": lambda: attend(q, q, q, mask=torch.zeros(6, 6)),
    "mask: expected what it was when the BlockMask was made of it": written_mask,
    "max_seqlen_q: expected an upper bound on the sequence lengths": lambda: flash_attn_varlen_func(
        packed, packed, packed, offsets, offsets, 5, 5
    ),
    "q: expected a contiguous last dimension": lambda: attend(q.transpose(1, 3), k, k),
    "RuntimeError when making fake tensor call": lambda: torch.compile(
        torch.func.grad(lambda x: flash_attn_func(x, x, x).sum()), backend="eager"
    )(q),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages(message: str, tmp_path: Path) -> None:
    provoke = PROVOKED.get(message, lambda: shared_folder(tmp_path))
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError, UserWarning)) as raised:
        provoke()
    assert str(raised.value).startswith(message)


def test_messages_are_sorted_and_provoked() -> None:
    assert sorted(MESSAGES, key=str.lower) == MESSAGES
    assert set(MESSAGES) == {*PROVOKED, "FLASH_ATTN_CUTE_CACHE_DIR: the cache folder"}


def test_environment_variables() -> None:
    """All that the package reads, and no other."""
    known = set(re.findall(r"FLASH_ATTN_CUTE_\w+", Path(str(settings.__file__)).read_text()))
    page = (DOCS / "environment.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == known
