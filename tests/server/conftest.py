"""A server on a real socket, over a tiny random model with a tokenizer of single bytes."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from fastapi import FastAPI
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from trunkattn import LLM
from trunkattn.engine.engine import Engine
from trunkattn.engine.outputs import RequestOutput
from trunkattn.server import AppServer, ServerOptions, create_app

NAME = "tiny"
PATIENCE = 300.0  # seconds until a test gives up what it waits for; a machine that is busy, or compiles, takes its time
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | length }}\n{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def wait_for(condition: Callable[[], object]) -> None:
    """Waits until it is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what the test waits for does not happen"
        time.sleep(0.01)


def save_model(folder: Path, more: Sequence[AddedToken] = (), num_positions: int = 512) -> None:
    """Random weights with logits that differ from token to token. more: tokens besides single bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257 + len(more),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
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
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE, **options)

    def send(self, body: dict[str, Any]) -> socket.socket:
        """A raw request for a completion, so that the test decides when and how the connection ends."""
        where = urlsplit(self.url)
        connection = socket.create_connection((where.hostname, where.port))
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def say(self, text: str) -> None:
        """Makes every answer of the model a text, then end-of-sequence."""
        tokenizer = self.llm.tokenizer
        token_ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

        def sample(logits: Any, specs: Any) -> list[int]:
            return [token_ids[min(spec.position, len(token_ids) - 1)] for spec in specs]

        self.llm.engine._sampler.sample = sample  # type: ignore[method-assign]

    def is_idle(self) -> bool:
        """Whether no request holds a page, after all that the engine's thread has been told; the cache's books must
        agree then."""
        found: Future[bool] = Future()
        assert self.app.state.service.loop.is_running, "the engine has stopped"

        def look(engine: Engine) -> None:
            try:
                is_idle = not engine.has_unfinished and engine.scheduler.cache.num_pages_in_use == 0
                if is_idle:
                    engine.scheduler.cache.check_integrity()
                found.set_result(is_idle)
            except BaseException as error:
                found.set_exception(error)

        self.app.state.service.loop.call(look)
        return found.result(PATIENCE)

    def wait_idle(self) -> None:
        """Waits until no request holds a page."""
        wait_for(self.is_idle)

    def wait_for_samples(self, count: int) -> None:
        """Waits until the live page has so many more samples."""
        live = self.app.state.live
        most = live._num_samples + count
        wait_for(lambda: live._num_samples >= most)

    def stand_still(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Until the event is set, answers that have begun stay as they are, so that a test can look at them. They have
        16 tokens by then: a character of several tokens is sent when it is whole, and a stream begins with it."""
        go_on, engine, step = threading.Event(), self.llm.engine, self.llm.engine.step

        def step_of_beginners() -> list[RequestOutput]:
            scheduler = engine.scheduler
            have_begun = all(one.num_tokens > one.num_prompt_tokens + 16 for one in scheduler.running)
            if have_begun and not scheduler.waiting and not go_on.wait(0.02):
                return []
            return step()

        monkeypatch.setattr(engine, "step", step_of_beginners)
        return go_on


def connected(server: Server) -> socket.socket:
    where = urlsplit(server.url)
    connection = socket.create_connection((where.hostname, where.port))
    connection.settimeout(PATIENCE)
    return connection


def whole_answer(server: Server, sent: bytes | str) -> tuple[int, dict[str, str], str]:
    """The status, the headers and the body of what the server answers to some bytes."""
    with connected(server) as connection:
        connection.sendall(sent.encode() if isinstance(sent, str) else sent)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    head, _, body = received.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def count_of(server: Server, path: str, status: int) -> float:
    """How many requests of a path were answered with a status."""
    registry, labels = server.app.state.service.metrics.registry, {"path": path, "status": str(status)}
    return registry.get_sample_value("trunkattn_http_requests_total", labels) or 0.0


@pytest.fixture(scope="session")
def start_server(folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with options of `ServerOptions`, and ends them all."""
    running: list[tuple[AppServer, threading.Thread]] = []

    def start(num_pages: int = 256, path: Path = folder, **options: Any) -> Server:
        llm = LLM(path, num_pages=num_pages)
        given = ServerOptions(NAME, port=0, **options)
        app = create_app(llm, given)
        server = AppServer(app, 1, given.timeout_keep_alive, port=0, log_level="warning")
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        running.append((server, thread))
        port = server.servers[0].sockets[0].getsockname()[1]
        return Server(f"http://127.0.0.1:{port}", llm, app, server.servers[0].get_loop())

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(PATIENCE)


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The same server for all tests; each leaves it idle for the next one."""
    yield shared_server
    shared_server.wait_idle()
