"""Tries forms of answers in processes of their own, before the engine compiles them."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from pathlib import Path
from typing import Final

from trunkattn.engine.sampling_params import StructuredOutputsParams
from trunkattn.engine.structured_output import StructuredOutputs
from trunkattn.server.lanes import Lanes
from trunkattn.server.limits import RequestLimits

_WORKER: Final = Path(__file__).with_name("form_worker.py")
_NUM_WORKERS: Final = 2  # a form that takes its time delays one other form at most
_START_SECONDS: Final = 60.0
_REMEMBERED: Final = 1024  # forms whose times are known


class FormTrial:
    """Forms are tried one at a time in each of a few processes, which start with the first form.

    Args:
        forms: the engine's compiled forms. What fails is remembered there.
        lanes: threads that read forms.
        limits: of time and memory.
    """

    def __init__(self, forms: StructuredOutputs, lanes: Lanes, limits: RequestLimits) -> None:
        self._forms, self._lanes, self._limits = forms, lanes, limits
        self._idle: asyncio.Queue[Process | None] | None = None  # None in it: a process that has not started
        self._processes: set[Process] = set()
        self._token_seconds: OrderedDict[str, float] = OrderedDict()  # of grammars; the newest is last

    async def check(self, form: StructuredOutputsParams, num_bytes: int) -> float:
        """Tries a form unless it is compiled already. Returns the seconds that a token of an answer takes.

        Args:
            form: the form.
            num_bytes: of the body that has it.

        Raises:
            ImportError, ValueError: see `StructuredOutputs.start`, or the form took too much time, memory or stack.
        """
        grammar = await self._lanes.run(num_bytes, lambda _: self._forms.source(form))
        if grammar in self._token_seconds and self._forms.has_compiled(grammar):
            return self._token_seconds[grammar]
        if self._idle is None:
            self._idle = asyncio.Queue()
            for _ in range(_NUM_WORKERS):
                self._idle.put_nowait(None)
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await asyncio.wait_for(self._start(), _START_SECONDS)
            failure, taken_bytes, seconds = await self._attempt(worker, grammar)
        except BaseException:  # a cancelled request too: its answer would be read as another one's
            self._end(worker)
            worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        if failure is not None:
            self._forms.refuse(grammar, failure)
            await self._lanes.run(num_bytes, lambda _: self._forms.source(form))  # raises it, with the form's name
        self._forms.weigh(grammar, taken_bytes)
        self._token_seconds[grammar] = seconds
        while len(self._token_seconds) > _REMEMBERED:
            self._token_seconds.popitem(last=False)
        return seconds

    def close(self) -> None:
        """Ends the processes."""
        for worker in list(self._processes):
            self._end(worker)

    async def _start(self) -> Process:
        tokenizer, num_tokens, eos = await asyncio.to_thread(self._forms.tokenizer_source)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, str(_WORKER), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        self._processes.add(worker)
        limits = self._limits
        head = {
            "tokenizer": tokenizer,
            "num_tokens": num_tokens,
            "eos": eos,
            "cpu_seconds": limits.form_seconds,
            "mask_seconds": limits.form_token_seconds,
            "memory_bytes": limits.form_bytes,
        }
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write((await asyncio.to_thread(json.dumps, head)).encode() + b"\n")
        await worker.stdin.drain()
        if await worker.stdout.readline() != b"ready\n":
            self._end(worker)
            raise ValueError("structured_outputs: expected a model whose tokenizer llguidance can read")
        return worker

    async def _attempt(self, worker: Process, grammar: str) -> tuple[str | None, int, float]:
        """What is wrong with a grammar, the bytes of its compiled form, and the seconds of a token."""
        assert worker.stdin is not None and worker.stdout is not None
        line = b""
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            worker.stdin.write(json.dumps(grammar).encode() + b"\n")
            line = await asyncio.wait_for(worker.stdout.readline(), 4 * self._limits.form_seconds)
        if not line:
            self._end(worker)
            return f"it takes more time or memory than this server allows ({self._limits.form_seconds} s)", 0, 0.0
        failure, num_bytes, seconds = json.loads(line)
        return failure, num_bytes, seconds

    def _end(self, worker: Process | None) -> None:
        if worker is not None:
            self._processes.discard(worker)
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
