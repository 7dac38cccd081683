"""The HTTP server under load on this machine, and its speed with sharing, without it, and beside vLLM's CPU server.

    python -m benchmarks.engines.serve_load  # results/serve-{load,throughput,start}-cpu.json
    python -m benchmarks.engines.serve_load --part throughput --vllm .venv-vllm-0.32.0/bin/python

`load`: 64 clients for three minutes. Most stream an answer and compare it with `LLM.generate`'s; the others go away in
the middle, send bad bodies, huge prompts or wrong keys. Afterwards no page may be held and no request may be left.
`throughput`: the same prompts, greedy, to each server in turn, 32 at a time: four documents and questions on each.
`start`: from the command line to the first answer of eight tokens, with compiled kernels in the cache.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.lib.options import integer
from benchmarks.lib.report import write_result
from benchmarks.lib.smollm2 import model_file, save_folder
from trunkattn import LLM, SamplingParams

NAME, KEY = "smollm2", "the-right-key"
PATH: Final = "/v1/completions"
PARTS: Final = ("load", "throughput", "start")
ANSWER_TOKENS: Final = 24
BAD_BODIES: Final = (
    b"{",
    b"[]",
    b'{"prompt": 1}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "stops": 1}',
)
SUBJECTS: Final = ("tides", "bridges", "bees", "glass", "maps", "rivers", "clocks", "bread")
DOCUMENT: Final = "This is what is known of {}. They have been studied for a long time, and every year adds a little. "
QUESTIONS: Final = ("What is known?", "Who studied them?", "Why do they matter?", "What comes next?", "Sum it up:",
                    "Name one fact.", "Where are they found?", "When did it begin?")  # fmt: skip


def documents(count: int, sentences: int) -> list[str]:
    """Prompts: `count` documents, each with all questions."""
    return [DOCUMENT.format(subject) * sentences + question for subject in SUBJECTS[:count] for question in QUESTIONS]


@contextmanager
def server(command: list[str], log: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server process; its address once it answers."""
    port = next(part for part in reversed(command) if part.isdigit())
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 400
    try:
        while time.monotonic() < end:
            if process.poll() is not None:
                raise RuntimeError(f"{command[:4]} ended: {log.read_text()[-2000:]}")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def ours(folder: Path, port: int, *options: str) -> list[str]:
    """The command line of our server."""
    arguments = ["--model", str(folder), "--served-model-name", NAME, "--quiet", *options, "--port", str(port)]
    return [sys.executable, "-m", "trunkattn", "serve", *arguments]


def memory_mb(process: subprocess.Popen[bytes]) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else float("nan")


class Clients:
    """Clients of every kind, and what they saw."""

    def __init__(self, url: str, expected: dict[str, str], seed: int) -> None:
        self.url, self.expected, self.random = url, expected, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[dict[str, str]] = []

    async def run(self, seconds: float, count: int) -> None:
        """All clients, until the time is over."""
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=120, limits=limits, headers=headers) as client:
            end = time.monotonic() + seconds
            await asyncio.gather(*(self._client(client, end) for _ in range(count)))

    async def _client(self, client: httpx.AsyncClient, end: float) -> None:
        kinds = (self._good, self._good, self._good, self._good, self._leaves, self._bad, self._huge, self._wrong_key)
        while time.monotonic() < end:
            kind = self.random.choice(kinds)
            try:
                self.seen[f"{kind.__name__.strip('_')}: {await kind(client)}"] += 1
            except httpx.HTTPError as error:
                self.seen[f"{kind.__name__.strip('_')}: {type(error).__name__}"] += 1

    async def _good(self, client: httpx.AsyncClient, leave_after: int | None = None) -> str:
        prompt = self.random.choice(list(self.expected))
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        text, events = "", 0
        async with client.stream("POST", self.url + PATH, json=body) as response:
            if response.status_code != 200:
                return str(response.status_code)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    events += 1
                if leave_after is not None and events >= leave_after:
                    return "left"
        if text == self.expected[prompt]:
            return "equal"
        self.wrong.append({"prompt": prompt[-40:], "got": text, "expected": self.expected[prompt]})
        return "differs"

    async def _leaves(self, client: httpx.AsyncClient) -> str:
        return await self._good(client, leave_after=self.random.randint(0, 8))

    async def _bad(self, client: httpx.AsyncClient) -> str:
        return str((await client.post(self.url + PATH, content=self.random.choice(BAD_BODIES))).status_code)

    async def _huge(self, client: httpx.AsyncClient) -> str:
        return str((await client.post(self.url + PATH, json={"prompt": "word " * 20_000})).status_code)

    async def _wrong_key(self, client: httpx.AsyncClient) -> str:
        headers = {"Authorization": "Bearer the-wrong-key"}
        return str((await client.post(self.url + PATH, json={"prompt": "x"}, headers=headers)).status_code)


def gauges(url: str) -> dict[str, float]:
    """Pages and requests that the server still holds."""
    names = ("kv_pages_in_use", "running_sequences", "waiting_requests", "generated_tokens_total")
    text = httpx.get(f"{url}/metrics").text
    return {name: float(re.search(rf"^trunkattn_{name} (\S+)$", text, re.M)[1]) for name in names}  # type: ignore[index]


async def watched(clients: Clients, process: subprocess.Popen[bytes], seconds: float, count: int) -> list[float]:
    """Runs the clients and looks at the server's memory every five seconds."""
    running, memory = asyncio.ensure_future(clients.run(seconds, count)), []
    while not running.done():
        memory.append(round(memory_mb(process), 1))
        await asyncio.wait({running}, timeout=5)
    await running
    return memory


def expected_answers(folder: Path, device: str = "cpu") -> dict[str, str]:
    """The prompts of the clients, and what `LLM.generate` answers in float32."""
    prompts = documents(4, 12)
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    outputs = LLM(folder, kv_cache_bytes=1 << 28, device=device, dtype="float32").generate(prompts, params)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


def load(folder: Path, seconds: float, count: int) -> dict[str, Any]:
    """Runs the load that the module describes."""
    expected = expected_answers(folder)
    with server(ours(folder, 8201, "--api-key", KEY), folder / "load.log") as (url, process):
        clients = Clients(url, expected, seed=0)
        memory = asyncio.run(watched(clients, process, seconds, count))
        time.sleep(1)
        left = gauges(url)
    print(dict(clients.seen), left, memory, clients.wrong[:3], sep="\n")
    return {
        "clients": count, "seconds": seconds, "seen": dict(sorted(clients.seen.items())), "left_over": left,
        "memory_mb": memory, "answers_that_differ": clients.wrong[:5],
    }  # fmt: skip


async def ask_all(url: str, prompts: list[str], tokens: int, at_once: int) -> float:
    """Seconds for all prompts."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(prompt: str) -> None:
            body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            async with gate:
                (await client.post(url + PATH, json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(ask(prompt) for prompt in prompts))
        return time.perf_counter() - began


def throughput(folder: Path, vllm: str | None) -> dict[str, Any]:
    """Tokens/s of the server; see the module. The second of two runs counts: the first compiles and fills the prefix
    cache."""
    prompts, tokens, at_once = documents(4, 48), 64, 32
    commands = {
        "sharing": ours(folder, 8202),
        "without sharing": ours(folder, 8203, "--policy", "per_query"),
    }
    environment = {}
    if vllm is not None:
        arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", NAME]
        arguments += ["--dtype", "float32", "--max-model-len", "2048", "--port", "8204"]
        commands["vllm"] = [vllm, *arguments]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    found: dict[str, Any] = {"prompts": len(prompts), "answer_tokens": tokens, "at_once": at_once}
    for name, command in commands.items():
        with server(command, folder / f"{name}.log", **environment) as (url, _):
            seconds = [asyncio.run(ask_all(url, prompts, tokens, at_once)) for _ in range(3)]
        best = min(seconds[1:])
        found[name] = {"seconds": seconds, "tokens_per_second": round(len(prompts) * tokens / best, 1)}
        print(name, found[name], flush=True)
    return found


def start(model: Path, times: int = 4) -> dict[str, Any]:
    """Seconds until the server answers. The first start fills caches and does not count."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile() as log, server(ours(model, 8205), Path(log.name)) as (url, _):
            healthy = time.perf_counter() - began
            body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            httpx.post(url + PATH, json=body, timeout=60).raise_for_status()
            seconds.append({"ready": round(healthy, 2), "answered": round(time.perf_counter() - began, 2)})
        print(seconds[-1], flush=True)
    return {"model": model.name, "seconds": seconds[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS, help="what to measure; default: all")
    parser.add_argument("--seconds", type=integer(1, 86_400), default=180, help="of load")
    parser.add_argument("--clients", type=integer(1, 4096), default=64, help="of load at once; default: 64")
    parser.add_argument("--vllm", help="Python of an environment that holds vllm-cpu")
    arguments = parser.parse_args()
    if "start" in arguments.part:
        print(write_result("serve-start-cpu", start(model_file()), "transformers"))
    if not {"load", "throughput"} & {*arguments.part}:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / NAME
        save_folder(folder)
        if "load" in arguments.part:
            print(write_result("serve-load-cpu", load(folder, arguments.seconds, arguments.clients), "transformers"))
        if "throughput" in arguments.part:
            print(write_result("serve-throughput-cpu", throughput(folder, arguments.vllm), "transformers"))


if __name__ == "__main__":
    main()
