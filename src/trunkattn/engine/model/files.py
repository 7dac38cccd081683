"""Model files on disk: what a local Hugging Face folder or a GGUF file must hold, checked before anything is loaded.

Whatever a folder holds beside its weights is read as transformers reads it, or refused by name.

`safetensors.safe_open` compares a file's length with its header. Of a GGUF file only the first bytes are read here; the
header, which names every tensor and its place, is read for the configuration (`gguf.header`).
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from trunkattn.engine.model.gguf.header import MAGIC
from trunkattn.engine.model.path import EXPECTED_MODEL, existing_path
from trunkattn.engine.sampling_params import default_sampling_params
from trunkattn.interrupts import temporary_folder
from trunkattn.validate import check_int

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG, ADAPTER_CONFIG = "generation_config.json", "adapter_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")  # of AutoGPTQ and AutoAWQ before config.json had it
QUANTIZATION_KEYS = ("compression_config", "quantization", "quant_config")  # quantization_config is transformers' own
# Types in which models store weights, masks and indices. Any other holds quantised numbers, and their scales elsewhere.
PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
INTEGER_TYPES = frozenset({"I64", "BOOL"})  # only of masks and indices
WEIGHT = re.compile(r"(.*\.)?(weight|bias)")
MASK = re.compile(r".*\.(attn|attention)\.bias")  # a causal mask that old checkpoints hold as bytes
CLASS = re.compile(r"<class '([^']*)'>")
MAX_REASON = 400
ROTATION: Final = frozenset({"rope_theta", "partial_rotary_factor"})  # stood beside rope_scaling once
# Fields of a generation configuration by which transformers draws other tokens, and that nothing here follows -> the
# values that change nothing. Lists and mappings of nothing change nothing either.
UNFOLLOWED: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ()),
        **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), ()),
        **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "penalty_alpha", "top_h"), ()),
        **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
        **dict.fromkeys(("min_length", "min_new_tokens", "encoder_no_repeat_ngram_size"), (0,)),
        **dict.fromkeys(("typical_p", "guidance_scale", "num_beams", "encoder_repetition_penalty"), (1,)),
        **dict.fromkeys(("stop_strings", "dola_layers", "constraints", "force_words_ids"), ()),
        "token_healing": (False,),
    }
)


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is.

    Attributes:
        folder: where its files are.
        gguf_file: the GGUF file's name within `folder`; None: a safetensors folder.
        trust_remote_code: whether the folder's own Python may run.
        tensors: the safetensors file that holds each of the folder's tensors.
    """

    folder: Path
    gguf_file: str | None
    trust_remote_code: bool = False
    tensors: Mapping[str, Path] = field(default_factory=dict, repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The folder or the GGUF file."""
        return self.folder if self.gguf_file is None else self.folder / self.gguf_file

    @property
    def load_options(self) -> dict[str, Any]:
        """Keywords of transformers' `from_pretrained`: read this folder, nothing from a network, and ask nobody."""
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}

    def num_values(self) -> int:
        """Numbers in the tensors of the folder's safetensors files."""
        count = 0
        for path in {*self.tensors.values()}:
            with safe_open(path, framework="pt") as file:
                count += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 no mapping
        return count

    @contextmanager
    def readable(self, what: str, expected: str) -> Iterator[Path]:
        """A folder for transformers to read the model from: its own, or one with nothing but the GGUF file, because
        transformers would take another model's tokenizer and configuration that lie beside it.

        Args:
            what: what transformers does, such as "read its tokenizer".
            expected: what to say to the user if it cannot be read.

        Raises:
            ValueError: naming the path, for any error of the body: a foreign file can make a reader raise nearly
                anything.
        """
        with temporary_folder() as linked:
            if self.gguf_file is not None:
                (linked / self.gguf_file).symlink_to(self.path.resolve())
            try:
                yield self.folder if self.gguf_file is None else linked
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # what panics in the package tokenizers is no Exception
                reason = one_line(error).replace(str(linked), str(self.folder))
                raise ValueError(
                    f"model={str(self.path)!r}: transformers cannot {what} ({reason}); {expected}"
                ) from error


def one_line(error: BaseException) -> str:
    """An error's type and its text, as `plain` has them. Of a value that no configuration can have, only what is wrong
    with it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, StrictDataclassError):
        text = CLASS.sub(r"\1", text.partition("\n    ")[2].partition(": ")[2].partition(" Errors: ")[0])
    return plain(text).removesuffix(":")


def plain(text: str, most: int = MAX_REASON) -> str:
    """A text that may come from a foreign file, on one line of at most `most` characters that can be printed."""
    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 2]} …"


def find_model_files(model: object, with_weights: bool = True, trust_remote_code: bool = False) -> ModelFiles:
    """Locates a model's files and checks them; without `with_weights`, only a folder's configuration.

    Raises:
        TypeError, ValueError: naming the path, what is wrong with it and what is expected.
    """
    path = existing_path(model)
    if path.is_dir():
        return ModelFiles(path, None, trust_remote_code, check_folder(path, with_weights))
    check_gguf(path)
    return ModelFiles(path.parent, path.name, trust_remote_code)


def check_folder(folder: Path, with_weights: bool = True) -> dict[str, Path]:
    """The file that holds each tensor; none without `with_weights`.

    Raises:
        ValueError: the folder has no config.json or, with `with_weights`, no complete safetensors files.
    """
    config = _read_json(folder / "config.json")
    if "model_type" not in config:
        raise ValueError(f"model={str(folder)!r}: config.json has no model_type; expected {EXPECTED_MODEL}")
    if not isinstance(config["model_type"], str):
        raise ValueError(f"model={str(folder)!r}: config.json has a model_type that is no text; expected a text")
    _check_rotation(folder, config)
    if os.path.lexists(folder / GENERATION_CONFIG):
        _check_generation_config(folder / GENERATION_CONFIG)
    if not with_weights:
        return {}
    _check_unquantized(folder, config)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"model={str(folder)!r}: it holds an adapter ({ADAPTER_CONFIG}), which nothing here adds to the weights; "
            f"merge it into them (PEFT's merge_and_unload) or move it away"
        )
    files = [folder / SAFETENSORS]  # which transformers takes if there is an index, too
    if not files[0].is_file() and (folder / SAFETENSORS_INDEX).is_file():
        index = _read_json(folder / SAFETENSORS_INDEX)
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards or not isinstance(index.get("metadata"), dict):
            raise ValueError(
                f"model={str(folder / SAFETENSORS_INDEX)!r}: expected a weight_map from tensors to files, and "
                f"metadata, if only an empty mapping"
            )
        files = [_shard(folder, name) for name in sorted({*map(str, shards.values())})]
    holder: dict[str, Path] = {}
    for file in files:
        for name in check_safetensors(file):
            if name in holder and not _are_equal((name, holder[name]), (name, file)):
                raise ValueError(
                    f"model={str(file)!r}: its tensor {name} is another one in {holder[name].name}; expected one value "
                    f"for each name"
                )
            holder[name] = file
    return holder


def _shard(folder: Path, name: str) -> Path:
    """A file that the index names: within the folder, because a model's files are copied and trusted as a whole."""
    try:
        if (folder / name).is_file() and not Path(name).is_absolute() and ".." not in Path(name).parts:
            return folder / name
    except OSError:  # a name that no file can have
        pass
    raise ValueError(
        f"model={str(folder / SAFETENSORS_INDEX)!r}: it names the file {plain(name)!r}; expected a file that is in its "
        f"folder"
    )


def _check_rotation(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError if `rope_parameters` and the names that it had before say different things of the rotation.
    transformers would take the values of one of them, and its own default for what that one leaves out."""
    newer, older = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if not isinstance(newer, Mapping) or not isinstance(older, Mapping) or not ROTATION & newer.keys():
        return  # one rotation for each type of layers has no older form
    beside = {name: config[name] for name in ROTATION & config.keys() if config[name] is not None}
    found = {"rope_scaling": older} if older else {}
    found |= {name: {**newer, name: value} for name, value in beside.items() if name in newer}
    for name, other in found.items():
        if _rotation({**beside, **other}) != _rotation({**beside, **newer}):
            raise ValueError(
                f"model={str(folder)!r}: config.json has {name}={plain(repr(config[name]))} beside other "
                f"rope_parameters; expected all parameters of the rotation in rope_parameters"
            )


def _rotation(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a rotation with the present name of its type."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {**{name: value for name, value in parameters.items() if name != "type"}, "rope_type": kind}


def check_older_defaults(files: ModelFiles) -> None:
    """Raises ValueError unless `config.json` is fit to say which tokens are drawn. transformers reads it as a
    generation configuration in folders that have none, as its first versions wrote them."""
    if files.gguf_file is None and not os.path.lexists(files.folder / GENERATION_CONFIG):
        _check_generation_config(files.folder / "config.json")


def _check_generation_config(path: Path) -> None:
    """Raises ValueError unless the file is JSON, and everything in it that changes which tokens are drawn exists
    here."""
    found = _read_json(path)
    for name, neutral in UNFOLLOWED.items():
        value = found.get(name)
        if value not in (None, [], {}, *neutral):
            raise ValueError(
                f"model={str(path)!r}: {name}={value!r} changes which tokens are drawn, and nothing here follows it; "
                f"remove it from the file, and give SamplingParams what it is for"
            )
    ends = found.get("eos_token_id")
    try:
        default_sampling_params(SimpleNamespace(**found))
        for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            check_int("eos_token_id", end, -1)
    except (TypeError, ValueError) as error:
        whole = "the file" if path.name == GENERATION_CONFIG else "it"
        raise ValueError(f"model={str(path)!r}: {error}; correct it or remove {whole}") from error


def check_one_value(files: ModelFiles, names: Sequence[str], weight: str) -> None:
    """Raises ValueError if the tensors of these names differ, although all are read as the same weight of the model."""
    first, *others = names
    for other in others:
        if not _are_equal((first, files.tensors[first]), (other, files.tensors[other])):
            raise ValueError(
                f"model={str(files.path)!r}: its tensors {first} and {other} are both read as {weight}, and they "
                f"differ; remove the wrong one"
            )


def _are_equal(*places: tuple[str, Path]) -> bool:
    """Whether two tensors are equal. places: the name and the file of each."""
    found = []
    for name, path in places:
        with safe_open(path, framework="pt") as file:
            found.append(file.get_tensor(name))
    return found[0].dtype == found[1].dtype and torch.equal(*found)


def _check_unquantized(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError if a file of the folder that transformers does not read says that the weights are quantized."""
    found = [f"config.json has {key}" for key in QUANTIZATION_KEYS if config.get(key)]
    found += [f"{name} says how" for name in QUANTIZATION_FILES if (folder / name).is_file()]
    if (folder / MODELOPT_CONFIG).is_file():
        content = _read_json(folder / MODELOPT_CONFIG)
        quantization = content.get("quantization", content) or {}
        method = quantization.get("quant_algo") if isinstance(quantization, Mapping) else quantization
        found += [f"{MODELOPT_CONFIG} has quant_algo {method!r}"] if method else []
    if found:
        raise ValueError(
            f"model={str(folder)!r}: its weights are quantized ({', '.join(found)}); expected plain safetensors or GGUF"
        )


def check_safetensors(path: Path) -> list[str]:
    """The names of a file's tensors.

    Raises:
        ValueError: the file does not exist, is damaged or incomplete, or has a quantized tensor.
    """
    if not path.is_file():
        raise ValueError(
            f"model={str(path)!r}: there is no such file, and no {SAFETENSORS_INDEX} that names its parts; expected "
            f"{EXPECTED_MODEL}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 it is no mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"model={str(path)!r}: safetensors cannot open it ({error}); expected a complete safetensors file, so copy "
            f"or download it again"
        ) from error
    for name, kind in types.items():
        is_number = kind in PLAIN_TYPES and not (kind in INTEGER_TYPES and WEIGHT.fullmatch(name))
        if not is_number and not MASK.fullmatch(name):
            raise ValueError(
                f"model={str(path)!r}: its tensor {plain(name)} has type {kind}, so its weights are quantized; "
                f"expected plain safetensors (F64, F32, F16 or BF16) or GGUF"
            )
    return [*types]


def check_gguf(path: Path) -> None:
    """Raises ValueError unless the file begins with GGUF's magic bytes."""
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise ValueError(f"model={str(path)!r}: it begins with {magic!r}, not {MAGIC!r}; expected {EXPECTED_MODEL}")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"model={str(path)!r}: there is no such file; expected {EXPECTED_MODEL}")
    try:
        content = json.loads(path.read_text("utf-8"))  # as transformers does, so without a byte-order mark
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model={str(path)!r}: it is not JSON ({error}); expected {EXPECTED_MODEL}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model={str(path)!r}: it holds no JSON object; expected {EXPECTED_MODEL}")
    return content
