"""The weights in a GGUF file under transformers' names: every tensor has a place, is read elsewhere, or is refused."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from trunkattn.engine.model.gguf.header import GgufHeader
from trunkattn.engine.model.gguf.rope import FREQUENCY_DIVISORS, LONG_FACTORS, SHORT_FACTORS

READ_ELSEWHERE: Final = frozenset({FREQUENCY_DIVISORS, LONG_FACTORS, SHORT_FACTORS})
# Rotary frequencies that old converters wrote. They follow from the base of the rotation.
HARMLESS: Final = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")


class _Names:
    """The names of the weights of a module and of its children: all that transformers' table needs of a model.

    Only direct children count, because no architecture names its tensors by a deeper one. The names of every module
    would take most of the time that loading takes.
    """

    def __init__(self, module: nn.Module, children: Iterable[tuple[str, nn.Module]], config: PretrainedConfig) -> None:
        self.config = config
        self._state, self._children = module.state_dict(), [(name, _Names(one, (), config)) for name, one in children]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights by name."""
        return self._state

    def named_children(self) -> Iterator[tuple[str, "_Names"]]:
        """Children by name."""
        return iter(self._children)


def gguf_weights(header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights of the model of `config`, of type `dtype`, on the CPU.

    Raises:
        ValueError: naming a tensor of the file that the model has no place for.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = header.architecture
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    table = get_gguf_hf_weights_map(_Names(skeleton, skeleton.named_children(), config), processor)
    found: dict[str, Any] = {"tensors": {}}
    for name in header.tensors:
        if name in READ_ELSEWHERE or HARMLESS.fullmatch(name):
            continue
        result = processor.process(
            weights=header.values(name), name=name, tensor_key_mapping=table, parsed_parameters=found
        )
        if result.name is None:  # the processor combines it with other tensors to one weight
            continue
        if result.name not in table:
            raise ValueError(
                f"its tensor {name} has no place in transformers' {config.model_type}, whose answers would be another "
                f"model's; use the model's safetensors folder"
            )
        found["tensors"][table[result.name]] = torch.from_numpy(result.weights.copy()).to(dtype)
    return {name: tensor.to(dtype) for name, tensor in found["tensors"].items()}
