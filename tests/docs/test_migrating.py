"""Calls of other libraries do what docs/migrating.md says."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import transformers
from torch import Tensor

from flash_attn_cute.integrations import flash_attn, flash_attn_interface, sdpa, transformer_engine, varlen
from tests.lib import oracle
from tests.lib.checks import assert_close
from tests.lib.integrations import SIGNATURES, alibi_truth, top_left
from tests.lib.oracle import Call

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"

# For calls by position from tuples, and for wrong ones, which no type checker would let pass.
fa: Any = flash_attn
fa3: Any = flash_attn_interface
dot: Any = sdpa
packed_attn: Any = varlen
te: Any = transformer_engine

# What calls of the page mean, in terms of the oracle. Those that are not here must be refused.
Expected: TypeAlias = Callable[[SimpleNamespace], Call]


def of(names: str, **options: Any) -> Expected:
    """A call of tensors and with options, which are named or are functions of all that the page defines."""

    def value(n: SimpleNamespace, x: Any) -> Any:
        return getattr(n, x) if isinstance(x, str) else x(n) if callable(x) else x

    return lambda n: Call(*(getattr(n, x) for x in names.split()), **{x: value(n, y) for x, y in options.items()})


of_qkv = partial(of, "q k v")
of_packed = partial(of, "pq pk pv", cu_seqlens_q="offsets", cu_seqlens_k="offsets")
padded = partial(of_packed, **dict.fromkeys(("seqused_q", "seqused_k"), lambda n: n.true.diff()))
of_keys = of_packed(cu_seqlens_k="keys")


def of_sdpa(names: str = "query key value", **options: Any) -> Expected:
    def meaning(n: SimpleNamespace) -> Call:
        call = of(names, **options)(n)
        return replace(call, q=call.q.transpose(1, 2), k=call.k.transpose(1, 2), v=call.v.transpose(1, 2))

    return meaning


def with_alibi(meaning: Expected) -> Expected:
    return lambda n: alibi_truth(meaning(n), n.slopes)


MEANINGS: dict[str, Expected] = {
    "flash_attn_func(q, k, v, 0.0, None, True)": of_qkv(causal=True),
    "flash_attn_func(q, k, v, causal=True, window_size=(16, 0), softcap=30.0)": of_qkv(
        causal=True, window_size=(16, 0), softcap=30.0
    ),
    "flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)": with_alibi(of_qkv(causal=True)),
    "flash_attn_func(q, k, v, alibi_slopes=slopes)": with_alibi(of_qkv()),
    "flash_attn_func(q, k, v, causal=True, return_attn_probs=True)": of_qkv(causal=True),
    "flash_attn_kvpacked_func(q, kv, window_size=(8, 8))": of_qkv(window_size=(8, 8)),
    "flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)": lambda n: replace(
        Call(*n.qkv.unbind(2)), causal=True
    ),
    "flash_attn_varlen_func(pq, pk, pv, offsets, offsets, 10, 10, causal=True)": of_packed(causal=True),
    "flash_attn_varlen_kvpacked_func(pq, packed[:, 1:], offsets, offsets, 10, 10)": of_packed(),
    "flash_attn_varlen_qkvpacked_func(packed, offsets, 10, causal=True, alibi_slopes=slopes)": with_alibi(
        of_packed(causal=True)
    ),
    "flash_attn_func(q, k, v, softmax_scale=0.1, causal=True, num_splits=1, pack_gqa=True)": of_qkv(
        softmax_scale=0.1, causal=True
    ),
    "flash_attn_interface.flash_attn_func(q, k, v, 0.1, True)": of_qkv(softmax_scale=0.1, causal=True),
    "flash_attn_interface.flash_attn_func(q, k, v, window_size=(8, 0), pack_gqa=True, return_attn_probs=True)": of_qkv(
        window_size=(8, 0)
    ),
    "flash_attn_interface.flash_attn_qkvpacked_func(heads, causal=True, num_heads_q=4)": lambda n: replace(
        Call(*n.heads.split([4, 2, 2], 2)), causal=True
    ),
    "flash_attn_interface.flash_attn_varlen_func(pq, pk, pv, offsets, offsets, 10, 10, None, lengths, None, True)": (
        of_packed(seqused_k="lengths", causal=True)
    ),
    "flash_attn_cute.flash_attn_func(q, k, v, dropout_p=0.0, causal=True, window_size=(-1, -1))": of_qkv(causal=True),
    "flash_attn_cute.flash_attn_func(q, k, v, causal=True, learnable_sink=slopes, return_lse=True)": of_qkv(
        causal=True, learnable_sink="slopes"
    ),
    "scaled_dot_product_attention(query, key, value, is_causal=True)": of_sdpa(causal=True),
    "scaled_dot_product_attention(query, key, value, causal_lower_right(24, 24))": of_sdpa(causal=True),
    "scaled_dot_product_attention(query, few_keys, few_values, is_causal=True, enable_gqa=True)": of_sdpa(
        "query few_keys few_values", mask=torch.ones(24, 40, dtype=torch.bool).tril()
    ),
    "scaled_dot_product_attention(query, key, value, attn_mask=real)": of_sdpa(mask="real"),
    "scaled_dot_product_attention(query, key, value, added, scale=0.1)": of_sdpa(bias="added", softmax_scale=0.1),
    "varlen_attn(pq, pk, pv, offsets, offsets, 10, 10, window_size=(-1, 0))": of_packed(causal=True),
    "varlen_attn(pq, pk[:, :2], pv[:, :2], offsets, offsets, 10, 10, enable_gqa=True, scale=0.1, "
    "return_aux=AuxRequest(lse=True))": lambda n: replace(
        of_packed(softmax_scale=0.1)(n), k=n.pk[:, :2], v=n.pv[:, :2]
    ),
    "varlen_attn(pq, pk, pv, offsets, offsets, 10, 10, seqused_k=lengths)": of_packed(seqused_k="lengths"),
    "varlen_attn(pq, pk, pv, offsets, offsets, 10, 10, num_splits=1)": of_packed(),
    'thd_attention(pq, pk, pv, true, true, **memory, attn_mask_type="padding_causal")': padded(causal=True),
    'thd_attention(pq, pk, pv, true, true, **memory, attn_mask_type="padding", window_size=(4, 4))': padded(
        window_size=(4, 4)
    ),
    'thd_attention(pq, pk, pv, offsets, keys, attn_mask_type="padding_causal_bottom_right")': of_packed(
        cu_seqlens_k="keys", causal=True
    ),
    'thd_attention(pq, pk, pv, offsets, keys, attn_mask_type="padding_causal")': lambda n: top_left(of_keys(n)),
    'thd_attention(pq, pk, pv, offsets, keys, attn_mask_type="padding_causal", window_size=(4, 0))': lambda n: top_left(
        of_keys(n), 4
    ),
}


def eager_twin(model: Any) -> Any:
    """A model of transformers with the same weights and its own attention."""
    config = copy.deepcopy(model.config)
    twin = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert twin.config._attn_implementation == "eager"
    twin.load_state_dict(model.state_dict())
    return twin


def assert_same_model_output(call: str, got: Any, names: dict[str, Any]) -> None:
    """A call of a model gives the real rows that the same call of its twin gives."""
    expected = eval(call, {**names, "model": eager_twin(names["model"])})
    if isinstance(expected, Tensor):  # tokens
        assert torch.equal(got, expected)
        return
    rows = names["ones"].bool() if "attention_mask" in call else torch.ones_like(names["ids"], dtype=torch.bool)
    torch.testing.assert_close(got.logits[rows], expected.logits[rows])


def page_rows(page: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The code blocks of a page and the rows of its tables: a call, and what happens."""
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `", page, re.MULTILINE)), "a row has another form"
    return blocks, rows


ROWS = page_rows(PAGE.read_text())[1]


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """The names that the page's code blocks define."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in page_rows(PAGE.read_text())[0]:
        exec(block, names)
    return names


def outcome(call: str, names: dict[str, Any]) -> tuple[str, Any]:
    """The outcome of a call of the page: "served" and the result, or "refused" and the message."""
    try:
        return "served", eval(call, dict(names))
    except ValueError as error:
        return "refused", str(error)


def assert_means(result: Any, meaning: Call) -> None:
    """A result, in the shape of its library, is what the oracle makes of the call."""
    expected, low = (oracle.attention(meaning.to(dtype)) for dtype in (torch.float64, meaning.q.dtype))
    results = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    for name, got, true, yardstick in zip(("out", "lse"), results, expected, low, strict=False):
        if got.ndim == 2 and true.ndim == 3:  # Transformer Engine's
            got = got.unflatten(-1, true.shape[-2:])
        elif got.shape != true.shape:  # PyTorch's
            got = got.transpose(1, 2)
        factor = 3.0 if meaning.softcap else 2.0
        assert_close(name, got, true, yardstick, factor, max(1.0, true[true.isfinite()].abs().max().item()))


def test_the_page_has_twenty_calls_and_more() -> None:
    calls = [call for call, _ in ROWS]
    assert len(set(calls)) == len(calls) >= 20
    assert set(MEANINGS) <= set(calls)
    for function, _ in SIGNATURES:
        module = "flash_attn_interface." if function.__module__ == flash_attn_interface.__name__ else ""
        name = f"{module}{function.__name__}("
        assert any(call.startswith(name) for call in calls), name


@pytest.mark.parametrize(("call", "here"), ROWS, ids=[call for call, _ in ROWS])
def test_what_the_page_says_of_a_call(call: str, here: str, namespace: dict[str, Any]) -> None:
    happened, result = outcome(call, namespace)
    assert here.split(":")[0] == happened, result
    if happened == "served" and call.startswith("model"):
        assert_same_model_output(call, result, namespace)
    elif happened == "served":
        assert_means(result, MEANINGS[call](SimpleNamespace(**namespace)))
    else:
        assert call not in MEANINGS
        message = re.fullmatch(r"refused: `(.*)`", here)
        assert message is not None
        assert result.startswith(message[1]), result


def test_the_page_can_be_wrong(namespace: dict[str, Any]) -> None:
    names = SimpleNamespace(**namespace)
    _, result = outcome("flash_attn_func(q, k, v)", namespace)
    with pytest.raises(AssertionError, match="above the bound"):
        assert_means(result, of_qkv(causal=True)(names))
    assert outcome("flash_attn_func(q, k, v, 0.1)", namespace)[0] == "refused"
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_same_model_output("model(ids)", names.model(names.ids, position_ids=names.positions + 1), namespace)
    with pytest.raises(AssertionError, match="another form"):
        page_rows("| `f()` | served\n")
