"""The HTTP server beside a hostile client: pauses of a witness's stream, times of /health, and memory.

    python -m benchmarks.engines.serve_hostile  # results/serve-hostile-cpu.json
    python -m benchmarks.engines.serve_hostile --resume  # the kinds that this commit has not measured
    python -m benchmarks.engines.serve_hostile --kinds brackets "everything at once"
    python -m benchmarks.engines.serve_hostile --device cuda  # results/serve-hostile-CARD.json

A witness streams one greedy answer after another. Meanwhile a hostile client sends, one kind after another, what could
stop, slow or fill a server: bodies that are large, deep or wrong, lists without end, forms that compile for minutes or
overflow a stack, programs as templates, connections that say nothing or read nothing. Every answer of the witness must
be equal, no pause longer than half a second, no /health later than a fifth, and the server's memory at most 2 GiB above
what it is at first. Last come the clients of `serve_load`, while all of it is sent again and again. The machine must be
idle: what else it does pauses the witness too, so that the script first measures the pauses of a witness by itself.
What sends has the lowest priority for the same reason. The result is written after every kind.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from transformers import AutoTokenizer

from benchmarks.engines.serve_load import (
    Clients,
    expected_answers,
    gauges,
    memory_mb,
    ours,
    server,
)
from benchmarks.lib.options import integer, usable_device
from benchmarks.lib.report import environment, read_result, short_name, with_earlier, write_result
from benchmarks.lib.smollm2 import save_folder
from trunkattn.server.limits import LIMITS

COMPLETE: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
NOTHING: Final = "nothing"
OTHERS: Final = ("idle connections", "refused bodies", "live pages", "everything at once")
CLIENTS: Final = 32
LOAD: Final = f"{CLIENTS} clients beside all of it"
MAX_PAUSE_S: Final = 0.5
MAX_HEALTH_S: Final = 0.2
MAX_GROWTH_MB: Final = 2048
IDLE_CONNECTIONS: Final = 500
LIVE_PAGES: Final = 100
OPEN: Final = "still open"
PATIENCE_S: Final = 600  # of the witness
GIVES_UP_S: Final = 120  # a hostile client closes its connection then, which ends its request
GONE: Final = f"gone after {GIVES_UP_S} s"
LOWEST_PRIORITY: Final = 19
WITNESS: Final = {"prompt": "The tide is", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
MESSAGES: Final = [{"role": "user", "content": "hi"}]
CHAIN: Final = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)}
RULES: Final = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000)) + '\nr3000: "b"'
# Tools that a chat template does not read are refused, and calls weigh little, so the model's own template goes through
# all of them as well. It writes how long they are: they themselves are more than a prompt may have.
READS_ALL: Final = "{{ [messages, tools] | tojson | length }}"
LOOP: Final = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


def completion(**changes: Any) -> tuple[str, bytes]:
    """A request to complete a short prompt."""
    return COMPLETE, json.dumps({"prompt": "x", "max_tokens": 2} | changes).encode()


def chat(**changes: Any) -> tuple[str, bytes]:
    """A request to answer a short conversation."""
    return CHAT, json.dumps({"messages": MESSAGES, "max_tokens": 2} | changes).encode()


@cache
def hostile() -> dict[str, tuple[str, bytes]]:
    """A request of each kind: path and body. They are made once: what makes them takes a processor for seconds."""
    tool = {"type": "function", "function": {"name": "f", "description": "ab " * 3_500_000}}
    many = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * 990_000}}}
    optional, every = ({"properties": {f"p{i:04}": {"type": "null"} for i in range(n)}} for n in (480, 4900))
    required = {**every, "required": list(every["properties"])}
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    small, full = ({"function": {"name": "f", "arguments": text}} for text in ("{}", "[" + "1," * 40_000 + "1]"))
    most = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * 45_000}}}
    return {
        "a wrong item after a million": (COMPLETE, b'{"prompt":[' + b"1," * 990_000 + b'"x"]}'),
        "eight million items": (COMPLETE, b'{"prompt":[' + b"1," * 7_900_000 + b"1]}"),
        "a body over the limit": (COMPLETE, b'{"prompt":"' + b"a" * 40_000_000 + b'"}'),
        "a text of 10 MB": completion(prompt="ab " * 3_500_000),
        "tools of 10 MB": chat(tools=[tool]),
        "tools of a million values": chat(tools=[many]),
        "a million lists": (COMPLETE, b'{"prompt":[' + b"[]," * 990_000 + b"[]]}"),
        "names that do not exist": completion(**{f"zq{i}": 1 for i in range(45_000)}),
        "the most calls": chat(messages=[{"role": "assistant", "tool_calls": [small] * 128}] * 45),
        "the most values": chat(tools=[most]),
        "values in arguments": chat(messages=[{"role": "assistant", "tool_calls": [full] * 10}]),
        "a million values of a template": chat(chat_template_kwargs={"x": [1] * 990_000}),
        "brackets": (COMPLETE, b"[" * 10_000_000),
        "brackets in arguments": chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}]),
        "numbers without end": completion(temperature=10**400, top_k=2**63),
        "bad words": completion(bad_words=["w"] * 40_000),
        "all bad words": completion(bad_words=[f"w{i}" for i in range(256)], n=64),
        "stop tokens": completion(stop_token_ids=[5] * 2_000_000),
        "all log-probabilities": completion(logprobs=49_152),
        "the most log-probabilities": completion(logprobs=20, n=32, max_tokens=16),
        "log-probabilities of long prompts": completion(prompt=["tide " * 4000] * 8, echo=True, logprobs=20),
        "many answers to long prompts": completion(prompt=["tide " * 7000] * 2, n=64),
        "a regex of 90 kB": completion(structured_outputs={"regex": "(a|b)?" * 15_000}),
        "a regex that takes its time": completion(structured_outputs={"regex": "(a|b)?" * 1_300}),
        "a schema that compiles for minutes": completion(structured_outputs={"json": {"multipleOf": 12_345_677}}),
        "a schema of a million values": completion(structured_outputs={"json": {"enum": [1] * 990_000}}),
        "the largest schema": completion(structured_outputs={"json": required}, max_tokens=64),
        "the most optional names": completion(structured_outputs={"json": optional}, max_tokens=64),
        "a grammar of white space": completion(structured_outputs={"grammar": "start" + " " * 110_000}),
        "a chain of references": completion(structured_outputs={"json": {"$defs": CHAIN, "$ref": "#/$defs/d0"}}),
        "a chain of rules": completion(structured_outputs={"grammar": RULES}),
        "a program as template": chat(chat_template_kwargs={"chat_template": LOOP}),
    }


def read_all(folder: Path) -> None:
    """Lets the chat template of a saved model read all of a conversation and its tools."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template += READS_ALL
    tokenizer.save_pretrained(folder)


class Watch:
    """A witness, /health and the memory of a server, until `end`."""

    def __init__(self, url: str, memory: Callable[[], float]) -> None:
        self.url, self._memory = url, memory
        self.pause_s = self.health_s = self.memory_mb = 0.0
        self.texts: set[str] = set()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=watch) for watch in (self._witness, self._health)]

    @contextmanager
    def watching(self) -> Iterator["Watch"]:
        """Context in which everything is watched."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _witness(self) -> None:
        while not self._over.is_set():
            text, last = "", None
            with httpx.stream("POST", self.url + COMPLETE, json=WITNESS, timeout=PATIENCE_S) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    self.pause_s, last = max(self.pause_s, 0.0 if last is None else now - last), now
                    text += json.loads(line[6:])["choices"][0]["text"]
            self.texts.add(text)

    def _health(self) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as client:
            while not self._over.wait(0.05):
                began = time.perf_counter()
                client.get("/health").raise_for_status()
                self.health_s = max(self.health_s, time.perf_counter() - began)
                self.memory_mb = max(self.memory_mb, self._memory())

    def figures(self) -> dict[str, float]:
        """The worst of what was seen."""
        return {
            "pause_s": round(self.pause_s, 3),
            "health_s": round(self.health_s, 3),
            "memory_mb": round(self.memory_mb, 1),
        }


def send(url: str, path: str, body: bytes, times: int) -> str:
    """Sends a request several times at once; the statuses."""
    seen: list[str] = []

    def one() -> None:
        try:
            headers = {"Content-Type": "application/json"}
            seen.append(str(httpx.post(url + path, content=body, headers=headers, timeout=GIVES_UP_S).status_code))
        except httpx.ReadTimeout:
            seen.append(GONE)
        except httpx.HTTPError as error:
            seen.append(type(error).__name__)

    together([one] * times)
    return ",".join(sorted(set(seen)))


def together(calls: Sequence[Callable[[], object]]) -> None:
    """Makes calls at the same time, each on a thread, and waits for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait(seconds: float, url: str) -> str:
    """Sends nothing to an address."""
    time.sleep(seconds)
    return "-"


def hold_connections(url: str) -> str:
    """Opens connections that say nothing, or half a head, and keeps them for some seconds."""
    where = urlsplit(url)
    held = [socket.create_connection((where.hostname, where.port)) for _ in range(IDLE_CONNECTIONS)]
    for connection in held[::2]:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    time.sleep(3)
    for connection in held:
        connection.close()
    return f"{len(held)} held"


def hold_refused(url: str) -> str:
    """Opens connections whose body is refused, reads no answer, and goes on sending until the server closes them."""
    where = urlsplit(url)
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    many = b"1\r\nx\r\n" * (LIMITS.chunks + 1)
    held, end = [], time.monotonic() + 3 * LIMITS.header_seconds
    for number in range(IDLE_CONNECTIONS):
        held.append(socket.create_connection((where.hostname, where.port)))
        held[-1].sendall(head + (b"zz\r\n" if number % 10 else many))
    left = held
    while left and time.monotonic() < end:
        time.sleep(1)
        left = [connection for connection in left if takes_more(connection)]
    for connection in held:
        connection.close()
    return f"{len(held)} held, {len(left)} {OPEN}" if left else f"{len(held)} held, and closed by the server"


def takes_more(connection: socket.socket) -> bool:
    """Whether the server still takes what a connection sends."""
    try:
        connection.sendall(b"x")
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def open_pages(url: str) -> str:
    """Opens many live pages at once, and reads some seconds of each."""

    def look() -> None:
        with client.stream("GET", url + "/live") as response:
            seen.append(str(response.status_code))
            end = time.monotonic() + 3
            for _ in response.iter_lines():
                if time.monotonic() > end:
                    return

    seen: list[str] = []
    # One client: to make one costs more than what it asks for.
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=LIVE_PAGES)) as client:
        together([look] * LIVE_PAGES)
    return ",".join(sorted(set(seen)))


def send_everything(url: str) -> str:
    """Sends a request of each kind, all at once."""
    kinds = hostile().values()
    together([partial(send, url, path, body, 1) for path, body in kinds])
    return f"{len(kinds)} kinds"


def load(url: str, expected: dict[str, str], seconds: int) -> str:
    """Lets clients of every kind ask beside everything that is hostile; how often they saw what."""
    clients, over = Clients(url, expected, seed=0), threading.Event()

    def send_again() -> None:
        while not over.is_set():
            send_everything(url)

    hostile_client = threading.Thread(target=send_again)
    hostile_client.start()
    asyncio.run(clients.run(seconds, CLIENTS))
    over.set()
    hostile_client.join()
    return ", ".join(f"{what} {count}" for what, count in sorted(clients.seen.items()))


def held_pages(url: str) -> float:
    """Pages that the server holds, once nothing is left or after some seconds."""
    end = time.monotonic() + 10
    while (left := gauges(url))["kv_pages_in_use"] and time.monotonic() < end:
        time.sleep(0.1)
    return left["kv_pages_in_use"]


Act = Callable[[str], str]


def acts(folder: Path, names: Sequence[str], options: argparse.Namespace) -> dict[str, Act]:
    """What is done to the server, of the address that it gets. folder: of the model. names: the kinds."""
    kinds: dict[str, Act] = {NOTHING: partial(wait, options.seconds)}
    for name, (path, body) in hostile().items():
        kinds[name] = partial(send, path=path, body=body, times=options.times)
    kinds |= dict(zip(OTHERS, (hold_connections, hold_refused, open_pages, send_everything), strict=True))
    if LOAD in names:
        kinds[LOAD] = partial(load, expected=expected_answers(folder, options.device), seconds=options.load_seconds)
    return {name: kinds[name] for name in names}


def card_of(device: str) -> dict[str, str]:
    """The name of the GPU, as a result holds it; nothing for a CPU."""
    import torch

    return {"card": torch.cuda.get_device_name()} if device == "cuda" else {}


def result_of(device: str) -> str:
    """The name of the result."""
    return f"serve-hostile-{short_name(card_of(device).get('card', 'cpu'))}"


def run(folder: Path, kinds: dict[str, Act], device: str) -> list[dict[str, Any]]:
    """Measures some kinds, and writes the result after each; a row for each."""
    rows: list[dict[str, Any]] = []
    steps = ("--max-num-batched-tokens", "256", "--max-num-seqs", "64")
    command = ours(folder, 8206, "--device", device, "--dtype", "float32", *steps)
    # A process of its own sends, and gives way to the server: hostile clients have machines of their own.
    elsewhere = ProcessPoolExecutor(1, get_context("spawn"), os.nice, (LOWEST_PRIORITY,))
    texts: set[str] = set()
    with elsewhere, server(command, folder / "hostile.log") as (url, process):
        elsewhere.submit(hostile).result()
        for name, act in kinds.items():
            with Watch(url, lambda: memory_mb(process)).watching() as watch:
                time.sleep(0.5)
                seen = elsewhere.submit(act, url).result()
            texts |= watch.texts
            row = {"kind": name, **watch.figures(), "witness_answers": len(texts), "held_pages": held_pages(url)}
            rows.append(row | {"answers": seen})
            print(f"{name:36} {rows[-1]}", flush=True)
            figures = card_of(device) | {"rows": with_earlier(result_of(device), rows, ("kind",))}
            write_result(result_of(device), figures, "transformers")
    return rows


def bad_kinds(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The kinds by which somebody else was harmed, of the rows of a run in their order."""
    return [
        row["kind"]
        for row in rows
        if row["witness_answers"] > 1 or row["held_pages"] or row["health_s"] > MAX_HEALTH_S
        or (row["pause_s"] > MAX_PAUSE_S and row["kind"] != NOTHING)
        or row["memory_mb"] > rows[0]["memory_mb"] + MAX_GROWTH_MB
        or any(wrong in row["answers"] for wrong in ("differs", "503", OPEN))  # 503: what should try a form did not run
    ]  # fmt: skip


def measured_kinds(device: str) -> set[str]:
    """The kinds that the result has of this commit."""
    rows = read_result(result_of(device)).get("rows", ())
    return {row["kind"] for row in rows if row.get("commit") == environment()["commit"]}


def main() -> None:
    names = (NOTHING, *hostile(), *OTHERS, LOAD)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, metavar="KIND", help="what to measure")
    parser.add_argument("--resume", action="store_true", help="leave out what the result has of this commit")
    parser.add_argument("--seconds", type=integer(1, 3600), default=10, help="of the witness by itself")
    parser.add_argument("--load-seconds", type=integer(1, 86_400), default=180, help=f"of {LOAD}")
    parser.add_argument(
        "--device",
        type=usable_device,
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the server runs; default: cpu",
    )
    parser.add_argument("--times", type=integer(1, 64), default=3, help="requests of a kind at once")
    arguments = parser.parse_args()
    measured = measured_kinds(arguments.device) if arguments.resume else set()
    wanted = [name for name in names if name in arguments.kinds and name not in measured]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "smollm2"
        save_folder(folder)
        read_all(folder)
        rows = run(folder, acts(folder, wanted, arguments), arguments.device)
    bad = bad_kinds(rows)
    sys.exit(f"the witness or /health had to wait, memory grew, or something was wrong: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
