"""All model classes of transformers beside eager: one of each mechanism and refusal, and the table of the page."""

import re

import pytest
import transformers

from flash_attn_cute.integrations import transformers as ours
from tests.lib import transformers_models as models
from tests.lib.tiers import tiered

ours.register()

REPRESENTATIVES = [
    ("pegasus_x", "PegasusXForConditionalGeneration", "sequence to sequence", "equal"),  # causal by its mask alone
    ("t5gemma", "T5GemmaForConditionalGeneration", "sequence to sequence", "equal"),  # windows counted in two ways
    ("deepseek_v32", "DeepseekV32ForCausalLM", "causal", "equal"),  # selects keys
    ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", "causal", "equal"),  # selects blocks of keys
    ("doge", "DogeForCausalLM", "causal", "equal"),  # makes its mask a bias
    ("llama4_text", "Llama4ForCausalLM", "causal", "equal"),  # chunks
    ("inkling_text", "InklingForCausalLM", "causal", "equal"),  # keys of any strides, a bias of positions
    ("modernbert", "ModernBertForMaskedLM", "masked", "equal"),  # windows on both sides
    ("blt", "BltForCausalLM", "causal", "as sdpa"),
    ("nllb-moe", "NllbMoeForConditionalGeneration", "sequence to sequence", "supports neither"),
    ("git", "GitForCausalLM", "causal", "which does not use"),
    ("bloom", "BloomForCausalLM", "causal", "which does not use"),
]


@pytest.mark.parametrize(("model_type", "name", "family", "expected"), REPRESENTATIVES)
def test_one_of_each_kind(model_type: str, name: str, family: str, expected: str) -> None:
    outcome = models.try_one(model_type, name, family)
    if expected in ("equal", "as sdpa"):
        assert outcome.kind == expected, outcome.why
    else:
        assert outcome.kind == "refused", outcome.why
        assert expected in outcome.why


def test_the_page_has_all_models() -> None:
    """The page has as many of each family as transformers lists, and none that is wrong."""
    page = models.on_page()
    version = re.search(r"With transformers (\S+):", page)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"the table is that of transformers {version[1]}, not {transformers.__version__}")
    for family in models.FAMILIES:
        row = re.search(rf"^\| {family} \|(.*)\|$", page, re.MULTILINE)
        assert row is not None
        assert sum(int(n) for n in row[1].split("|")) == len(list(models.classes(family)))
    assert "raises" not in page
    assert "differs" not in page


@pytest.mark.parametrize("every", tiered({"all": 1, "some": 5}, rare=["all"], values=True))
def test_the_table_is_what_becomes_of_them(every: int) -> None:
    outcomes = models.try_all([], every)
    assert {x.kind for x in outcomes.values()} <= {"equal", "as sdpa", "refused", "not built"}
    found, page = models.table(outcomes), models.on_page()
    on_page = models.types_by_outcome(page)
    assert all(types <= on_page[what] for what, types in models.types_by_outcome(found).items())
    assert every > 1 or found == page, "python -m tests.lib.transformers_models writes it"
