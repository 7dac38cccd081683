"""Configurations of latent attention for tests of its planning."""

from typing import Any

import torch

from trunkattn import AttentionConfig

LATENT, ROPE, SCALE = 32, 16, 24**-0.5


def config_of(heads: int, page_size: int = 16, **options: Any) -> AttentionConfig:
    options = {"dtype": torch.float32, "sm_scale": SCALE, "latent_dim": LATENT} | options
    return AttentionConfig(heads, 1, options["latent_dim"] + options.pop("rope", ROPE), page_size, **options)


def deepseek(**options: Any) -> AttentionConfig:
    given = {"dtype": torch.bfloat16, "latent_dim": 512, "rope": 64, "page_size": 64} | options
    return config_of(given.pop("heads", 16), given.pop("page_size"), **given)
