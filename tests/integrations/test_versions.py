"""What the versions of vLLM differ in, without a vLLM."""

from types import SimpleNamespace

import pytest
import torch

from trunkattn.integrations.vllm import versions


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", (0, 32)),
        ("0.32.0+cpu", (0, 32)),
        ("0.33.0rc1", (0, 33)),
        ("1.2.3", (1, 2)),
        ("0.33.1.dev4+gabc", (0, 33)),
        ("0.1.dev12345+g0abcdef", None),
        ("0.12.dev3", None),
        ("0.32.0garbage", None),
        ("dev", None),
    ],
)
def test_parse(version: str, release: tuple[int, int] | None) -> None:
    assert versions.TESTED.parse(version) == release


@pytest.mark.parametrize("version", ["0.25.3", "0.9.2", "0.20.0+cpu"])
def test_an_older_version_is_refused(version: str) -> None:
    reason = versions.refusal(version)
    assert reason is not None
    assert "\n" not in reason
    assert version in reason
    assert "0.26 to 0.33" in reason
    assert "upgrade vLLM" in reason


@pytest.mark.parametrize("version", ["0.26.0", "0.29.0+cpu", "0.33.0"])
def test_a_tested_version_is_neither_refused_nor_warned_of(version: str) -> None:
    assert versions.refusal(version) is None
    assert versions.TESTED.caution(version) is None


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.1.dev1+g0abc"])
def test_a_newer_or_unknown_version_is_warned_of(version: str) -> None:
    assert versions.refusal(version) is None
    warning = versions.TESTED.caution(version)
    assert warning is not None
    assert "\n" not in warning
    assert version in warning
    assert "0.26 to 0.33" in warning


def engine_options(**changes: object) -> SimpleNamespace:
    """An engine's configuration with everything off; a dotted name in `changes` turns something on."""
    options = {
        "parallel_config.decode_context_parallel_size": 1,
        "parallel_config.prefill_context_parallel_size": 1,
        "attention_config.use_non_causal": False,
        "model_config.is_mm_prefix_lm": False,
        "model_config.rswa_window": None,
        "model_config.is_diffusion": False,
    } | changes
    sections: dict[str, dict[str, object]] = {}
    for path, value in options.items():
        section, name = path.split(".")
        sections.setdefault(section, {})[name] = value
    return SimpleNamespace(**{section: SimpleNamespace(**values) for section, values in sections.items()})


def test_no_option_is_refused_when_all_are_off() -> None:
    assert versions.refused_options(engine_options()) == []


def test_an_option_that_a_version_lacks_is_off() -> None:
    assert versions.refused_options(SimpleNamespace(model_config=None)) == []


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("parallel_config.prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("attention_config.use_non_causal", True, "non-causal"),
        ("model_config.is_mm_prefix_lm", True, "both directions over image tokens, unless language_model_only=True"),
        ("model_config.rswa_window", 128, "reference sliding-window"),
        ("model_config.is_diffusion", True, "diffusion language models"),
    ],
)
def test_an_option_that_is_on_is_refused(path: str, value: object, word: str) -> None:
    (reason,) = versions.refused_options(engine_options(**{path: value}))
    assert word in reason
    assert f"{path}={value}" in reason


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("use_alibi_sqrt", False, True),
        ("anything", None, True),
        ("chunk_lookback", -1, True),
        ("chunk_lookback", 1, False),
        ("anything", -1, False),
        ("anything", 0.5, False),
        ("anything", True, False),
    ],
)
def test_is_off(name: str, value: object, off: bool) -> None:
    assert versions.is_off(name, value) is off


def test_options_that_only_a_cpu_refuses() -> None:
    options = engine_options(**{"parallel_config.decode_context_parallel_size": 2})
    assert versions.refused_options(options) == []
    (reason,) = versions.refused_options(options, versions.REFUSED_CPU_OPTIONS)
    assert "decode context parallelism (parallel_config.decode_context_parallel_size=2)" in reason


def test_options_that_only_a_gpu_refuses() -> None:
    options = engine_options(**{"cache_config.calculate_kv_scales": True})
    assert versions.refused_options(options) == []
    (reason,) = versions.refused_options(options, versions.REFUSED_GPU_OPTIONS)
    assert "cache_config.calculate_kv_scales=True" in reason


@pytest.mark.parametrize(("speculative", "expected"), [(None, 1), (SimpleNamespace(num_speculative_tokens=3), 4)])
def test_decode_query_len(speculative: object, expected: int) -> None:
    assert versions.decode_query_len(SimpleNamespace(speculative_config=speculative)) == expected


def test_blocks_are_those_of_the_smallest_cache() -> None:
    layers = [SimpleNamespace(kv_cache=torch.empty(blocks, 2, 16, 8)) for blocks in (9, 7)]
    assert versions.num_blocks(layers) == 7


def test_arguments_that_a_version_lacks_are_left_out() -> None:
    def newer(head_size: int, has_sinks: bool = False) -> tuple[int, bool]:
        return head_size, has_sinks

    def older(head_size: int) -> int:
        return head_size

    assert versions.call_with_known(newer, head_size=64, has_sinks=True) == (64, True)
    assert versions.call_with_known(older, head_size=64, has_sinks=True) == 64


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_stride_orders_name_the_axes_of_the_cache(layout: str) -> None:
    """NHD: blocks, tokens, heads; HND: blocks, heads, tokens. An axis of layers is counted first, and lies inside."""
    names = "BHNC"
    order = "".join(names[axis] for axis in versions.STRIDE_ORDERS[layout, False])
    assert order == {"NHD": "BNHC", "HND": "BHNC"}[layout]
    order = "".join(("L" + names)[axis] for axis in versions.STRIDE_ORDERS[layout, True])
    assert order == {"NHD": "BLNHC", "HND": "BHLNC"}[layout]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_split_cache_gives_views_in_any_layout(order: tuple[int, ...]) -> None:
    """Blocks outermost with tokens or heads inside, and heads outermost."""
    blocks, heads, tokens, dim = shape = (5, 3, 16, 8)
    assert versions.kv_cache_shape(blocks, tokens, heads, dim) == (*shape[:3], 2 * dim)
    stored = torch.randn([(*shape[:3], 2 * dim)[axis] for axis in order])
    logical = stored.permute([order.index(axis) for axis in range(4)])
    keys, values = versions.split_cache(logical, dim, torch.float32)
    assert keys.shape == values.shape == (blocks, tokens, heads, dim)
    assert torch.equal(keys, logical[..., :dim].transpose(1, 2))
    assert torch.equal(values, logical[..., dim:].transpose(1, 2))
    keys.fill_(1.0)
    assert (logical[..., :dim] == 1.0).all()


def test_numbers_of_another_type_are_not_read_as_the_expected_one() -> None:
    stored = torch.tensor([1.5, -2.0]).to(torch.bfloat16).repeat(2, 1, 16, 1)
    for cache in versions.split_cache(stored, 1, torch.float16):
        assert cache.dtype == torch.bfloat16, "BatchAttention.run refuses it"


def test_split_cache_reads_bytes_as_fp8() -> None:
    stored = torch.tensor([1.5, -2.0, 0.25, 448.0]).to(torch.float8_e4m3fn).repeat(2, 1, 16, 1)
    keys, values = versions.split_cache(stored.view(torch.uint8), 2, torch.float8_e4m3fn)
    assert keys[1, 3, 0].tolist() == [1.5, -2.0]
    assert values[1, 3, 0].tolist() == [0.25, 448.0]
