"""Plain names of what is measured."""

import re
from types import MappingProxyType
from typing import Final

# What batches stand for: requests x (tokens of each level, from what all share to what is a request's own)
USES: Final = MappingProxyType(
    {
        "64 x (8192 + 512)": "64 questions on one long document",
        "64 x (1024 + 8 groups x 3072 + 256)": "a system prompt, 8 documents, 8 questions on each",
        "256 x (1024 + 128)": "256 requests with the same few-shot prompt",
        "64 x (2048 + 256)": "64 samples of one prompt (rollouts)",
        "8 x (4096 + 128)": "8 samples of one prompt",
        "32 x (2048)": "nothing shared",
        "64 x (4 groups x 12000 + 64)": "16 questions on each of 4 documents",
        "128 x (8 groups x 512 + 128)": "16 samples of each of 8 prompts (rollouts)",
        "128 x (640 + 64)": "128 requests with the same few-shot prompt",
        "128 x (704)": "nothing shared, many requests",
        "8 x (8192)": "nothing shared, long texts",
        "1 x (2048)": "one request",
        "16 x (4096 + 256)": "16 samples of one prompt",
        "64 x (4096)": "nothing shared, 64 requests",
        "64 x (65536 + 128)": "64 questions on a very long document",
        "64 x (4 groups x 12032 + 256)": "16 questions on each of 4 documents",
        "128 x (896 + 320)": "128 requests with the same few-shot prompt",
        "128 x (8 groups x 1216 + 512)": "16 samples of each of 8 prompts (rollouts)",
        "1 x (4096)": "one request",
        "96 x (2048 + 8 groups x 512 + 128)": "a system prompt, 8 tasks, 12 requests for each",
        "32 x (16384 + 64)": "32 short answers about one long document",
        "256 x (512 + 64)": "256 requests with the same short prompt",
        "48 x (6 groups x 3072 + 704)": "8 questions on each of 6 documents",
        "17 x (2944)": "nothing shared, 17 requests",
        "5 x (20032 + 1344)": "5 conversations about one long document",
        "64 conversations": "users of one chat, each with a text of its own length",
        "64 agents": "agents with tools and turns, each as long as it is",
    }
)
_TRAFFIC: Final = MappingProxyType(
    {
        "trace": "a trace of Mooncake's users",
        "mooncake": "a trace of Mooncake's users",
        "documents": "questions on documents",
        "conversation": "conversations",
        "toolagent": "sessions of tool agents",
    }
)
_HEADS: Final = MappingProxyType(
    {"32/8": "32/8 (Llama-3-8B)", "64/8": "64/8 (Llama-3-70B)", "32/32": "32/32 (Llama-2-7B)", "32/4": "32/4 (Yi-6B)"}
)


def use_of(batch: str) -> str:
    """What a batch stands for; the batch itself if it has no name."""
    return USES.get(batch, batch)


def traffic(workload: str) -> str:
    """Requests that arrive, such as "documents 6/s"."""
    kind, *rate = workload.split()
    name = _TRAFFIC.get(kind, kind)
    return f"{name}, {rate[0].removesuffix('/s')} per second" if rate else name


def heads(text: str) -> str:
    """Query and KV heads, and a model that has them."""
    return _HEADS.get(text, text)


def offline(case: str) -> str:
    """A batch of the CPU's benchmarks, such as "32 × (2048 + 64), SmolLM2", "1 × 8192" or "32 × 256 unshared"."""
    batch, comma, model = case.partition(", ")
    found = re.fullmatch(r"(\d+) × (?:\((\d+) \+ (\d+)\)|(\d+)(?: unshared)?)", batch)
    if not found:
        return case
    requests, shared, own, whole = found.groups()
    if whole:
        return tree(f"{requests}_{whole}") + comma + model
    return tree(f"1,{requests}_{shared},{own}") + comma + model


def tree(text: str) -> str:
    """A tree of nodes and tokens per level, such as "1,64_8192,512"; and a tree of one level, which shares nothing.

    Raises:
        ValueError: it is not such a tree.
    """
    if not re.fullmatch(r"\d+(,\d+)*_\d+(,\d+)*", text):
        raise ValueError(f"tree {text!r}: expected nodes and tokens of each level, such as '1,64_8192,512'")
    nodes, tokens = (list(map(int, part.split(","))) for part in text.split("_"))
    if len(nodes) == 1:
        return (
            f"{nodes[0]} requests of {tokens[0]:,} tokens" if nodes[0] > 1 else f"one request of {tokens[0]:,} tokens"
        )
    *above, own = zip(nodes, tokens, strict=True)
    shared = ", ".join(f"{count} × {length:,}" if count > 1 else f"{length:,}" for count, length in above)
    return f"{own[0]} requests: {shared} shared, {own[1]:,} own"
