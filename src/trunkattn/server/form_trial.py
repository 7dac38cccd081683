"""Tries forms of answers in processes of their own, before the engine compiles them."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Final

from trunkattn.engine.sampling_params import StructuredOutputsParams
from trunkattn.engine.structured_output import StructuredOutputs
from trunkattn.server.limits import RequestLimits

_WORKER: Final = Path(__file__).with_name("form_worker.py")
_NUM_WORKERS: Final = 2  # a form that takes its time delays one other form at most
_START_SECONDS: Final = 60.0


class FormTrial:
    """Forms are tried one at a time in each of a few processes, which start with the first form.

    Args:
        forms: the engine's compiled forms. What fails is remembered there.
        limits: of time and memory.
    """

    def __init__(self, forms: StructuredOutputs, limits: RequestLimits) -> None:
        self._forms, self._limits = forms, limits
        self._idle: asyncio.Queue[Process | None] | None = None  # None in it: a process that has not started
        self._processes: set[Process] = set()

    async def check(self, form: StructuredOutputsParams) -> None:
        """Tries a form unless it is compiled already.

        Raises:
            ImportError, ValueError: see `StructuredOutputs.start`, or the form took too much time, memory or stack.
        """
        grammar = await asyncio.to_thread(self._forms.source, form)
        if grammar is None:
            return
        if self._idle is None:
            self._idle = asyncio.Queue()
            for _ in range(_NUM_WORKERS):
                self._idle.put_nowait(None)
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await asyncio.wait_for(self._start(), _START_SECONDS)
            failure, num_bytes = await self._attempt(worker, grammar)
        except BaseException:  # a cancelled request too: its answer would be read as another one's
            self._end(worker)
            worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        if failure is not None:
            self._forms.refuse(grammar, failure)
            await asyncio.to_thread(self._forms.source, form)  # raises it, with the form's name
        self._forms.weigh(grammar, num_bytes)

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

    async def _attempt(self, worker: Process, grammar: str) -> tuple[str | None, int]:
        """What is wrong with a grammar, and the bytes of its compiled form."""
        assert worker.stdin is not None and worker.stdout is not None
        line = b""
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            worker.stdin.write(json.dumps(grammar).encode() + b"\n")
            line = await asyncio.wait_for(worker.stdout.readline(), 4 * self._limits.form_seconds)
        if not line:
            self._end(worker)
            return f"it takes more time or memory than this server allows ({self._limits.form_seconds} s)", 0
        failure, num_bytes = json.loads(line)
        return failure, num_bytes

    def _end(self, worker: Process | None) -> None:
        if worker is not None:
            self._processes.discard(worker)
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
