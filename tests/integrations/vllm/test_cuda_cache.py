"""What one layer on a GPU, without one, stores in its cache, and by what it multiplies an 8-bit one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from trunkattn.integrations.vllm import cuda_impl, versions
from trunkattn.reference import paged_attention

from .fakes import DIM, HEADS, KV_HEADS, ONE, PAGE, PAGES, SCALE, FlashRecorder, make_batch, make_builder, make_layer

pytestmark = pytest.mark.usefixtures("gpu_engine")


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_keys_and_values_are_written_by_vllm(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_impl._custom_ops, "reshape_and_cache_flash", lambda *arguments: calls.append(arguments))
    layer, slots = make_layer(cache=cache), torch.arange(5)
    kv_cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8 if cache == "fp8" else torch.bfloat16)
    key, value = torch.randn(2, 8, KV_HEADS, DIM)
    layer.do_kv_cache_update(ONE, key, value, kv_cache, slots)
    ((*tensors, dtype, k_scale, v_scale),) = calls
    assert tensors[0] is key
    assert tensors[1] is value
    assert tensors[4] is slots
    assert (dtype, k_scale, v_scale) == (cache, ONE._k_scale, ONE._v_scale)
    assert tensors[2].dtype == kv_cache.dtype
    assert tensors[2].shape == tensors[3].shape == (PAGES, PAGE, KV_HEADS, DIM)
    assert tensors[3].data_ptr() == tensors[2].data_ptr() + DIM * kv_cache.itemsize


def test_scales_that_are_loaded_again(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    """A full graph reads them where vLLM changes them. What has no scales to load is given a number, and no launch."""
    layer = make_layer(cache="fp8")
    assert layer._scales(ONE) == {"k_scale": 1.0, "v_scale": 1.0}
    assert make_layer()._scales(ONE) == {}
    numbers = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
    loaded = SimpleNamespace(quant_method=object(), _k_scale=torch.ones(()), _v_scale=torch.ones(()), **numbers)
    given = layer._scales(loaded)
    assert given["k_scale"] is loaded._k_scale and given["v_scale"] is loaded._v_scale
    builder = make_builder(gpu_engine, layer)
    batch = make_batch([1, 1], [20, 40])
    step, (module,) = builder.build(0, batch), builder.modules.values()
    query = torch.randn(2, HEADS, DIM).to(torch.bfloat16)
    table = batch.block_table_tensor.where(batch.block_table_tensor < PAGES, 0)
    for k_scale, v_scale in ((1.0, 1.0), (0.25, 3.0)):
        loaded._k_scale.fill_(k_scale)
        loaded._v_scale.fill_(v_scale)
        out = layer.forward(loaded, query, query, query, module.kv_cache, step, torch.empty_like(query))
        keys, values = (cache.float() for cache in versions.split_cache(module.kv_cache, DIM, layer.cache_dtype))
        expected, _ = paged_attention(
            query, keys * k_scale, values * v_scale, table, batch.seq_lens, batch.query_start_loc, sm_scale=SCALE
        )
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    numbers["_k_scale_float"] = 0.5
    copied = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.ones(()), **numbers)
    assert layer._scales(copied) == {"k_scale": copied._k_scale, "v_scale": 1.0}, "from another model's layer"
