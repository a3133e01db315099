"""Models of transformers with ``attn_implementation="flash_attn_cute"``, beside the same models in eager mode."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

from flash_attn_cute.integrations import _transformers_masks as masks
from flash_attn_cute.integrations import transformers as ours
from tests.lib.checks import Case, assert_close
from tests.lib.integrations import recorded
from tests.lib.refusals import assert_refused, refusals

BATCH, ROWS, VOCABULARY = 3, 19, 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
BOTH_KINDS = ["sliding_attention", "full_attention"]
CONFIGS = {
    "Llama": transformers.LlamaConfig(**SMALL),
    "Qwen3": transformers.Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "Gemma2": transformers.Gemma2Config(
        **SMALL, sliding_window=6, layer_types=BOTH_KINDS, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "Gemma3": transformers.Gemma3TextConfig(**SMALL, sliding_window=6, layer_types=BOTH_KINDS, query_pre_attn_scalar=8),
    "GPT-OSS": transformers.GptOssConfig(
        **SMALL,
        sliding_window=6,
        layer_types=BOTH_KINDS,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}

# Newer versions of transformers have another name for it, which the oldest one that is supported lacks.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

hf: Any = transformers
ours.register()


def model_of(config: Any, implementation: str, auto: str = "AutoModelForCausalLM") -> Any:
    """A model of weights that are equal each time, all of them random, biases and sinks included."""
    torch.manual_seed(1)
    own = copy.deepcopy(config)  # models write the implementation there
    model = getattr(hf, auto).from_config(own, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def padding(kind: str) -> Tensor:
    """A padding mask, (batch, rows), 1 = real."""
    mask = torch.ones(BATCH, ROWS, dtype=torch.long)
    if kind == "right":
        mask[1, 11:], mask[2, 1:] = 0, 0
    elif kind == "left":
        mask[1, :11], mask[2, :3] = 0, 0
    elif kind == "holes":
        mask[1, 4:7], mask[2, :3] = 0, 0
    return mask


DOCUMENTS = [[7, 1, 11], [3, 16], [19]]
OFFSETS = torch.tensor([0, 7, 8, 19, 22, 38, 57], dtype=torch.int32)
BY_OFFSETS = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS.long(), "max_length_q": 19, "max_length_k": 19}


def batch_of(kind: str) -> dict[str, Any]:
    """The arguments of a model; labels only where the row before is real, too, which predicts them."""
    batch: dict[str, Any] = {"input_ids": torch.randint(1, VOCABULARY, (BATCH, ROWS)), "use_cache": False}
    batch["labels"] = batch["input_ids"].clone()
    if kind.startswith("packed"):
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    elif kind != "dense":
        mask = batch["attention_mask"] = padding(kind)
        batch["labels"][:, 1:][(mask[:, 1:] * mask[:, :-1]) == 0] = -100
    return batch


def trained(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Loss and gradients of a batch."""
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **gradients}


def masks_of_packed(config: Any, position_ids: Tensor) -> dict[str, Tensor]:
    """Masks that GPT-OSS leaves out: its own masks do not look at positions."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    given: Case = {"config": config, "position_ids": position_ids}
    given |= {"inputs_embeds": torch.empty(BATCH, ROWS, 0), "attention_mask": None, "past_key_values": None}
    return {
        "full_attention": masking_utils.create_causal_mask(**given),
        "sliding_attention": masking_utils.create_sliding_window_causal_mask(**given),
    }


@pytest.fixture(autouse=True)
def _finite_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest float64 is -inf to eager's softmax in float32, which leaves NaN in rows of padding."""
    functions = masking_utils.AttentionMaskInterface._global_mapping
    in_float32 = {"dtype": torch.float32}
    monkeypatch.setitem(functions, "eager", lambda **given: masking_utils.eager_mask(**{**given, **in_float32}))


def results_beside_eager(
    config: Any,
    batch: dict[str, Any],
    more: dict[str, Any],
    auto: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Ours of a batch and some more arguments, on a device; eager's in float64; and eager's in the dtype."""
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in {**batch, **more}.items()}
    got = trained(model_of(config, ours.NAME, auto).to(device, dtype), moved)
    if isinstance(config, hf.GptOssConfig) and "position_ids" in batch:
        batch = {**batch, "attention_mask": masks_of_packed(config, batch["position_ids"])}
    low = trained(model_of(config, "eager", auto).to(dtype), batch)
    exact = {name: x.double() for name, x in batch.items() if isinstance(x, Tensor) and x.is_floating_point()}
    truth = trained(model_of(config, "eager", auto).double(), {**batch, **exact})
    assert got.keys() == truth.keys()
    return got, truth, low


def assert_trains_like_eager(
    config: Any, batch: dict[str, Any], more: dict[str, Any], auto: str = "AutoModelForCausalLM"
) -> None:
    got, truth, low = results_beside_eager(config, batch, more, auto)
    size = max(x.abs().max().item() for x in truth.values())
    for name, x in got.items():
        assert_close(name, x, truth[name].double(), low[name], 2.0, size)


# The masks of GPT-OSS do not look at positions, so that packed batches take offsets.
KINDS = ["dense", "right", "left", "holes", "packed", "packed by offsets"]
TRAINED = [(name, kind) for name in CONFIGS for kind in KINDS if (name, kind) != ("GPT-OSS", "packed")]


@pytest.mark.parametrize(("name", "kind"), TRAINED)
def test_training(name: str, kind: str) -> None:
    """Loss and all gradients are eager's."""
    assert_trains_like_eager(CONFIGS[name], batch_of(kind), BY_OFFSETS if kind == "packed by offsets" else {})


@pytest.mark.parametrize("kind", ["dense", "right", "left", "packed by offsets"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16(name: str, kind: str, device: str) -> None:
    """On a GPU by its kernels; all gradients together are as close to eager's in float64 as eager's in bfloat16."""
    config = copy.deepcopy(CONFIGS[name])
    if name == "GPT-OSS":
        config.num_experts_per_tok = config.num_local_experts  # or rounding would choose others
    more = BY_OFFSETS if kind == "packed by offsets" else {}
    results = results_beside_eager(config, batch_of(kind), more, "AutoModelForCausalLM", torch.bfloat16, device)
    got, truth, low = (torch.cat([x[name].cpu().flatten() for name in sorted(x)]) for x in results)
    assert_close("loss and gradients", got, truth.double(), low, 4.0, truth.abs().max().item())


@pytest.mark.parametrize(("name", "kind"), TRAINED)
def test_masks_in_memory_are_the_exception(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only holes in a batch need one."""
    made = recorded(monkeypatch, "sdpa_mask", masking_utils)
    dense, packed = (recorded(monkeypatch, name) for name in ("flash_attn_func", "flash_attn_varlen_func"))
    model_of(CONFIGS[name], ours.NAME)(**batch_of(kind), **(BY_OFFSETS if kind == "packed by offsets" else {}))
    assert (len(dense), len(packed)) == ((2, 0) if kind in ("dense", "holes") else (0, 2))  # two layers
    assert bool(made) == (kind == "holes")
    assert all((call["mask"] is not None) == (kind == "holes") for call in dense)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["dense", "left"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generation(name: str, kind: str, cache: str) -> None:
    """Longer than sliding windows, by one token at a time behind a prompt."""
    ids, mask = torch.randint(1, VOCABULARY, (BATCH, ROWS)), padding(kind)
    options: Case = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    config = CONFIGS[name]
    exact = model_of(config, "eager").double().generate(ids, attention_mask=mask, **options)
    low, got = (model_of(config, kind).generate(ids, attention_mask=mask, **options) for kind in ("eager", ours.NAME))
    assert torch.equal(got.sequences, exact.sequences)
    for step, logits in enumerate(got.logits):
        size = exact.logits[step].abs().max().item()
        assert_close("logits", logits, exact.logits[step].double(), low.logits[step], 2.0, size)


def test_prompts_in_pieces() -> None:
    """Several queries behind a cache, some of them of padding."""
    config = CONFIGS["Qwen3"]
    ids, mask = torch.randint(1, VOCABULARY, (BATCH, ROWS)), padding("left")
    logits = []
    for implementation in ("eager", ours.NAME):
        model, cache = model_of(config, implementation), hf.DynamicCache(config=config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for rows in (slice(0, 8), slice(8, 13), slice(13, 19)):
            step = {"attention_mask": mask[:, : rows.stop], "position_ids": positions[:, rows]}
            logits.append(model(ids[:, rows], past_key_values=cache, **step).logits[mask[:, rows] == 1])
    for eager, got in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(got, eager)


# What layers are given and what masks say, at random.

causal, everything = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
MASKS = {
    "causal": (causal, True, None),
    "causal window": (masking_utils.sliding_window_causal_mask_function(4), True, 4),
    "bidirectional": (everything, False, None),
    "bidirectional window": (masking_utils.sliding_window_bidirectional_mask_function(3), False, 4),
    "unknown": (masking_utils.or_masks(causal, lambda b, h, i, j: j < 3), True, None),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("offsets", [(0, 0, 0), (5, 0, 0), (9, 4, 0), (torch.tensor(5), 0, 3), (5, 0, -4)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_rows_say_what_masks_say(name: str, offsets: tuple[Any, int, int], seed: int) -> None:
    """Random padding, caches and lengths, keys behind the queries or too few of them.

    Real queries see the keys that transformers' own mask shows them.
    """
    torch.manual_seed(seed)
    function, is_causal, window = MASKS[name]
    q_offset, kv_offset, more = offsets
    q_length = int(torch.randint(1, 9, ()))
    kv_length = int(q_offset) + q_length - kv_offset + more
    mask = None
    if seed % 4:
        positions = torch.arange(max(kv_length + kv_offset, int(q_offset) + q_length))
        first, last = torch.randint(0, 4, (2, 1)), torch.randint(4, 20, (2, 1))
        mask = (positions >= first) & (positions < last)
        if seed % 4 == 3:
            mask &= torch.rand(mask.shape) < 0.8
    given: Case = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "mask_function": function}
    given |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": mask, "device": "cpu"}
    rows = masks.rows_of_mask(**given, local_size=4, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
    seen = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    q = torch.randn(2, 4, q_length, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, kv_length, 8, dtype=torch.float64)
    layer: Any = SimpleNamespace(is_causal=is_causal)
    out, weights = ours.attend(layer, q, k, v, rows, sliding_window=window)
    assert weights is None
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).nan_to_num(0.0)
    real = torch.ones(2, q_length, dtype=torch.bool)
    if mask is not None:
        real = mask[:, int(q_offset) : int(q_offset) + q_length] if is_causal or window else real
    torch.testing.assert_close(out[real], expected.transpose(1, 2)[real], rtol=0, atol=1e-11)


def test_masks_of_users() -> None:
    """Four dimensions, bool or added to scores, are used as they are, under causal layers, too."""
    seen = torch.rand(BATCH, 1, ROWS, ROWS) < 0.5
    seen |= torch.eye(ROWS, dtype=torch.bool)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    batch = batch_of("dense")
    expected = model_of(CONFIGS["Llama"], "eager")(**batch, attention_mask=added).logits
    for mask in (seen, added, added.double()):
        got = model_of(CONFIGS["Llama"], ours.NAME)(**batch, attention_mask=mask).logits
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["dense", "right", "left"])
def test_learned_positions(kind: str) -> None:
    """T5: a bias for every layer with a gradient, an encoder's padding, and a decoder that looks at it."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    batch = batch_of(kind)
    batch["labels"] = torch.randint(1, VOCABULARY, (BATCH, ROWS))
    assert_trains_like_eager(config, batch, {}, "AutoModelForSeq2SeqLM")


@pytest.mark.slow
def test_gradient_checkpointing_and_compiling() -> None:
    """A compiled model breaks its graph for the rows, and has them; a checkpointed one has them twice."""
    batch, config = batch_of("packed"), CONFIGS["Gemma2"]
    expected = trained(model_of(config, ours.NAME), batch)
    checkpointed = model_of(config, ours.NAME).train()
    # The latter is its name in 5.20, the last release for Python 3.10.
    (getattr(checkpointed, "activation_checkpointing_enable", None) or checkpointed.gradient_checkpointing_enable)()
    compiled = torch.compile(model_of(config, ours.NAME), backend="aot_eager")
    torch.testing.assert_close(trained(checkpointed, batch), expected)
    for name, x in trained(compiled, batch).items():
        torch.testing.assert_close(x, expected[name.removeprefix("_orig_mod.")])


# What is refused.


def call(**options: Any) -> Any:
    q = torch.randn(2, 4, 6, 8)
    given: Case = {"query": q, "key": q, "value": q, "attention_mask": None, **options}
    layer: Any = SimpleNamespace(is_causal=True)
    return ours.attend(layer, **given)


def of_causal(**more: Any) -> Tensor:
    """A causal mask, as the mask function returns it."""
    rows = masks.rows_of_mask(batch_size=2, q_length=6, kv_length=6, **more)
    assert rows is not None
    return rows


CAUSAL = of_causal()  # ahead of all tests: patterns are numbered in the order in which they are met


def of_padding() -> Tensor:
    return of_causal(attention_mask=torch.arange(6).expand(2, 6) < 4)


OFFSETS_OF_TWO = torch.tensor([0, 6, 12])
LENGTHS = {"max_length_q": 6, "max_length_k": 6}
BIAS, MASK = torch.zeros(1, 4, 6, 6), torch.ones(2, 1, 6, 6)


@refusals("""
call(dropout=0.1)
    ValueError: dropout: expected 0.0, ... got 0.1
call(output_attentions=True)
    ValueError: output_attentions: expected False, ... got True; attn_implementation='eager'
call(cache=object())
    ValueError: cache: expected None, paged caches are not supported, got object
call(attention_mask=torch.ones(2, 6))
    ValueError: attention_mask: expected None or four dimensions ... got shape (2, 6)
call(position_bias=BIAS, cu_seq_lens_q=OFFSETS_OF_TWO, cu_seq_lens_k=OFFSETS_OF_TWO, **LENGTHS)
    ValueError: position_bias: expected None for packed sequences
call(sinks=torch.zeros(4))
    ValueError: sinks: expected no such argument, ... got Tensor; attn_implementation='eager' knows
call(sliding_window=0)
    ValueError: sliding_window: expected None or at least 1, got 0
call(attention_mask=CAUSAL[..., :2])
    ValueError: attention_mask: ... unchanged, got a part of it, shape (0, 2, 6, 2)
call(position_bias=BIAS, attention_mask=of_padding())
    ValueError: position_bias: expected None for packed sequences and padding
call(indices=torch.zeros(2, 6, 3), attention_mask=of_padding())
    ValueError: indices: expected None for packed sequences and padding
call(block_indices=torch.zeros(2, 4, 6, 1))
    ValueError: block_indices: expected None where the layer has no indexer.block_size
call(cu_seq_lens_q=OFFSETS_OF_TWO)
    ValueError: cu_seq_lens_k: expected all of cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k or none,
    got None
call(**BY_OFFSETS | {"max_length_k": None})
    ValueError: max_length_k: expected all of cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k or none, got
call(**BY_OFFSETS | {"cu_seq_lens_k": [0, 12]})
    TypeError: cu_seq_lens_k: expected a torch.Tensor, got list
call(attention_mask=of_padding(), cu_seq_lens_q=OFFSETS_OF_TWO, cu_seq_lens_k=OFFSETS_OF_TWO, **LENGTHS)
    ValueError: cu_seq_lens_q: expected None beside a
call(attention_mask=MASK.bool(), cu_seq_lens_q=OFFSETS_OF_TWO, cu_seq_lens_k=OFFSETS_OF_TWO, **LENGTHS)
    ValueError: cu_seq_lens_q: expected None beside a
call(key=torch.zeros(4, 6, 8))
    ValueError: key: expected shape (batch, heads, rows, d), got shape (4, 6, 8)
call(value=torch.zeros(3, 4, 6, 8))
    ValueError: value: expected a batch of 1 or 2, got shape (3, 4, 6, 8)
call(attention_mask={"full_attention": None})
    TypeError: attention_mask: expected a torch.Tensor, got dict
call(s_aux=0.0)
    TypeError: s_aux: expected a torch.Tensor, got float
call(s_aux=torch.zeros(3))
    ValueError: s_aux: expected shape (nheads,)
call(attention_mask=torch.ones(2, 1, 5, 6, dtype=torch.bool))
    ValueError: attention_mask: expected a shape that broadcasts
call(attention_mask=MASK.to(torch.int32))
    TypeError: attention_mask: expected bool ... got torch.int32
call(attention_mask=MASK.to(torch.int64))
    TypeError: attention_mask: expected bool ... got torch.int64
call(attention_mask=MASK.to(torch.uint8))
    TypeError: attention_mask: expected bool ... got torch.uint8
call(position_bias=[])
    TypeError: position_bias: expected a torch.Tensor, got list
call(indices=[0])
    TypeError: indices: expected a torch.Tensor, got list
call(indices=torch.zeros(2, 5, 3))
    ValueError: indices: expected shape (2, 6, selected), got shape (2, 5, 3)
call(indices=torch.full((2, 6, 1), 6))
    ValueError: indices: expected numbers below 6, got 6 to 6
call(**BY_OFFSETS | {"cu_seq_lens_k": torch.tensor([0.0, 12.0])})
    TypeError: cu_seq_lens_k: expected int32, got torch.float32
call(sliding_window=4.0)
    TypeError: sliding_window: expected None or an int, got 4.0
""")
def test_refused(call: str, error: str) -> None:
    """Masks of integers could be either kind: 1 = may attend, or 0 is added."""
    assert_refused(call, error, globals())


def test_errors_beside_right_numbers_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Tensor, "scatter", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        call(indices=torch.full((2, 6, 1), 5))


def test_models_that_would_not_ask_us_are_refused() -> None:
    config = transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1)
    with pytest.raises(ValueError, match="attn_implementation: expected 'eager' or 'sdpa' for BloomForCausalLM"):
        model_of(config, ours.NAME)


def test_weights_are_refused() -> None:
    batch = batch_of("dense")
    assert model_of(CONFIGS["Llama"], ours.NAME)(**batch, output_attentions=False).loss.isfinite()
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        model_of(CONFIGS["Llama"], ours.NAME)(**batch, output_attentions=True)


def test_packed_positions_that_the_mask_does_not_have_are_refused() -> None:
    """Beside a cache or a mask transformers does not look for sequences, and they would see each other."""
    model, batch = model_of(CONFIGS["Llama"], ours.NAME), batch_of("packed")
    packed, one = batch["position_ids"], torch.arange(ROWS).repeat(BATCH, 1)
    for more in ({"use_cache": True}, {"attention_mask": torch.ones(BATCH, ROWS, dtype=torch.long)}):
        positions = one.clone()
        assert model(**{**batch, **more, "position_ids": positions}).loss.isfinite()
        positions.copy_(packed)
        with pytest.raises(ValueError, match="position_ids: expected one sequence in each row, as in the mask"):
            model(**{**batch, **more, "position_ids": positions})


def test_unknown_arguments_that_are_none() -> None:
    """Models hand on all that their forward passes might have been given."""
    torch.manual_seed(0)
    plain, _ = call()
    torch.manual_seed(0)
    out, _ = call(sinks=None, position_ids=torch.arange(6), num_items_in_batch=torch.tensor(3))
    assert torch.equal(out, plain)


def test_layers_have_to_say_whether_they_are_causal() -> None:
    q = torch.randn(2, 4, 6, 8)
    silent: Any = SimpleNamespace()
    with pytest.raises(ValueError, match="is_causal: expected True or False where there is no mask, got None"):
        ours.attend(silent, q, q, q, None)
    out, _ = ours.attend(silent, q, q, q, of_causal())
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("said_by", ["mask", "layer"])
def test_the_stricter_of_mask_and_layer_holds(said_by: str) -> None:
    """Causality and windows, whichever of both says them."""
    q = torch.randn(2, 4, 6, 8)
    layer: Any = SimpleNamespace(is_causal=said_by == "layer")
    window = masking_utils.sliding_window_causal_mask_function(3)
    mask = of_causal(mask_function=window) if said_by == "mask" else of_causal()
    out, _ = ours.attend(layer, q, q, q, mask, sliding_window=3 if said_by == "layer" else None)
    seen = masking_utils.sdpa_mask(2, 6, 6, mask_function=window, allow_is_causal_skip=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, seen).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_one_entry_of_queries_for_all_and_any_strides() -> None:
    """Eager layers broadcast, too, and copy."""
    q, k = torch.randn(1, 4, 6, 8), torch.randn(3, 4, 8, 5).transpose(-1, -2)
    layer: Any = SimpleNamespace(is_causal=False)
    out, _ = ours.attend(layer, q, k, k, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q.expand(3, -1, -1, -1), k, k).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_other_implementations_are_left_alone() -> None:
    """And registering twice wraps once."""
    ours.register()
    check: Any = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert not hasattr(check.__wrapped__, "__wrapped__")
    assert model_of(CONFIGS["Llama"], "sdpa").config._attn_implementation == "sdpa"
    model = model_of(CONFIGS["GPT-OSS"], "eager")
    model.set_attn_implementation(ours.NAME)
    assert model.config._attn_implementation == ours.NAME


def test_deterministic_as_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, "flash_attn_func")
    for mode in (True, False):
        torch.use_deterministic_algorithms(mode)
        call()
    assert [x["deterministic"] for x in calls] == [True, False]
