"""The tokenizer in a GGUF file, as llama.cpp reads it.

transformers ignores much of what a file says, so that a text becomes other tokens. Here byte-level tokenizers are built
from the file, and SentencePiece tokenizers get the file's rules for spaces and first tokens.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trunkattn.engine.model.files import plain
from trunkattn.engine.model.gguf.header import GgufHeader, NumStrings

PRE: Final = "tokenizer.ggml.pre"
# The ways to split a text before merges, by their name in the file: GPT-2's way, the same with separate digits, or the
# way of another name. transformers knows further names, and splits in GPT-2's way for names that it does not know.
GPT2, DIGITS_APART = "gpt-2", "smollm"
OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "modern-bert", "mellum"), GPT2),
        **dict.fromkeys(("gigachat", "a.x-4.0", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"), GPT2),
        **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS_APART),
        **dict.fromkeys(("minerva-7b", "mellum2"), DIGITS_APART),
        **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), "qwen2"),
        **dict.fromkeys(("glm4", "chatglm-bpe"), "llama-bpe"),
    }
)
# Vocabularies in which a piece of text that is a token becomes this token without merges. A text begins with the
# begin-of-sequence token, unless the file says otherwise.
WHOLE_PIECES: Final = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are found in a text before it is split
SENTENCEPIECE, SPACE = "llama", "\N{LOWER ONE EIGHTH BLOCK}"
# The ids of these tokens in a SentencePiece vocabulary, unless the file says otherwise.
DEFAULT_IDS: Final[Mapping[str, int]] = MappingProxyType({"bos_token": 1, "eos_token": 2, "unk_token": 0})
# What a tokenizer needs besides its tokens, by its kind.
NEEDED: Final[Mapping[str, dict[str, type]]] = MappingProxyType(
    {"gpt2": {"merges": NumStrings}, SENTENCEPIECE: {"scores": list}}
)
WITHOUT_SPACE: Final = frozenset(("gemma2", "gemma3"))  # no space before a text, unless the file says otherwise


def gguf_tokenizer(header: GgufHeader) -> Any:
    """The tokenizer of a file.

    Raises:
        ValueError: naming a key whose value has no counterpart here.
    """
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    _check_needed(header)
    architecture, found, options = get_gguf_tokenizer(str(header.path))
    if found.get("tokenizer_type") == "gpt2":
        pre = found.get("pre_tokenizer_type")
        backend = _byte_level(found, _splitter(pre))
        if pre in WHOLE_PIECES:
            options.setdefault("add_bos_token", True)
    else:
        backend, _ = convert_gguf_tokenizer(architecture, found)
    if found.get("tokenizer_type") == SENTENCEPIECE:
        _set_spaces(backend, found.get("add_prefix_space", architecture not in WITHOUT_SPACE))
        tokens = found["tokens"]
        options |= {name: tokens[i] for name, i in DEFAULT_IDS.items() if options[name] is None and i < len(tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _check_needed(header: GgufHeader) -> None:
    """Raises ValueError naming a key that is missing or of another type."""
    needed: dict[str, type] = {"model": str, "tokens": NumStrings}
    needed |= NEEDED.get(str(header.keys.get("tokenizer.ggml.model")), {})
    for name, kind in needed.items():
        value = header.keys.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, kind):
            raise ValueError(
                f"its key tokenizer.ggml.{name} is {'missing' if value is None else plain(repr(value), 80)}: expected "
                f"{'a text' if kind is str else 'a list of texts' if kind is NumStrings else 'a list of numbers'}"
            )


def _byte_level(found: Mapping[str, Any], splitter: Any) -> Tokenizer:
    """A byte-level tokenizer. Control and user-defined tokens keep the file's spelling. transformers would write their
    bytes in the vocabulary's alphabet, and then cut them into pieces."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_merges

    alphabet = bytes_to_unicode()
    letters, types = set(alphabet.values()), found.get("token_type") or [1] * len(found["tokens"])
    vocabulary: dict[str, int] = {}
    whole = []
    for token_id, (token, kind) in enumerate(zip(found["tokens"], types, strict=True)):
        if kind in (CONTROL, USER_DEFINED):
            whole.append(AddedToken(token, normalized=False, special=kind == CONTROL))
        elif not letters.issuperset(token):
            token = "".join(alphabet[byte] for byte in token.encode())
        vocabulary[token] = token_id
    is_whole = found["pre_tokenizer_type"] in WHOLE_PIECES
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=get_merges(found), ignore_merges=is_whole))
    backend.add_tokens(whole)
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    return backend


def _splitter(name: str | None) -> Any:
    """What splits a text before merges."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known_as = OTHER_NAMES.get(str(name), str(name))
    if known_as == GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if known_as == DIGITS_APART:
        apart: Any = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
        return pre_tokenizers.Sequence([apart, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    expression = GGUF_PRE_TOKENIZER_SPLITS.get(known_as)
    if expression is None:
        said = "it has no key " + PRE if name is None else f"its key {PRE} is {name!r}"
        raise ValueError(
            f"{said}: expected the name of a way to split texts that is known here, such as 'gpt-2', 'llama-bpe' or "
            "'qwen2'; use the model's safetensors folder"
        )
    split: Any = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _set_spaces(backend: Any, is_first: bool) -> None:
    """Makes a SentencePiece tokenizer put a space before a text and after each control or user-defined token in it, or
    none if `is_first` is false. It does so even if a space is already there.

    transformers puts none before a text that begins with a space, nor within a text.
    """
    first = [normalizers.Prepend(SPACE)] if is_first else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None
    strip = [decoders.Strip(" ", left=1)] if is_first else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
