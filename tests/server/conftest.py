"""A server on a real socket, over a tiny random model with a tokenizer of single bytes."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from trunkattn import LLM
from trunkattn.server import AppServer, ServerOptions, create_app

NAME = "tiny"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | length }}\n{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_model(folder: Path, more: Sequence[AddedToken] = ()) -> None:
    """Random weights with logits that differ from token to token. more: tokens besides single bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257 + len(more),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "lm_head", "embed_tokens")):
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    for token in more:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-server")
    save_model(path)
    return path


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., None]:
    """See `save_model`."""
    return save_model


@pytest.fixture(scope="session")
def reference(folder: Path) -> LLM:
    """The same model without a server."""
    return LLM(folder, num_pages=64)


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    llm: LLM
    app: FastAPI
    event_loop: asyncio.AbstractEventLoop

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **options)

    def say(self, text: str) -> None:
        """Makes every answer of the model a text, then end-of-sequence."""
        tokenizer = self.llm.tokenizer
        token_ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

        def sample(logits: Any, specs: Any) -> list[int]:
            return [token_ids[min(spec.position, len(token_ids) - 1)] for spec in specs]

        self.llm.engine._sampler.sample = sample  # type: ignore[method-assign]

    def is_idle(self) -> bool:
        engine = self.llm.engine
        return not engine.has_unfinished and engine.scheduler.cache.num_pages_in_use == 0

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Waits until no request holds a page; the cache's books must agree then."""
        end = time.monotonic() + seconds
        while not self.is_idle():
            assert time.monotonic() < end, "requests or pages are left over"
            time.sleep(0.01)
        self.llm.engine.scheduler.cache.check_integrity()


@pytest.fixture(scope="session")
def start_server(folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with options of `ServerOptions`, and ends them all."""
    running: list[tuple[AppServer, threading.Thread]] = []

    def start(num_pages: int = 256, path: Path = folder, **options: Any) -> Server:
        llm = LLM(path, num_pages=num_pages)
        app = create_app(llm, ServerOptions(NAME, port=0, **options))
        server = AppServer(app, shutdown_seconds=1, port=0, log_level="warning")
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        running.append((server, thread))
        port = server.servers[0].sockets[0].getsockname()[1]
        return Server(f"http://127.0.0.1:{port}", llm, app, server.servers[0].get_loop())

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()
