"""Prompts in plans that are made on the device. The host knows the lengths of prompts and lists their items; their
pages stay on the device, so that no step waits for it.

The host cannot know what prompts share, so each reads its own keys. That costs little if arithmetic bounds the time,
but much if several prompts have only a few tokens left. The host plans such steps.
"""

from dataclasses import replace
from typing import Final, NamedTuple

import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, PromptChunks

MOST_PROMPTS: Final = 64  # the host plans steps of more prompts, because it finds what they share
FEW_TOKENS: Final = 8  # the host also plans steps of several prompts if each has at most this many tokens left


class PromptRoom(NamedTuple):
    """The most that a step of prompts may have to be planned on the device."""

    prompts: int
    tokens: int

    def attention(self, config: AttentionConfig, device: torch.device, decodes: Capacity) -> BatchAttention:
        """The attention of such steps. With plans of their own they cost steps of decodes nothing.

        Args:
            config: the layers'.
            device: a GPU.
            decodes: the capacity of the layers' decodes.
        """
        config = replace(config, execution="serial")  # nothing decodes beside them
        few = replace(decodes, max_requests=self.prompts, max_query_tokens=1, max_query_len=1)
        return BatchAttention(config, device, replace(few, max_chunk_tokens=self.tokens))

    def chunks(self, query_lens: torch.Tensor, seq_lens: torch.Tensor) -> PromptChunks | None:
        """What the host tells the device of a step; None: it is to plan the step itself, as there are too many prompts
        or tokens, a row of padding, or only short prompts.

        Args:
            query_lens, seq_lens: [prompts] on the CPU.
        """
        fits = 0 < len(query_lens) <= self.prompts and int(query_lens.sum()) <= self.tokens
        if not fits or int(query_lens.min()) < 1 or (len(query_lens) > 1 and int(query_lens.max()) <= FEW_TOKENS):
            return None
        return PromptChunks(0, query_lens.to(torch.int32), seq_lens.to(torch.int32), 0)


def room_for(requests: int, tokens: int) -> PromptRoom:
    """The room of an engine. A step has at most `requests` requests, and `tokens` query tokens of prompts."""
    return PromptRoom(min(MOST_PROMPTS, requests), tokens)


def one_prompt(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], PromptChunks]:
    """The tables on the device for `BatchAttention.plan`, and what the host knows, of a step of one prompt of one
    token. The same kernels compute it as any other prompt."""
    one = torch.ones(1, dtype=torch.int32, device="cpu")
    table, starts = (torch.arange(size, dtype=torch.int32, device=device) for size in (1, 2))
    return (table[None], one.to(device), starts), PromptChunks(0, one, one, 0)
