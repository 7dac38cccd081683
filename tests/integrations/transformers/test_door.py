"""`attn_implementation="trunkattn"` in tiny models of transformers: loss and gradients are those of eager attention."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trunkattn import PrefixTree

transformers = pytest.importorskip("transformers")

from trunkattn.integrations.transformers import attend, mask, register  # noqa: E402

from .door_cases import CHUNKS, ENDS, HOLES, IN_CHUNKS, KEPT, MODELS, PACKED, SMALL, TOKENS, WINDOW, both  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A model with eager attention, and the same with ours, in float32."""
    register()
    config = getattr(transformers, f"{request.param}Config")(**MODELS[request.param])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            nn.init.normal_(parameter)
    other = copy.deepcopy(model)
    other.set_attn_implementation("trunkattn")
    yield model, other


def gradients(model: nn.Module, weights: torch.Tensor, **batch: Any) -> list[torch.Tensor]:
    """The weighted sum of logits [tokens, vocabulary], and its gradients."""
    logits = model(**batch, use_cache=False).logits
    loss = (logits.flatten(0, 1) * weights).sum()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss.detach(), *(gradient for gradient in found if gradient is not None)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def weights(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 50, generator=torch.Generator().manual_seed(1))


def test_a_batch(pair: tuple[nn.Module, nn.Module]) -> None:
    expected, found = (gradients(model, weights(34), input_ids=TOKENS) for model in pair)
    assert_same(found, expected)


def test_padding(pair: tuple[nn.Module, nn.Module]) -> None:
    """On the right of a row; logits of padding count for nothing. On the left it is the same row."""
    kept = torch.ones(2, 17, dtype=torch.long)
    kept[0, 12:] = 0
    counted = weights(34) * kept.reshape(-1, 1)
    batch = {"input_ids": TOKENS, "attention_mask": kept}
    expected, found = (gradients(model, counted, **batch) for model in pair)
    assert_same(found, expected)
    tokens, counted = TOKENS.clone(), counted.view(2, 17, -1).clone()
    tokens[0], kept[0], counted[0] = tokens[0].roll(5), kept[0].roll(5), counted[0].roll(5, 0)
    batch = {"input_ids": tokens, "attention_mask": kept, "position_ids": (kept.cumsum(1) - 1).clamp(min=0)}
    assert_same(gradients(pair[1], counted.flatten(0, 1), **batch), expected)


def test_packed_sequences(pair: tuple[nn.Module, nn.Module]) -> None:
    """By the keywords of a flattening collator, and by position ids that begin again, which GPT-OSS ignores."""
    batch = {"input_ids": TOKENS[:1], "position_ids": PACKED}
    parts = zip(TOKENS[:1].split([8, 7, 2], 1), weights(17).split([8, 7, 2]), strict=True)
    alone = [gradients(pair[0], weight, input_ids=tokens) for tokens, weight in parts]
    expected = [torch.stack(found).sum(0) for found in zip(*alone, strict=True)]
    if "GptOss" not in type(pair[0]).__name__:
        assert_same(gradients(pair[1], weights(17), **batch), expected)
    sums = torch.tensor([0, 8, 15, 17], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": 8, "max_length_k": 8}
    assert_same(gradients(pair[1], weights(17), **batch, **lengths), expected)


def test_a_tree_equals_repeated_sequences(pair: tuple[nn.Module, nn.Module]) -> None:
    sequences = [TOKENS[0, :12].tolist(), [*TOKENS[0, :7].tolist(), 3, 9, 4], [*TOKENS[0, :7].tolist(), 3, 2]]
    tree = PrefixTree.from_sequences(sequences)
    packed = tree.pack()
    assert packed.tokens is not None
    batch = {"input_ids": packed.tokens[None], "position_ids": packed.position_ids[None], "tree": tree}
    own = [weights(len(sequence)) for sequence in sequences]
    summed = torch.zeros(tree.num_tokens, 50)
    for indices, weight in zip(tree.sequence_indices(), own, strict=True):
        summed.index_add_(0, indices, weight)
    repeated = [
        gradients(pair[0], weight, input_ids=torch.tensor([sequence]))
        for sequence, weight in zip(sequences, own, strict=True)
    ]
    if len({len(each) for each in repeated}) == 1:  # an expert that one sequence leaves out has no gradient there
        expected = [torch.stack(parts).sum(0) for parts in zip(*repeated, strict=True)]
        assert_same(gradients(pair[1], summed, **batch), expected)


def test_checkpointing_and_compilation() -> None:
    register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    model.set_attn_implementation("trunkattn")
    expected = gradients(model, weights(34), input_ids=TOKENS)
    model.train()
    model.gradient_checkpointing_enable()
    for ours, theirs in zip(gradients(model, weights(34), input_ids=TOKENS), expected, strict=True):
        assert torch.equal(ours, theirs)
    model.gradient_checkpointing_disable()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = {"input_ids": TOKENS[:1], "position_ids": PACKED}
    for ours, theirs in zip(
        gradients(compiled, weights(17), **batch), gradients(model, weights(17), **batch), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_chunks_are_packed_sequences() -> None:
    from transformers.masking_utils import causal_mask_function

    def chunked(b: Any, h: Any, q: Any, k: Any) -> Any:
        return causal_mask_function(b, h, q, k) & (q // 4 == k // 4)

    found = mask(2, 6, 6, mask_function=chunked, local_size=4, allow_is_causal_skip=True)
    assert found is not None and found.flatten().tolist() == [0, 4, 6, 10, 12]


Q = torch.zeros(2, 4, 5, 16)
BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dropout=0.1: expected 0", {"dropout": 0.1}),
    ("output_attentions is given: attn_implementation='trunkattn' has none", {"output_attentions": True}),
    ("position_bias is given", {"position_bias": torch.zeros(1)}),
    ("tree is given with a batch of 2 rows", {"tree": PrefixTree.from_segments([-1], [5])}),
    (
        "position_ids[2]=2: expected 1, the number of the token's ancestors",
        {"tree": PrefixTree.from_segments([-1, 0, 0], [1, 1, 3]), "position_ids": torch.arange(5)[None], "rows": 1},
    ),
    (
        "position_ids has 4 entries: expected 5, the tree's tokens",
        {"tree": PrefixTree.from_segments([-1], [5]), "position_ids": torch.arange(4)[None], "rows": 1},
    ),
    ("attention_mask has shape (2, 1, 5, 5)", {"attention_mask": torch.ones(2, 1, 5, 5)}),
    ("attention_mask has shape (2, 7): expected (2, 5), one for each", {"attention_mask": torch.ones(2, 7)}),
    (
        "attention_mask has shape (1, 5) beside tree: expected none, as a tree has no padding",
        {"tree": PrefixTree.from_segments([-1], [5]), "attention_mask": torch.zeros(1, 5), "rows": 1},
    ),
    (
        "attention_mask has padding and cu_seq_lens_q is given: expected one of them",
        {
            "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]),
            "cu_seq_lens_q": torch.tensor([0, 10]),
            "cu_seq_lens_k": torch.tensor([0, 10]),
        },
    ),
    ("cu_seq_lens_k is None: expected both of", {"cu_seq_lens_q": torch.tensor([0, 10])}),
    ("cu_seq_lens_q is a list: expected a torch.Tensor", {"cu_seq_lens_q": [0, 10], "cu_seq_lens_k": [0, 10]}),
    (
        "tree and cu_seq_lens_q are both given: expected one",
        {
            "tree": PrefixTree.from_segments([-1], [5]),
            "cu_seq_lens_q": torch.tensor([0, 5]),
            "cu_seq_lens_k": torch.tensor([0, 5]),
            "rows": 1,
        },
    ),
)


@pytest.mark.parametrize(("message", "options"), BAD)
def test_what_is_not_there_is_refused(message: str, options: dict[str, Any]) -> None:
    options = dict(options)
    q = Q[: options.pop("rows", 2)]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        attend(nn.Module(), q, q, q, **({"attention_mask": None} | options))


def test_position_ids_are_looked_at_again_when_they_are_others() -> None:
    """A tensor that took the place of one that was right, and one that was written to."""
    tree, q = PrefixTree.from_segments([-1, 0, 0], [1, 1, 3]), Q[:1]
    right = tree.pack().position_ids[None].clone()
    for _ in range(2):
        attend(nn.Module(), q, q, q, None, tree=tree, position_ids=right)
    right[0, 2] = 4
    with pytest.raises(ValueError, match=r"position_ids\[2\]=4: expected 1"):
        attend(nn.Module(), q, q, q, None, tree=tree, position_ids=right)
    for length in (5, 4, 3):
        attend(nn.Module(), q, q, q, None, tree=tree, position_ids=tree.pack().position_ids[None].clone())
        with pytest.raises(ValueError, match="position_ids"):
            attend(nn.Module(), q, q, q, None, tree=tree, position_ids=torch.arange(length)[None])


def test_masks_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="joins a mask of its own"):
        mask(1, 4, 4, use_vmap=True)
    with pytest.raises(ValueError, match="lets a token see a later one"):
        mask(1, 4, 4, mask_function=lambda b, h, q, k: (q - k) < 2, allow_is_causal_skip=False)
    both_ways = {"allow_is_bidirectional_skip": True, "local_size": 2}
    with pytest.raises(ValueError, match="has padding, and 1 queries meet 4 keys within a window to both sides"):
        mask(1, 1, 4, attention_mask=torch.tensor([[False, True, True, True]]), **both_ways)


MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


TREE = {"input_ids": TOKENS[:1], "tree": PrefixTree.from_segments([-1], [17]), "position_ids": torch.arange(17)[None]}
HYBRID = SMALL | {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
CONV = ["conv", "full_attention"]
BART = {"vocab_size": 50, "d_model": 32, "is_decoder": True} | {
    f"decoder_{part}": number for part, number in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 4))
}
V4 = SMALL | {"q_lora_rank": 8, "o_lora_rank": 8, "moe_intermediate_size": 8, "n_routed_experts": 2, "index_n_heads": 2}
CHUNKS_AND_PACKED = [0, 5, 10], [0, 4, 10], [0, 4, 5, 10]
ELSEWHERE: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("attention_mask hides tokens between others", "Mistral", WINDOW, {"attention_mask": HOLES}),
    ("attention_mask hides tokens between others", "Llama4Text", CHUNKS, {"attention_mask": HOLES}),
    (f"{IN_CHUNKS}there is padding", "Llama4Text", CHUNKS, {"attention_mask": ENDS}),
    (
        "Qwen2MoeAttention does not pass on its model's sliding_window=5 and has 17 keys",
        "Qwen2Moe",
        WINDOW | MOE | {"use_sliding_window": True, "max_window_layers": 0},
        {},
    ),
    ("PhimoeAttention does not pass on its model's sliding_window=5", "Phimoe", WINDOW | {"num_local_experts": 2}, {}),
    (
        "tree is given and has 17 tokens: expected at most 5, because the model attends in chunks of 5 tokens",
        "Llama4Text",
        CHUNKS,
        TREE,
    ),
    ("has layers of linear_attention, which take packed tokens as one sequence", "Qwen3_5Text", HYBRID, TREE),
    ("has layers of conv, which take packed tokens as one sequence", "Lfm2", SMALL | {"layer_types": CONV}, TREE),
    ("the model of BartAttention takes no position_ids", "Bart", BART, TREE),
    ("the model of BertSelfAttention lets a token see later ones", "Bert", SMALL, TREE),
    (
        "position_ids[8]=0: expected 8, as masks of GptOssAttention hold no packed sequences; pass cu_seq_lens_q",
        "GptOss",
        MODELS["GptOss"],
        {"input_ids": TOKENS[:1], "position_ids": PACKED},
    ),
    ("models of BigBirdPegasusConfig take no attention but their own", "BigBirdPegasus", BART, {}),
    (
        "models of GemmaConfig make a causal mask for layers that say that they are not causal",
        "Gemma",
        SMALL | {"use_bidirectional_attention": True},
        {},
    ),
    ("models of DeepseekV4Config have layers of heavily_compressed_attention", "DeepseekV4", V4, {}),
)


@pytest.mark.parametrize(("message", "name", "config", "batch"), ELSEWHERE)
def test_what_a_models_masks_say_and_attention_does_not_is_refused(
    message: str, name: str, config: dict[str, Any], batch: dict[str, Any]
) -> None:
    _, model = both(name, config)
    with pytest.raises(ValueError, match=re.escape(message)):
        model(**({"input_ids": TOKENS, "use_cache": False} | batch))


def test_layers_that_say_that_they_are_not_causal_beside_a_causal_mask_are_refused() -> None:
    """Aimv2 makes a causal mask only if it is given one of padding, and sees all tokens without."""
    register()
    decoder = transformers.PegasusXConfig(**BART, encoder_layers=1, encoder_attention_heads=4)
    tower = transformers.Aimv2TextConfig(**SMALL)
    models = [
        getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="trunkattn").eval()
        for name, config in (("PegasusX", decoder), ("Aimv2Text", tower))
    ]
    message = "models of {}Config make a causal mask for layers that say that they are not causal"
    with pytest.raises(ValueError, match=message.format("PegasusX")):
        models[0](TOKENS, decoder_input_ids=TOKENS)
    with pytest.raises(ValueError, match=message.format("Aimv2Text")):
        models[1](TOKENS, attention_mask=ENDS)
    assert models[1](TOKENS).last_hidden_state.shape == (2, 17, 32)


@pytest.mark.parametrize("batch", [{}, {"attention_mask": ENDS}, {"input_ids": TOKENS[:1], "position_ids": PACKED}])
def test_a_window_of_0_is_none(batch: dict[str, Any]) -> None:
    """A Qwen2-MoE says so if it does not use its window, as by default, and makes masks for it that no layer takes."""
    theirs, ours = both("Qwen2Moe", SMALL | MOE)
    assert ours.config.sliding_window == 0
    given = {"input_ids": TOKENS, "use_cache": False} | batch
    kept = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    expected, found = (model(**given).logits[kept] for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", ["decoder_attention_mask", "decoder_position_ids"])
def test_a_decoder_that_calls_itself_causal_only_without_a_mask(given: str) -> None:
    register()
    sizes = {
        f"{side}_{part}": number
        for side in ("encoder", "decoder")
        for part, number in (("num_hidden_layers", 1), ("num_attention_heads", 4), ("num_key_value_heads", 4))
    }
    config = transformers.MoonshineConfig(vocab_size=50, hidden_size=32, intermediate_size=48, **sizes)
    ours = transformers.MoonshineModel._from_config(config, attn_implementation="trunkattn").eval()
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("eager")
    sound = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0))
    batch = {given: ENDS if given == "decoder_attention_mask" else PACKED.expand(2, -1)}
    kept = batch.get("decoder_attention_mask", KEPT).bool()
    outputs = [
        model(input_values=sound, decoder_input_ids=TOKENS, use_cache=False, **batch).last_hidden_state[kept]
        for model in (ours, theirs)
    ]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_layers_of_an_encoder_may_say_that_they_are_not_causal() -> None:
    register()
    config = transformers.BeitConfig(image_size=16, patch_size=8, num_labels=2, **SMALL, out_indices=[0])
    ours = transformers.BeitModel._from_config(config, attn_implementation="trunkattn").eval()
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("eager")
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected, found = (model(pixels).last_hidden_state for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


BRANCHES = torch.tensor([[*range(9), *range(4, 12)]])


def test_branches_without_a_tree_are_no_packed_sequences() -> None:
    """The masks of a model would take them for some, which see no prefix."""
    _, model = both("Nemotron", SMALL | {"head_dim": 8})
    message = r"position_ids\[0, 9\]=4 after 8: expected 0 where .* begins; NemotronAttention was given no tree"
    with pytest.raises(ValueError, match=message):
        model(input_ids=TOKENS[:1], position_ids=BRANCHES, use_cache=False)


def test_packed_sequences_that_begin_anywhere_are_taken_by_their_lengths() -> None:
    theirs, ours = both("Llama", SMALL)
    batch = {"input_ids": TOKENS[:1], "position_ids": BRANCHES, "use_cache": False}
    sums = torch.tensor([0, 9, 17], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": 9, "max_length_k": 9}
    torch.testing.assert_close(ours(**batch, **lengths).logits, theirs(**batch).logits, rtol=1e-4, atol=1e-4)
    rows = {"input_ids": TOKENS, "position_ids": PACKED.expand(2, -1), "use_cache": False}
    torch.testing.assert_close(ours(**rows).logits, theirs(**rows).logits, rtol=1e-4, atol=1e-4)


def test_a_model_with_an_attention_of_its_own_is_refused() -> None:
    """Bloom adds what masks it is given to its logits, and would see all tokens with none."""
    register()
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    config._attn_implementation = "trunkattn"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="models of BloomConfig take no attention but their own"):
        model(TOKENS)


def test_position_ids_may_begin_anywhere() -> None:
    theirs, ours = both("GptOss", MODELS["GptOss"])
    batch = {"input_ids": TOKENS[:1], "position_ids": torch.arange(5, 22)[None], "use_cache": False}
    torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, rtol=1e-4, atol=1e-4)


def test_holes_beside_a_window_are_refused_in_a_compiled_model_too() -> None:
    _, model = both("Mistral", WINDOW)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(TOKENS, attention_mask=ENDS, use_cache=False)
    with pytest.raises(RuntimeError, match="attention_mask hides tokens between others"):
        compiled(TOKENS, attention_mask=HOLES, use_cache=False)


def test_padding_in_a_whole_graph_of_inductor() -> None:
    """It takes no second unknown number of tokens that equals another one."""
    theirs, ours = both("Gemma2", MODELS["Gemma2"])
    counted = weights(34) * ENDS.reshape(-1, 1)
    batch = {"input_ids": TOKENS, "attention_mask": ENDS}
    plain = {"cpp.simdlen": 1}  # loops without vectors, which take the compiler of C++ less time
    compiled = torch.compile(ours, backend="inductor", fullgraph=True, options=plain)
    assert_same(gradients(compiled, counted, **batch), gradients(theirs, counted, **batch))


def test_images_that_see_ahead_are_refused_beside_padding_too() -> None:
    from transformers.masking_utils import create_causal_mask

    _, model = both("Llama", SMALL)
    blocks = torch.full((2, 17), -1)
    blocks[:, 3:9] = 0
    for kept in (None, ENDS):
        with pytest.raises(ValueError, match="lets a token see a later one"):
            create_causal_mask(model.config, torch.zeros(2, 17, 32), kept, None, block_sequence_ids=blocks)


def test_packed_sequences_of_a_model_with_chunks() -> None:
    """Its keywords hold the sequences, and its masks the chunks of each."""
    sums = torch.tensor([0, 8, 15, 17], dtype=torch.int32)
    batch = {"input_ids": TOKENS[:1], "position_ids": PACKED, "use_cache": False}
    lengths = {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": 8, "max_length_k": 8}
    theirs, ours = both("Llama4Text", CHUNKS)
    torch.testing.assert_close(ours(**batch, **lengths).logits, theirs(**batch).logits, rtol=1e-4, atol=1e-4)


def test_chunks_and_packed_sequences_of_the_same_number_both_hold() -> None:
    q, k, v = torch.randn(3, 1, 2, 10, 16).unbind(0)
    chunks, packed, both_of_them = (torch.tensor(sums, dtype=torch.int32) for sums in CHUNKS_AND_PACKED)
    found, _ = attend(nn.Module(), q, k, v, chunks, cu_seq_lens_q=packed, cu_seq_lens_k=packed)
    expected, _ = attend(nn.Module(), q, k, v, both_of_them)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kept", [ENDS, HOLES])
@pytest.mark.parametrize("tokens", [17, 9])
def test_a_decoder_sees_all_of_its_encoders_text_and_no_padding(tokens: int, kept: torch.Tensor) -> None:
    register()
    sizes = {f"{name}_{part}": 4 for name in ("encoder", "decoder") for part in ("attention_heads", "ffn_dim")}
    config = transformers.BartConfig(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, dropout=0, **sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.BartModel(config)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("trunkattn")
    batch = {"input_ids": TOKENS, "attention_mask": kept, "decoder_input_ids": TOKENS.flip(1)[:, :tokens]}
    expected, found = (model(**batch).last_hidden_state for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_window_to_both_sides_is_as_wide_as_the_models_own() -> None:
    """ModernBERT passes one token more than its configuration has, as its masks do; T5Gemma does not."""
    layer = nn.Module()
    layer.config, layer.is_causal = transformers.MistralConfig(sliding_window=3), False  # type: ignore[assignment]
    attend(layer, Q, Q, Q, None, sliding_window=4)
    with pytest.raises(ValueError, match=re.escape("sliding_window=3: expected 4, the token itself and the 3")):
        attend(layer, Q, Q, Q, None, sliding_window=3)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_keys_that_a_model_selects_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is given: attn_implementation='trunkattn' has none"):
        attend(nn.Module(), Q, Q, Q, None, **{name: torch.zeros(1)})
