"""Every model class of transformers that builds from a tiny configuration, beside the same model in eager mode.

``python -m tests.lib.transformers_models`` tries all of them, in half a minute on one core, and writes the table of
docs/transformers.md. With names of model types it tries these alone, and prints what becomes of each.
"""

import argparse
import copy
import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from flash_attn_cute.integrations import transformers as ours

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- models: written by python -m tests.lib.transformers_models -->", "<!-- end of models -->"

BATCH, ROWS, VOCABULARY, LAYERS = 2, 12, 97, 2
FAMILIES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}

# What an attribute of a configuration becomes if it is a larger integer, by the first pattern that its name matches;
# None: it stays.
SIZES: list[tuple[str, int | None]] = [
    (
        r"layer_idx|layer_index|_id$|_ids$|token|dtype|interval|_every|_step|_type|frequency|num_labels|num_channels",
        None,
    ),
    (r"vocab|num_embeddings$", VOCABULARY),
    (r"self_attends_per_block", 1),
    (r"num_filters", 2),  # doubled by each stage
    (r"latents", 32),
    (r"expert_layer|moe_layer_start|first_k_dense|num_dense|n_dense|n_group|topk_group", 1),
    (r"experts_per_tok|num_experts_per|moe_k|top_k|topk_experts|moe_topk", 2),
    (r"index_topk|shared_expert", None),
    (r"num_.*experts|n_routed|moe_num|num_local_experts|n_experts|expert_num", 4),
    (r"kv_heads|key_value_heads|num_kv|n_kv|multi_query_group|num_key_value|attention_groups", 2),
    (r"head_dim|d_kv|dim_head|attention_head_size|qk_.*dim|head_size|d_head|v_head|rotary_dim", 8),
    (r"heads|n_head|attention_head", 4),
    (r"num_.*layers|n_layer|encoder_layers|decoder_layers|layers$|depth|blocks$", LAYERS),
    (r"_rank", 16),
    (r"position|max_.*len|n_ctx|context_length|max_seq", 64),
    (r"image_size|img_size", 16),
    (r"patch_size", 8),
    (r"sliding_window|attention_window|window_size|attention_chunk_size", 6),
    (r"intermediate|ffn|ff_dim|d_ff|inner|feed_forward|mlp_dim", 48),
    (r"hidden|d_model|embed|n_embd|dim$|_dim|emb|size$|channels|width", 32),
]
# Refused by transformers itself, for flash attention of any kind.
THEIR_OWN = r"`attn_implementation='flash_attn_cute'` is not supported"


class Outcome(NamedTuple):
    """Outcome of a model.

    "equal" to eager; "as sdpa", equal to sdpa where that is not equal to eager; "refused" in one sentence; "differs" or
    "raises", which are faults; "not built" in eager mode.
    """

    kind: str
    why: str = ""


def _small(name: str, value: int) -> int:
    for pattern, size in SIZES:
        if re.search(pattern, name):
            return value if size is None else min(size, value)
    return value


def shrink(config: Any) -> None:
    """Makes a configuration and those in it small, as far as the names of its attributes show how."""
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif isinstance(value, float) and re.search("drop", name):
            setattr(config, name, 0.0)
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, _small(name, value))
        elif isinstance(value, list) and layers is not None and len(value) == layers:
            kinds = [next(x for x in value if str(x) == kind) for kind in dict.fromkeys(map(str, value))]
            few = (kinds + value if len(kinds) > 1 else value)[:LAYERS]
            setattr(config, name, [_small(name, x) if type(x) is int else x for x in few])
        elif isinstance(value, dict) and ("mrope_section" in value or "rope_theta" in value):
            value["mrope_section"] = [2, 1, 1]  # of half of a head dimension of 8; rotations of one axis do not look
    for name, value in list(vars(config).items()):
        if name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(config, name, 90 + value % 7)
    absent = {"pad_token_id": 0, "vocab_size": VOCABULARY, "head_dim": 8, "num_key_value_heads": 4}
    for name, size in absent.items():
        if vars(config).get(name, 0) is None:
            setattr(config, name, size)
    if "kv_lora_rank" in vars(config):  # all heads have keys of their own there
        config.num_key_value_heads = config.num_attention_heads


def classes(family: str) -> Iterator[tuple[str, str]]:
    """The model types of a family and their classes, by name."""
    for model_type, name in sorted(getattr(modeling_auto, FAMILIES[family]).items()):
        yield model_type, name if isinstance(name, str) else name[0]


def build(cls: Any, config: Any, implementation: str) -> Any:
    """A model with the same random weights each time."""
    torch.manual_seed(1)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def inputs(config: Any, padding: str) -> dict[str, Any]:
    """Two rows of tokens, the second with padding on a side, or without a mask."""
    torch.manual_seed(2)
    batch: dict[str, Any] = {"input_ids": torch.randint(7, 80, (BATCH, ROWS))}
    mask = torch.ones(BATCH, ROWS, dtype=torch.long)
    mask[1, slice(8, None) if padding == "right" else slice(0, 4)] = 0
    if padding:
        batch["attention_mask"] = mask
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.randint(7, 80, (BATCH, 9))
    if hasattr(config, "use_cache") or hasattr(config.get_text_config(), "use_cache"):
        batch["use_cache"] = False
    return batch


@torch.no_grad()
def logits(model: Any, batch: dict[str, Any]) -> Tensor:
    """Logits of a model for a batch."""
    output: Tensor = model(**batch).logits
    return output


def difference(a: Tensor, b: Tensor, batch: dict[str, Any]) -> float:
    """The greatest difference of real rows, as a part of the greatest logit."""
    if "attention_mask" in batch and a.shape[:2] == batch["attention_mask"].shape:
        real = batch["attention_mask"].bool()
        a, b = a[real], b[real]
    return ((a - b).abs().max() / a.abs().max()).item()


def leak(model: Any, batch: dict[str, Any]) -> float:
    """How far earlier logits change with the last token."""
    key = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    changed = {**batch, key: batch[key].clone()}
    changed[key][:, -1] = 6
    return difference(logits(model, batch)[:, :-1], logits(model, changed)[:, :-1], {})


def sentence(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def refused_or_raises(error: Exception) -> Outcome:
    """A refusal is an error of ours, or one of transformers about the implementation."""
    is_ours = isinstance(error, (TypeError, ValueError)) and re.match(r"\w+(, \w+)*: expected ", str(error))
    is_theirs = isinstance(error, ValueError) and re.match(THEIR_OWN, str(error))
    return Outcome("refused" if is_ours or is_theirs else "raises", sentence(error))


def try_one(model_type: str, name: str, family: str) -> Outcome:
    """Compares a model class with eager: without a mask, with padding on either side, and with another last token."""
    try:
        cls = getattr(transformers, name)
        config = cls.config_class() if cls.config_class else transformers.CONFIG_MAPPING[model_type]()
        shrink(config)
        config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "model_type"})
        eager = build(cls, config, "eager")
        batches = {padding: inputs(eager.config, padding) for padding in ("", "right", "left")}
        expected = {padding: logits(eager, batch) for padding, batch in batches.items()}
    except Exception as error:
        return Outcome("not built", sentence(error))
    try:
        model = build(cls, config, ours.NAME)
        got = {padding: logits(model, batch) for padding, batch in batches.items()}
    except Exception as error:
        return refused_or_raises(error)
    off = {padding: difference(expected[padding], got[padding], batch) for padding, batch in batches.items()}
    wrong = [padding for padding, x in off.items() if not x < 1e-4]
    if wrong:
        sdpa = build(cls, config, "sdpa") if cls._supports_sdpa else None
        if sdpa and all(difference(logits(sdpa, batches[x]), got[x], batches[x]) < 1e-4 for x in wrong):
            return Outcome("as sdpa", ", ".join(f"padding on the {x}" if x else "no mask" for x in wrong))
        return Outcome("differs", ", ".join(f"{x or 'no mask'}: {off[x]:.1e}" for x in wrong))
    if family != "masked" and leak(model, batches[""]) > max(1e-5, 10 * leak(eager, batches[""])):
        return Outcome("differs", "a later token changes earlier logits")
    return Outcome("equal")


def reason(outcome: Outcome) -> str:
    """Why models are refused, in words of the page."""
    known = {
        "which does not use": "no use of transformers' attention interface",
        "which supports neither": 'neither `"sdpa"` nor flash attention is supported',
        "`attn_implementation=": "by transformers, as any flash attention",
    }
    return next((text for part, text in known.items() if part in outcome.why), outcome.why)


def table(outcomes: dict[tuple[str, str], Outcome]) -> str:
    """The page's table of all of them."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    names: dict[str, set[str]] = defaultdict(set)
    for (family, model_type), outcome in outcomes.items():
        counts[family][outcome.kind] += 1
        if outcome.kind == "refused":
            names[f"refused: {reason(outcome)}"].add(model_type)
        elif outcome.kind != "not built":
            names[f"{outcome.kind}{': ' * bool(outcome.why)}{outcome.why}"].add(model_type)
    kinds = ["equal", "as sdpa", "refused", "not built"]
    lines = [
        f"With transformers {transformers.__version__}:",
        "",
        f"| models | {' | '.join(kinds)} |",
        "|---" * 5 + "|",
    ]
    lines += [f"| {family} | {' | '.join(str(counts[family][kind]) for kind in kinds)} |" for family in FAMILIES]
    lines += ["", "| what becomes of them | model types |", "|---|---|"]
    lines += [f"| {what} | {', '.join(sorted(names[what]))} |" for what in sorted(names)]
    return "\n".join(lines)


def types_by_outcome(text: str) -> dict[str, set[str]]:
    """The last rows of a table, as ``table`` writes it: what becomes of which model types."""
    return {what: {*types.split(", ")} for what, types in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)}


def on_page() -> str:
    """The table that the page has."""
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def try_all(only: list[str], every: int = 1) -> dict[tuple[str, str], Outcome]:
    """The outcomes of all model classes, or those of some types, or of each so-many-th, by family and type."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(50)
    ours.register()
    outcomes = {}
    of_families = (itertools.product([x], classes(x)) for x in FAMILIES)
    for family, (model_type, name) in itertools.islice(itertools.chain(*of_families), 0, None, every):
        if not only or model_type in only:
            outcomes[family, model_type] = try_one(model_type, name, family)
    return outcomes


def main() -> None:
    """Tries models and writes the page, or prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", nargs="*", help="try these alone, and print")
    parser.add_argument("--print", action="store_true", help="print all, and write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = try_all(given.model_type)
    if given.model_type or given.print:
        for (family, model_type), outcome in outcomes.items():
            print(family, model_type, *outcome, sep="\t")
    else:
        text = PAGE.read_text()
        PAGE.write_text(text.replace(on_page(), table(outcomes)))


if __name__ == "__main__":
    main()
