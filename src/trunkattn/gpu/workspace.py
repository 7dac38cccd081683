"""Memory that the launches of all plans of a back end share: partial results and scales."""

import math
from typing import Final

import torch

from trunkattn.backend import no_partials
from trunkattn.config import AttentionConfig
from trunkattn.layer_inputs import LayerInputs, scale_tensor
from trunkattn.numerics import MAX_INT32

_MOST_KEPT: Final = 4096  # cached products of scales that are Python numbers


def counted(number: int) -> int:
    """The number itself, of places that kernels count in int32. Raises OverflowError if there are too many."""
    if number > MAX_INT32:
        raise OverflowError(f"{number} places: expected at most {MAX_INT32}")
    return number


def counted_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose places kernels count in int32. Raises OverflowError if there are too many."""
    counted(math.prod(shape))
    return torch.zeros(shape, dtype=dtype, device=device)


class Workspace:
    """Partial states: outputs [slots, num_qo_heads, head_dim_v] and lse [slots, num_qo_heads], float32."""

    def __init__(self, config: AttentionConfig, num_slots: int, device: torch.device) -> None:
        self._config, self._device = config, device
        self.partial, self.partial_lse = self._allocate(max(1, num_slots))

    def _allocate(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_slots, self._config.num_qo_heads)
        partial = torch.empty(*shape, self._config.value_dim, dtype=torch.float32, device=self._device)
        return partial, torch.empty(shape, dtype=torch.float32, device=self._device)

    def grow(self, num_slots: int) -> None:
        """Makes room for `num_slots` partial results. Earlier contents are lost.

        Raises:
            ValueError: there is no memory for them; what was there is kept.
        """
        if num_slots <= len(self.partial):
            return
        try:
            self.partial, self.partial_lse = self._allocate(num_slots)
        except torch.OutOfMemoryError as error:
            raise ValueError(no_partials(self._config, num_slots)) from error


class Scales:
    """The float32 factors of logits and values for each group of heads. Products of scales that are Python numbers are
    cached, because making them takes launches and every layer may have its own."""

    def __init__(self, config: AttentionConfig, num_groups: int, device: torch.device) -> None:
        self.ones = torch.ones(num_groups, dtype=torch.float32, device=device)
        self._logit_scale = self.ones * config.logit_scale
        self._kept: dict[tuple[bool, tuple[float, ...]], torch.Tensor] = {}

    def of(self, inputs: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale of the logits and of the values of a layer."""
        return self._times(self._logit_scale, inputs.q_scale, inputs.k_scale), self._times(self.ones, inputs.v_scale)

    def _times(self, base: torch.Tensor, *scales: float | torch.Tensor | None) -> torch.Tensor:
        factors = [value for value in scales if value is not None and not _is_one(value)]
        numbers = tuple([value for value in factors if not isinstance(value, torch.Tensor)])
        key = (base is self.ones, numbers)
        if len(numbers) == len(factors) and key in self._kept:
            return self._kept[key]
        product = base
        for value in factors:
            product = product * scale_tensor(value)
        # A tensor made during a capture belongs to the graph's memory, so it is not cached. Captured graphs may read
        # cached tensors, so none is ever dropped.
        if len(numbers) == len(factors) and len(self._kept) < _MOST_KEPT and not _is_capturing(base.device):
            self._kept[key] = product
        return product


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_one(scale: float | torch.Tensor) -> bool:
    """Whether a scale changes nothing, as far as the host can see."""
    return not isinstance(scale, torch.Tensor) and scale == 1
