"""Every causal language model type of transformers is answered as `generate` answers, or refused in plain words."""

import pytest

from . import every_model

TYPES = every_model.config_classes()


@pytest.mark.models
@pytest.mark.parametrize("model_type", TYPES)
def test_equal_or_refused(model_type: str) -> None:
    outcome = every_model.try_type(TYPES[model_type])
    assert outcome.result in ("equal", "refused"), outcome
    if outcome.result == "refused":
        assert outcome.detail.startswith("model='PATH'") and "\n" not in outcome.detail
        assert every_model.reason_of(outcome.detail)


def test_the_page_says_what_the_results_say() -> None:
    assert every_model.DOCS_PAGE.read_text() == every_model.page(), "run `python -m tests.models.every_model --page`"


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "deepseek_v3", "bert"])
def test_a_few_types(model_type: str) -> None:
    """A window that only the mask knows, sinks, a latent cache, a refusal; all types: `make test-models`."""
    assert every_model.try_type(TYPES[model_type]).result == ("refused" if model_type == "bert" else "equal")
