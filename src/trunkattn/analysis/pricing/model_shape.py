"""What a model's config.json says of its size: attention layers, weights that a step reads, KV bytes of a token."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NoReturn

from trunkattn.analysis.pricing.model_configs import CONFIGS
from trunkattn.numerics import MAX_INT32
from trunkattn.validate import expanded

_DTYPE_BYTES: Final = MappingProxyType({"bfloat16": 2.0, "float16": 2.0, "float32": 4.0})
_MXFP4_BYTES: Final = 4.25 / 8  # bytes of an expert's weight, its share of the scale included
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
# Fields of configurations whose attention reads only selected tokens.
_SPARSE_ATTENTION: Final = ("index_topk", "index_topk_blocks", "keep_window_size")
# Prefixes of fields that say that some layers are no attention over a KV cache.
_OTHER_LAYERS: Final = ("mamba", "ssm_", "lru_", "linear_attn", "linear_num_", "hybrid_", "attn_type_list", "rwkv")
# Fields that say that some layers cache other numbers than num_key_value_heads and head_dim tell, or none.
_OTHER_CACHES: Final = (
    *("num_kv_shared_layers", "per_layer_config", "global_head_dim", "num_global_", "swa_", "conv_L_cache"),
    *("cross_attention_layers", "cross_layer_interval"),
)
# Types of models that no field tells from others -> why they have no price.
_REFUSED: Final = MappingProxyType(
    {
        "bert-generation": "it has an encoder",
        "hunyuan_v1_moe": "no field tells of its shared expert",
        "hrm_text": "a token passes its layers several times",
        "jetmoe": "its attention has experts",
    }
)
# Models whose feed-forward parts multiply with two matrices. All others have a gate, which is a third one.
_UNGATED: Final = frozenset(
    (
        *("apertus", "arcee", "biogpt", "cosmos3_edge_text", "git", "gpt_neox", "jais2", "nanochat", "nemotron"),
        *("persimmon", "phi", "starcoder2"),
    )
)
# Models whose attention has a gate for each number of its output.
_GATED_ATTENTION: Final = frozenset(("afmoe", "muse_glimmer_text", "muse_spark_text"))
# What transformers leaves out of a text_config, because it is the default of the type.
_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "gemma": {"head_dim": 256},
        "gemma2": {"head_dim": 256},
        "gemma3_text": {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    }
)
# In these models every n-th layer has full attention, the others a sliding window.
_ALTERNATE: Final = MappingProxyType({"gemma2": 2, "gemma3_text": 6})


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer. numbers: weights of one."""

    count: int
    per_token: int
    numbers: int

    def read(self, num_tokens: int) -> float:
        """Mean number of experts that at least one of `num_tokens` tokens chooses, if all choices are equally
        likely."""
        return self.count * (1.0 - (1.0 - self.per_token / self.count) ** num_tokens)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide what a step costs.

    Attributes:
        name: for people.
        num_qo_heads, num_kv_heads, head_dim: of its attention.
        latent_dim: of a latent cache (MLA), in which num_kv_heads is 1; None: keys and values are cached apart.
        windows: sliding window of each attention layer; None: it sees all.
        dense_numbers: weights that every step reads: all layers without routed experts, and the output layer.
        experts: routed experts, of each layer that has some.
        table_numbers: weights of the token table, of which a step reads a few rows.
        vocab_size, hidden_size: of the output layer.
        weight_bytes, expert_bytes: bytes of a weight of a layer, and of one of a routed expert.
        vocab_bytes: of a weight of the token table and the output layer, which quantization leaves as they are.
    """

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None
    windows: tuple[int | None, ...]
    dense_numbers: int
    experts: tuple[Experts, ...]
    table_numbers: int
    vocab_size: int
    hidden_size: int
    weight_bytes: float
    expert_bytes: float
    vocab_bytes: float

    @property
    def output_numbers(self) -> int:
        """Weights of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.windows)

    @property
    def layers_by_window(self) -> dict[int | None, int]:
        """How many layers have each window."""
        return dict(Counter(self.windows))

    def cached_numbers(self) -> int:
        """Numbers that a token adds to the cache of one layer."""
        return self.head_dim if self.latent_dim is not None else 2 * self.num_kv_heads * self.head_dim

    def bytes_read(self, num_tokens: int) -> float:
        """Bytes of weights that a step of `num_tokens` tokens reads."""
        experts = sum(each.read(num_tokens) * each.numbers for each in self.experts)
        return self._dense_bytes + experts * self.expert_bytes

    @property
    def _dense_bytes(self) -> float:
        layers = self.dense_numbers - self.output_numbers
        return layers * self.weight_bytes + self.output_numbers * self.vocab_bytes

    def numbers_used(self) -> float:
        """Weights that a token is multiplied with."""
        return self.dense_numbers + sum(each.per_token * each.numbers for each in self.experts)

    def total_bytes(self) -> float:
        """Bytes of all weights."""
        experts = sum(each.count * each.numbers for each in self.experts)
        return self._dense_bytes + self.table_numbers * self.vocab_bytes + experts * self.expert_bytes


def model_shape(model: str) -> ModelShape:
    """The shape of a built-in model, or that of a config.json.

    Args:
        model: a name of `CONFIGS`, the path of a config.json, or that of a folder with one.

    Raises:
        ValueError: there is no such model, a field is missing, or its attention cannot be priced.
    """
    if model in CONFIGS:
        return shape_of(model, CONFIGS[model])
    path = expanded(model).absolute()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(CONFIGS)
        raise ValueError(f"model={model!r}: expected one of {known}, or a config.json, or a folder that has one")
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{path} is not JSON that can be read ({error})"
        raise ValueError(f"model={model!r}: {reason}; expected a model's config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"model={model!r}: {path} holds no JSON object; expected a model's config.json")
    return shape_of(path.parent.name if path.name == "config.json" else path.stem, config)


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a configuration of transformers describes. It raises the errors of `model_shape`."""
    reader = _Reader(name, config)
    text = reader.mapping("text_config")
    # The output layer is the whole model's. transformers leaves out the field where both are one, which is its default.
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    config = {**config, **text}
    model_type = str(config.get("model_type"))
    config = {**_DEFAULTS.get(model_type, {}), **config}
    reader = _Reader(name, config)
    reader.refuse_other_layers()
    hidden, num_layers = reader.number("hidden_size"), reader.number("num_hidden_layers")
    heads = reader.number("num_attention_heads")
    latent = reader.number("kv_lora_rank", default=0) or None
    vocab = reader.number("vocab_size")
    weight_bytes, expert_bytes, vocab_bytes = reader.bytes_per_weight()
    if latent:
        head_dim, kv_heads = latent + reader.number("qk_rope_head_dim"), 1
    else:
        head_dim = reader.number("head_dim", default=hidden // heads)
        kv_heads = reader.number("num_key_value_heads", default=heads)
        reader.refuse(reader.number("v_head_dim", default=head_dim) != head_dim, "its values have another head_dim")
    reader.refuse(not head_dim, "its heads have no elements")
    outputs = 2 + (model_type in _GATED_ATTENTION)
    attention = reader.latent_numbers() if latent else hidden * head_dim * (outputs * heads + 2 * kv_heads)
    feed_forward = [reader.feed_forward(layer) for layer in range(num_layers)]
    dense = num_layers * attention + sum(numbers for numbers, _ in feed_forward) + vocab * hidden
    return ModelShape(
        name=name,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        latent_dim=latent,
        windows=reader.windows(num_layers),
        dense_numbers=dense,
        experts=tuple(experts for _, experts in feed_forward if experts is not None),
        table_numbers=0 if is_tied else vocab * hidden,
        vocab_size=vocab,
        hidden_size=hidden,
        weight_bytes=weight_bytes,
        expert_bytes=expert_bytes,
        vocab_bytes=vocab_bytes,
    )


@dataclass(frozen=True)
class _Reader:
    """A configuration, and the name by which messages call it."""

    name: str
    config: Mapping[str, Any]

    def refuse(self, condition: bool, why: str) -> None:
        if condition:
            raise ValueError(f"model {self.name} cannot be priced: {why}; name a model like it, such as llama-3-8b")

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is set."""
        name = next((name for name in names if self.config.get(name)), names[0])
        found = self.config.get(name) or default
        if isinstance(found, bool) or not isinstance(found, int) or found < (1 if default is None else 0):
            self.complain(name, found, "an integer above 0, or the name of a model like it, such as llama-3-8b")
        if found > MAX_INT32:
            self.complain(name, found, f"at most {MAX_INT32}")
        return found

    def complain(self, name: str, found: Any, expected: str) -> NoReturn:
        """Raises ValueError that names a field, what is in it, and what is expected."""
        given = "none" if found is None else repr(found) if len(repr(found)) <= 60 else "a long value"
        raise ValueError(f"model {self.name}: its config gives {given} as {name}: expected {expected}")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An inner object; empty where there is none."""
        found = self.config.get(name)
        if found is not None and not isinstance(found, Mapping):
            self.complain(name, found, "an object")
        return found or {}

    def integers(self, name: str) -> list[int]:
        """A list of integers; empty where there is none."""
        found = self.config.get(name)
        if found is not None and not (isinstance(found, list) and all(isinstance(each, int) for each in found)):
            self.complain(name, found, "a list of integers")
        return found or []

    def refuse_other_layers(self) -> None:
        """Raises ValueError where layers are no attention of a decoder over a KV cache, or not over all of it."""
        config = self.config
        has_encoder = config.get("is_encoder_decoder") or "ForMaskedLM" in str(config.get("architectures"))
        has_encoder = has_encoder or config.get("type_vocab_size") or config.get("use_bidirectional_attention") is True
        self.refuse(bool(has_encoder), "it has an encoder")
        why = _REFUSED.get(str(config.get("model_type")))
        self.refuse(why is not None, str(why))
        heads = set(self.integers("num_attention_heads_per_layer")) - {config.get("num_attention_heads")}
        self.refuse(bool(heads), "its layers have different numbers of heads")
        self.refuse(any(config.get(field) for field in _SPARSE_ATTENTION), "its layers attend only to chosen tokens")
        caches = [name for name, value in config.items() if name.startswith(_OTHER_CACHES) and value]
        self.refuse(bool(caches), f"its {', '.join(caches[:1])} tells of layers that do not cache what others do")
        if config.get("layer_types") is None:  # else these say it
            others = [name for name, value in config.items() if name.startswith(_OTHER_LAYERS) and value]
            why = f"its {others[0]} tells of layers that are no attention over a KV cache" if others else ""
            self.refuse(bool(others), why)
            self.refuse(bool(config.get("attention_chunk_size")), "its layers attend within chunks")

    def latent_numbers(self) -> int:
        """Weights of an attention layer with a latent cache (DeepSeek-V2 §2.1)."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        latent, rope = self.number("kv_lora_rank"), self.number("qk_rope_head_dim")
        nope, value = self.number("qk_nope_head_dim"), self.number("v_head_dim")
        rank = self.number("q_lora_rank", default=0)
        query = rank * (hidden + heads * (nope + rope)) if rank else hidden * heads * (nope + rope)
        return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden

    def feed_forward(self, layer: int) -> tuple[int, Experts | None]:
        """Weights of a layer's feed-forward part that every token uses, and its routed experts."""
        hidden = self.number("hidden_size")
        matrices = 2 if str(self.config.get("model_type")) in _UNGATED else 3
        count = self.number("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", default=0)
        if not count or self.is_dense(layer):
            return matrices * hidden * self.number("intermediate_size"), None
        size = self.number("moe_intermediate_size", "intermediate_size")
        shared = self.number("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
        shared += self.number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0) * size
        per_token = self.number("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
        self.refuse(per_token > count, f"a token chooses {per_token} of its {count} experts")
        inner = self.number("moe_hidden_size", default=hidden)  # what experts see, after a projection
        around = 2 * hidden * inner if inner != hidden else 0
        return matrices * hidden * shared + hidden * count + around, Experts(count, per_token, matrices * inner * size)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer of a model with routed experts has none."""
        if layer < self.number("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", default=0):
            return True
        if isinstance(last := self.config.get("moe_layer_end_index"), int) and 0 <= last < layer:
            return True
        if isinstance(kinds := self.config.get("mlp_layer_types"), list):  # a name for each layer
            return kinds[layer : layer + 1] != ["sparse"]
        if isinstance(self.config.get("moe_layer_freq"), list):  # a flag for each layer
            return not any(self.integers("moe_layer_freq")[layer : layer + 1])
        every = self.number("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", default=1)
        return layer in self.integers("mlp_only_layers") or (layer + 1) % every != 0

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Sliding window of each layer."""
        window: int | None = self.number("sliding_window", default=0) or None
        if self.config.get("use_sliding_window") is False:
            window = None
        types = self.config.get("layer_types")
        if types is None:
            full = self.number("max_window_layers", default=0)  # the first ones see all
            period = self.number(
                "sliding_window_pattern", default=_ALTERNATE.get(str(self.config.get("model_type")), 0)
            )
            sees_all = [layer < full or bool(period and (layer + 1) % period == 0) for layer in range(num_layers)]
            return tuple(None if each else window for each in sees_all)
        if not isinstance(types, list) or len(types) != num_layers or not all(isinstance(each, str) for each in types):
            self.complain("layer_types", types, f"a list of {num_layers} names, one for each layer")
        other = sorted(set(types) - set(_LAYER_TYPES))
        self.refuse(bool(other), f"it has layers of type {', '.join(other)}, which are no attention over a KV cache")
        self.refuse(window is None and "sliding_attention" in types, "its sliding_window is not told")
        return tuple(window if each == "sliding_attention" else None for each in types)

    def bytes_per_weight(self) -> tuple[float, float, float]:
        """Bytes of a weight of a layer, of a routed expert, and of the token table and the output layer."""
        plain = _DTYPE_BYTES.get(str(self.config.get("torch_dtype") or self.config.get("dtype") or "bfloat16"))
        self.refuse(plain is None, f"its dtype is none of {', '.join(_DTYPE_BYTES)}")
        assert plain is not None
        quantization = self.mapping("quantization_config")
        method, bits = quantization.get("quant_method"), quantization.get("bits")
        if method == "mxfp4":
            return plain, _MXFP4_BYTES, plain
        if method == "fp8":
            return 1.0, 1.0, plain
        if isinstance(bits, int) and not isinstance(bits, bool) and 0 < bits <= 64:
            return bits / 8, bits / 8, plain
        self.refuse(bool(quantization), f"its weights are quantized by {method!r}, whose size is not known here")
        return plain, plain, plain
