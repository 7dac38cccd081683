"""Groups with layers of draft models, on what passes for a GPU: which steps are planned for them."""

import pytest
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig

from .fakes import FlashRecorder, make_batch, make_builder, make_layer, run_step


@pytest.mark.parametrize(
    ("tag", "v2", "runs"),
    [
        ("draft_model", False, False),
        ("draft_model", True, False),
        ("eagle_head", False, False),
        ("eagle_head", True, True),
    ],
)
def test_layers_that_draft_beside_the_models_own(
    tag: str, v2: bool, runs: bool, gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM puts them into one group, and gives them a builder of their own, too. Model runner V2 drafts an EAGLE's
    first token in the step of the model: then its layers have a plan there. Otherwise they are not counted either."""
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", v2)
    own = make_layer(), make_layer()
    with set_model_tag(tag):
        drafting = make_layer(window=16)
    builder = make_builder(gpu_engine, *own, drafting)
    expected = {own[0].layer_spec: 2} | ({drafting.layer_spec: 1} if runs else {})
    assert dict(builder.layers) == expected
    step, errors = run_step(builder, make_batch([1, 1, 30], [40, 57, 0]))
    assert step.plans.keys() == expected.keys() and max(errors) < 0.02


@pytest.mark.parametrize("tag", ["draft_model", "eagle_head"])
def test_a_group_that_only_drafts(
    tag: str, gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the model's own layers have another back end. Model runner V1 also asks it for the model's steps, which
    none of its layers runs."""
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False)
    with set_model_tag(tag):
        builder, batch = make_builder(gpu_engine, make_layer()), make_batch([1, 1], [40, 57])
    assert not builder.build(0, batch).plans and not builder.build_for_cudagraph_capture(batch).plans
    assert not builder.attentions and not builder.stats.unshared, "nothing is allocated or counted"
    assert builder.build_for_drafting(batch, 0).plans
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    with set_model_tag(tag):
        assert make_builder(gpu_engine, make_layer()).build(0, batch).plans
