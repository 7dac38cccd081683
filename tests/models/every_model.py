"""Every causal language model type of transformers, tiny and random: the engine's answer against `generate`.

    python -m tests.models.every_model             # run all; write results/models-cpu.json and docs/models.md
    python -m tests.models.every_model --page      # write the page from the results alone
    python -m tests.models.every_model llama phi3  # only print these

Each model has a prompt that is longer than its windows, computed in chunks. A type that the engine refuses must be
refused before any weight is loaded, with the path and a reason. `make test-models` asserts all of it.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from benchmarks.lib.report import write_result
from benchmarks.page.common import load, table
from trunkattn import LLM, SamplingParams
from trunkattn.engine.model.inspection import inspect_model

RESULT = "models-cpu"
DOCS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
VOCAB, WINDOW, PROMPT_TOKENS, NEW_TOKENS = 256, 8, 40, 12
MOST_PARAMETERS = 20_000_000
MAX_TIE_GAP = 1e-3  # logits closer than this may swap places: float32 sums in another order
LAYERS = 4

# Every name that configurations have for a size, and its tiny value. A configuration takes those that it has.
SIZES = MappingProxyType(
    {
        **dict.fromkeys(("vocab_size",), VOCAB),
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 64),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
        **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
        **dict.fromkeys(("head_dim", "qk_rope_head_dim"), 16),
        **{"kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 24, "v_head_dim": 20},
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
        **dict.fromkeys(("sliding_window", "attention_window_size"), WINDOW),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
        **dict.fromkeys(("first_k_dense_replace", "max_window_layers", "moe_layer_start_index"), 1),
        **dict.fromkeys(("use_sliding_window",), True),
        **dict.fromkeys(("pad_token_id",), 0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    }
)
SHARP = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q_b_proj",
    "kv_a_proj",
    "kv_b_proj",
    "qkv",
    "c_attn",
    "query",
    "lm_head",
    "embed_tokens",
    "wte",
    "embed_in",
    "embed_out",
)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
NO_INPUTS_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
# What else a type needs for a tiny configuration that is one, or that has the kinds of layers of the released models.
OVERRIDES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cohere_compass_text": {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
        },
        "cwm": {"bos_token_id": 1, "eos_token_id": 2},
        "dbrx": {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
        "gemma4_assistant": {"text_config": NO_INPUTS_PER_LAYER},
        "gemma4_unified_assistant": {"text_config": NO_INPUTS_PER_LAYER},
        "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
        "mamba2": {"num_heads": 8, "head_dim": 16},
        "mimo_v2_flash": {"head_dim": 24},  # of which a third is rotated, in pairs
        "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
        "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4},
        "phi4_multimodal": {
            "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "image_size": 28},
            "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "nemo_conv_channels": 32},
        },
        "zamba2": {"num_hidden_layers": 54},
        "zaya": {"num_experts_per_tok": 1},
    }
)


PAGE = """# Models

Written by `tests/models/every_model.py`, which tries every causal language model type of transformers {version} as a
tiny random model: {equal} types answer as transformers' own `generate` does, token by token, with prompts that are
longer than their windows. {refused} are refused before any weight is loaded, each with its reason. `make test-models`
runs it.

Each model is probed in the same way when it is loaded. So a new type needs no release, and a model whose configuration
asks for more than the tiny one of its type, such as other kinds of layers, is refused with the reason.

## Equal

{equal_table}

## Refused

{refused_table}
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a model type.

    Attributes:
        model_type: its name in transformers.
        result: "equal", "refused" (`detail` has the reason), "different" or "no reference".
        detail: a reason, or where the answers part.
        windows: sliding window of each layer.
    """

    model_type: str
    result: str
    detail: str = ""
    windows: tuple[int | None, ...] = ()


def config_classes() -> dict[str, type[PretrainedConfig]]:
    """Every causal language model type of the installed transformers."""
    return {config.model_type: config for config in sorted(_mapping(), key=lambda config: config.model_type)}


def _mapping() -> Any:
    return AutoModelForCausalLM._model_mapping.keys()


def tiny_config(config_class: type[PretrainedConfig]) -> Any:
    """The configuration with every size that it has made tiny."""
    overrides = OVERRIDES.get(config_class.model_type, {})
    known = _fields(config_class)
    sizes = {name: value for name, value in SIZES.items() if name in known and not _is_alias(config_class, name, known)}
    if "kv_lora_rank" in known:  # a latent cache is expanded for each query head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return config_class(**{**sizes, **overrides})


def _fields(config_class: type[PretrainedConfig]) -> set[str]:
    try:
        return {*config_class().to_dict(), *config_class.attribute_map}
    except Exception:  # its defaults do not fit each other
        return {*config_class.attribute_map, *getattr(config_class, "__annotations__", ())}


def _is_alias(config_class: type[PretrainedConfig], name: str, known: set[str]) -> bool:
    target = config_class.attribute_map.get(name)
    return target in SIZES and target in known and target != name


def try_model(config: Any, path: Path) -> Outcome:
    """The engine's greedy answer against transformers' own, for a prompt longer than every window."""
    config.save_pretrained(path)
    try:
        inspect_model(path, load_format="dummy")
    except ValueError as refusal:
        return Outcome(config.model_type, "refused", str(refusal).replace(str(path), "PATH"))
    model = sharp_model(config)
    model.save_pretrained(path)
    prompt = torch.randint(1, VOCAB, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    try:
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    except Exception as error:
        return Outcome(config.model_type, "no reference", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    expected = generated[0, PROMPT_TOKENS:].tolist()
    llm = LLM(path, num_pages=16, max_num_batched_tokens=23, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    found = llm.generate([prompt[0].tolist()], params)[0].outputs[0].token_ids
    windows = llm.info.geometry.windows
    if found == expected:
        return Outcome(config.model_type, "equal", "", windows)
    same = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = model(torch.cat([prompt, torch.tensor([expected[:same]], dtype=torch.int64)], 1)).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    if first - second < MAX_TIE_GAP:
        return Outcome(config.model_type, "equal", f"token {same} is a tie", windows)
    return Outcome(config.model_type, "different", f"from token {same} on: {found} instead of {expected}", windows)


def sharp_model(config: Any) -> Any:
    """Random weights, with logits that differ from token to token, and attention that matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count < MOST_PARAMETERS, f"{config.model_type}: {count} parameters; name its sizes in SIZES"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in SHARP) and parameter.dim() > 1:
                parameter.mul_(4.0)
            elif "sinks" in name:
                parameter.normal_()
    return model


def try_type(config_class: type[PretrainedConfig]) -> Outcome:
    """`try_model` of the type's tiny configuration, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return try_model(tiny_config(config_class), Path(folder))


def reason_of(detail: str) -> str:
    """The reasons of a refusal, without the path and the type."""
    return detail.partition(" is not supported: ")[2] or detail.partition(": ")[2]


def page() -> str:
    """docs/models.md."""
    found = load(RESULT)
    outcomes = [Outcome(**outcome) for outcome in found["models"]]
    equal = [outcome for outcome in outcomes if outcome.result == "equal"]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.result == "refused":
            by_reason[reason_of(outcome.detail)].append(outcome.model_type)
    rows = [(outcome.model_type, _windows(outcome.windows)) for outcome in equal]
    refused = [(", ".join(types), reason) for reason, types in sorted(by_reason.items(), key=lambda item: item[1])]
    return PAGE.format(
        version=found["versions"]["transformers"],
        equal=len(equal),
        refused=len(outcomes) - len(equal),
        equal_table=table(("type", "windows of its layers in the test"), rows, left=2),
        refused_table=table(("types", "reason"), refused, left=2),
    )


def _windows(windows: Any) -> str:
    kinds = {"full" if window is None else str(window) for window in windows}
    return "full" if kinds == {"full"} else ", ".join("full" if window is None else str(window) for window in windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: all of them, and the results are written")
    parser.add_argument("--page", action="store_true", help="write the page from the results alone")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    outcomes = []
    for model_type, config_class in config_classes().items():
        if not options.page and (not options.types or model_type in options.types):
            outcomes.append(try_type(config_class))
            print(*asdict(outcomes[-1]).values(), flush=True)
    if outcomes and not options.types:
        write_result(RESULT, {"models": [asdict(outcome) for outcome in outcomes]}, "transformers")
    if not options.types:
        DOCS_PAGE.write_text(page())


if __name__ == "__main__":
    main()
