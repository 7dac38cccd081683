"""What the launches of all plans of an executor share: partial states and scales."""

import torch

from trunkattn.config import AttentionConfig
from trunkattn.inputs import LayerInputs, scale_tensor


class Workspace:
    """Partial states: outputs [slots, num_qo_heads, head_dim_v] and lse [slots, num_qo_heads], float32."""

    def __init__(self, config: AttentionConfig, num_slots: int, device: torch.device) -> None:
        self._heads, self._value_dim, self._device = config.num_qo_heads, config.value_dim, device
        self._allocate(max(1, num_slots))

    def _allocate(self, num_slots: int) -> None:
        self.partial = torch.empty(num_slots, self._heads, self._value_dim, device=self._device)
        self.partial_lse = torch.empty(num_slots, self._heads, device=self._device)

    def grow(self, num_slots: int) -> None:
        """Makes room for so many partial states. What was there before is lost."""
        if num_slots > len(self.partial):
            self._allocate(num_slots)


class Scales:
    """What logits and values are multiplied by, [num_kv_heads] float32 each."""

    def __init__(self, config: AttentionConfig, device: torch.device) -> None:
        self.ones = torch.ones(config.num_kv_heads, device=device)
        self._logit_scale = self.ones * config.logit_scale

    def of(self, inputs: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale of the logits and of the values of a layer."""
        logit_scale, v_scale = self._logit_scale, self.ones
        for value in (inputs.q_scale, inputs.k_scale):
            if value is not None and not _is_one(value):
                logit_scale = logit_scale * scale_tensor(value)
        if inputs.v_scale is not None and not _is_one(inputs.v_scale):
            v_scale = self.ones * scale_tensor(inputs.v_scale)
        return logit_scale, v_scale


def _is_one(scale: float | torch.Tensor) -> bool:
    """Whether a scale changes nothing, as far as the host can see."""
    return not isinstance(scale, torch.Tensor) and scale == 1
