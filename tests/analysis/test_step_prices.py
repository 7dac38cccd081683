"""The parts of a step's price, by first principles."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.analysis.replays import PRICES
from trunkattn.analysis.pricing import prices as pricing
from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.analysis.pricing.prices import DecodeBatch, Prices

SHAPE, TIMES = PRICES.shape, PRICES.times  # Llama-3-8B on an H100
TWO_CARDS = replace(PRICES, tensor_parallel=2)


def documents(length: int, own: int) -> DecodeBatch:
    """Four documents of `length` tokens, each with 8 sequences that have `own` tokens more; pages have 16 tokens."""
    pages = -(-(length + own) // 16)
    table = np.arange(32 * pages, dtype=np.int32).reshape(32, pages)
    for row in range(32):
        table[row, : length // 16] = table[row // 8 * 8, : length // 16]
    return DecodeBatch.of(table, np.full(32, length + own, np.int32), 16)


def test_attention_of_a_step_is_scaled_to_what_a_step_like_it_takes() -> None:
    def counts(own: int) -> tuple[int, int]:
        return 32 * (4096 + own), 4 * 4096 + 32 * own

    owns = range(200, 250, 7)
    told = [PRICES.attention(documents(4096, own)) for own in owns]
    tokens, unique = np.array([counts(own) for own in owns]).T
    one_by_one, shared = PRICES.scaled(told[0], counts(200), tokens, unique)
    assert (one_by_one[0], shared[0]) == pytest.approx(told[0])
    np.testing.assert_allclose(one_by_one, [each.one_by_one_us for each in told], rtol=1e-9)
    np.testing.assert_allclose(shared, [each.shared_us for each in told], rtol=0.03)


def test_a_cache_of_8_bits_halves_what_flash_attention_reads_and_not_what_it_computes() -> None:
    tokens, unique, token_bytes = 10**6, 10**5, 2 * 8 * 128 * 2
    computed_us = tokens * token_bytes / TIMES.flash_keys_per_us
    for dtype, share in (("auto", 1), ("float8_e4m3fn", 0.5)):
        read_us = share * unique * token_bytes / TIMES.flash_bytes_per_us
        found = replace(PRICES, kv_cache_dtype=dtype).flash_us(tokens, unique)
        assert found == pytest.approx(TIMES.flash_us + read_us + computed_us)


def test_shares_of_what_is_read_follow_from_the_windows() -> None:
    """Half of the layers see 128 tokens, which are no shared ones."""
    prices = Prices(model_shape("gpt-oss-20b"), PRICES.card)
    total, unique = 32 * 4496, 4 * 4096 + 32 * 400
    seen = 32 * 128
    expected = (seen + total) / (2 * total), (seen + unique) / (2 * unique)
    assert prices.read_shares(documents(4096, 400)) == pytest.approx(expected)
    assert PRICES.read_shares(documents(4096, 400)) == (1, 1)


def test_attention_of_layers_with_windows_takes_what_they_see() -> None:
    """Half of the layers see 128 tokens, where sharing saves nothing."""
    prices, batch = Prices(model_shape("gpt-oss-20b"), PRICES.card), documents(4096, 400)
    seen, total, unique = 32 * 128, 32 * 4496, 4 * 4096 + 32 * 400
    found, near, far = prices.attention(batch), prices.layer(batch, 128), prices.layer(batch)
    expected = 12 * (prices.flash_us(seen, seen) + prices.flash_us(total, unique))
    assert found.one_by_one_us == pytest.approx(expected)
    assert found.shared_us == pytest.approx(12 * (near.shared_us + far.shared_us))
    assert near.shared_us < far.shared_us / 4


@pytest.mark.parametrize("optimize", [0, 1])
def test_attention_that_no_kernel_computes_is_refused_at_once(optimize: int) -> None:
    """As well under `python -O`, which leaves assertions out."""
    source = Path(pricing.__file__).read_text(encoding="utf-8")
    names = dict(vars(pricing))
    exec(compile(source, pricing.__file__, "exec", optimize=optimize), names)
    with pytest.raises(ValueError, match="head_dim 1000: expected at most 256"):
        names["Prices"](replace(SHAPE, head_dim=1000), PRICES.card)


def test_attention_of_prompts_takes_its_arithmetic() -> None:
    """Two products, each of a multiplication and an addition, of all heads and layers."""
    for name, numbers in (("llama-3-8b", 128 + 128), ("deepseek-v3", 576 + 512)):
        shape = model_shape(name)
        prices = Prices(shape, PRICES.card)
        flops = 1000 * 2 * numbers * shape.num_qo_heads * shape.num_layers
        assert prices.prompt_attention_us(1000) == pytest.approx(flops / (0.7 * TIMES.flops_per_us))
        both = Prices(shape, PRICES.card, tensor_parallel=2)
        assert both.prompt_attention_us(1000) == pytest.approx(prices.prompt_attention_us(1000) / 2)


@pytest.mark.parametrize(("decodes", "prompt_tokens", "sampled"), [(1, 0, 1), (300, 0, 300), (20, 2000, 21)])
def test_products_with_weights_take_their_bytes_or_their_arithmetic(
    decodes: int, prompt_tokens: int, sampled: int
) -> None:
    """The output layer's products are made only for sequences that get a token. Where both times are alike, the step
    takes a little longer than either."""
    found = PRICES.other(sampled, decodes, prompt_tokens)
    tokens, output = decodes + prompt_tokens, 4096 * 128_256
    read_us = SHAPE.bytes_read(tokens) / PRICES.card.model.times.bytes_per_us
    rate = TIMES.prompt_flops_per_us if prompt_tokens else TIMES.flops_per_us
    flops_us = 2 * ((SHAPE.numbers_used() - output) * tokens + output * sampled) / rate
    assert max(read_us, flops_us) < found.weights < 1.2 * max(read_us, flops_us)
    assert found.sampling == pytest.approx(sampled * TIMES.sequence_us)
    assert found.layers == pytest.approx(32 * TIMES.layer_us)
    assert found.prompts == (TIMES.prompt_us if prompt_tokens else 0)
    assert PRICES.other_us(sampled, decodes, prompt_tokens) == pytest.approx(sum(found))
    both = TWO_CARDS.other(sampled, decodes, prompt_tokens)
    assert both.weights == pytest.approx(found.weights / 2)
    reduced = 2 * tokens * 4096 * 2  # bytes of the results of attention and of the layer's other half
    assert both.layers - found.layers == pytest.approx(32 * reduced / 300_000)
    assert (both.sampling, both.prompts) == (found.sampling, found.prompts)
