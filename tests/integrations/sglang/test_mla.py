"""Latent attention over SGLang's own pool and layers, against the float64 reference. Prompts run elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trunkattn.integrations.sglang import cuda, layers
from trunkattn.integrations.sglang.backend import TrunkBackend
from trunkattn.integrations.sglang.route import choose

from .card import make_backend, replay
from .fakes import HEADS, LATENT_DIM, PAGE, ROW, ROWS, Step, latent_error, make_latent_runner

DECODES = Step([1, 1, 1], [40, 57, 33])
FIVE = Step([1] * 5, [130, 131, 132, 133, 134], shared=8, padding=3)


def latent_layers(runner: Any) -> list[Any]:
    return layers.attention_layers(runner)


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_decodes_equal_the_oracle(page: int, kv_dtype: torch.dtype) -> None:
    runner = make_latent_runner(2, page=page, kv_dtype=kv_dtype)
    backend, batch = choose(runner), DECODES.batch(runner)
    assert type(backend) is TrunkBackend
    backend.init_forward_metadata(batch)
    assert len(latent_layers(runner)) == 2, "those of prompts are left out"
    for layer in latent_layers(runner):
        assert latent_error(backend, runner, layer, batch) < 1e-4


def test_graphs_with_padding(card: None) -> None:
    runner = make_latent_runner(2)
    backend = make_backend(runner)
    first = Step([], [], padding=ROWS).batch(runner)
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    for _ in range(2):
        backend.init_forward_metadata_in_graph(first)
        for layer in latent_layers(runner):
            q, k = torch.randn(ROWS, HEADS * ROW), torch.randn(ROWS, 1, ROW)
            backend.forward_decode(q, k, k[..., :LATENT_DIM], layer, first)
    plans = dict(backend._plans)
    for step in (FIVE, Step([1], [40]), Step([1] * 3, [60, 61, 62], padding=1)):
        batch = step.batch(runner)
        replay(backend, batch)
        for layer in latent_layers(runner):
            assert latent_error(backend, runner, layer, batch) < 1e-4
    assert backend._plans == plans, "the graphs' plans"
    ((attention, _),) = plans.values()
    assert (attention.config.latent_dim, attention.config.head_dim, attention.host_planned) == (LATENT_DIM, ROW, 0)
    assert attention.limits.num_pages == len(runner.token_to_kv_pool.get_key_buffer(0)) // PAGE
    assert isinstance(backend, cuda.TrunkCudaBackend)


def test_what_sharing_saved_is_counted() -> None:
    runner = make_latent_runner(2)
    backend = TrunkBackend(runner)
    batch = Step([1] * 6, list(range(130, 136)), shared=8).batch(runner)
    backend.init_forward_metadata(batch)
    for layer in latent_layers(runner):
        latent_error(backend, runner, layer, batch)
    backend.init_forward_metadata(batch)
    assert dict(backend.stats.paths) == {"decode": 1}
    assert backend.traffic.saved >= 2 * 5 * 8 * PAGE * ROW * 4, "two layers, five rows of eight pages in float32"


def test_an_output_that_sglang_gives() -> None:
    runner = make_latent_runner()
    (layer,) = latent_layers(runner)
    backend, batch = TrunkBackend(runner), DECODES.batch(runner)
    backend.init_forward_metadata(batch)
    batch._attn_output = torch.full((3, HEADS * LATENT_DIM), torch.nan)
    out = backend.forward_decode(torch.randn(3, HEADS * ROW), None, None, layer, batch)
    assert out.data_ptr() == batch._attn_output.data_ptr() and out.isfinite().all()


def refused(**changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        choose(make_latent_runner(**changes))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_prompts_here_are_refused() -> None:
    message = refused(options={"get_attention_backends": lambda: ("trunk", "trunk")})
    assert "prompts of latent attention (MLA), only its decoding: add prefill_attention_backend=fa3" in message


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("dcp_size", 2, "decode context parallelism"),
        ("speculative_algorithm", "EAGLE", "speculative decoding"),
        ("enable_page_major_kv_layout", True, "the page-major KV layout"),
    ],
)
def test_options_are_refused(option: str, value: Any, words: str) -> None:
    assert words in refused(options={option: value})


def test_pools_are_refused() -> None:
    sparse = SimpleNamespace(use_dsa=True, page_size=PAGE)
    assert "sparse attention, which selects keys for each query" in refused(token_to_kv_pool=sparse)
    other = type("MLATokenToKVPoolFP4", (), {"use_dsa": False, "page_size": PAGE})()
    assert "MLATokenToKVPoolFP4, only MLATokenToKVPool" in refused(token_to_kv_pool=other)
    assert "pages of 16 tokens in the pool, beside 64" in refused(page_size=64)
