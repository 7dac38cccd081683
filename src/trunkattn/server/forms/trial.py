"""Tries forms of answers in processes of their own, before the engine compiles them."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from trunkattn.engine.forms.grammar import FormGrammar
from trunkattn.engine.forms.structured_output import StructuredOutputs, digest
from trunkattn.engine.sampling_params import StructuredOutputsParams
from trunkattn.server.engine_loop import EngineFailed
from trunkattn.server.lanes import Lanes
from trunkattn.server.limits import RequestLimits
from trunkattn.server.stops import within

_WORKER: Final = Path(__file__).with_name("worker.py")
_NUM_WORKERS: Final = 2  # a form that takes its time delays one other form at most
_START_SECONDS: Final = 60.0
# From Python 3.11 on the process begins in a group of its own, within the server's session. Signals to the server's
# group, such as Ctrl-C, are for the server, which lets answers end and then ends this process.
_OWN_GROUP: Final[Mapping[str, Any]] = MappingProxyType({"process_group": 0} if sys.version_info >= (3, 11) else {})
_ENDED_BY_OTHERS: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
_WAITED: Final = 12  # seconds for a form, for each of its limit of processor time: its process gives way to others
_REMEMBERED: Final = 1024  # forms whose times are known


class Outcome(NamedTuple):
    """What is wrong with a form, or None; the bytes that it takes when it is compiled, and the seconds of its slowest
    token."""

    failure: str | None
    num_bytes: int = 0
    token_seconds: float = 0.0


class FormTrial:
    """Forms are tried one at a time in each of a few processes, which start with the first form.

    Args:
        forms: the engine's compiled forms. What fails is remembered there.
        lanes: threads that read forms.
        limits: the most time and memory of a form.
    """

    def __init__(self, forms: StructuredOutputs, lanes: Lanes, limits: RequestLimits) -> None:
        self._forms, self._lanes, self._limits = forms, lanes, limits
        self._idle: asyncio.Queue[Process | None] | None = None  # None in it: a process that has not started
        self._processes: set[Process] = set()
        self._token_seconds: OrderedDict[bytes, float] = OrderedDict()  # of grammars' digests; newest last

    async def check(self, form: StructuredOutputsParams, num_bytes: int) -> tuple[FormGrammar, float]:
        """Tries a form unless it is compiled already. Returns what it is compiled from, and the seconds that the
        slowest token of an answer takes.

        Args:
            form: the form.
            num_bytes: the size of the body that has it.

        Raises:
            ImportError, ValueError: see `StructuredOutputs.start`, or the form took too much time, memory or stack.
            EngineFailed: the machine was too busy to try it.
        """
        found = await self._lanes.run(num_bytes, lambda _: self._forms.source(form))
        key = digest(grammar := found.grammar)
        if key in self._token_seconds and self._forms.has_compiled(grammar):
            return found, self._token_seconds[key]
        if self._idle is None:
            self._idle = asyncio.Queue()
            for _ in range(_NUM_WORKERS):
                self._idle.put_nowait(None)
        worker = await self._idle.get()
        try:
            worker = await self._ready(worker)
            outcome = await self._attempt(worker, grammar)
            if outcome is None:  # the form may be innocent; if it fills the machine's memory, it does so twice
                worker = await self._ready(None)
                outcome = await self._attempt(worker, grammar)
                outcome = outcome or Outcome("the system ended both processes that tried it")
        except BaseException:  # a cancelled request too: its answer would be read as another one's
            self._end(worker)
            worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        if (failure := outcome.failure) is not None:
            self._forms.refuse(grammar, failure)
            raise ValueError(await self._lanes.run(num_bytes, lambda _: found.refusal(failure)))
        self._forms.weigh(grammar, outcome.num_bytes)
        self._token_seconds[key] = outcome.token_seconds
        while len(self._token_seconds) > _REMEMBERED:
            self._token_seconds.popitem(last=False)
        return found, outcome.token_seconds

    async def close(self) -> None:
        """Ends the processes, and waits until they have ended: the event loop that watches them ends next."""
        workers = list(self._processes)
        for worker in workers:
            self._end(worker)
        await asyncio.gather(*(worker.wait() for worker in workers))

    async def _ready(self, worker: Process | None) -> Process:
        """A process that waits for a form: the given one, or a new one if it has ended or there is none."""
        if worker is not None and worker.returncode is None:
            return worker
        self._end(worker)
        tokenizer, num_tokens, eos = await asyncio.to_thread(self._forms.tokenizer_source)
        try:
            worker = await asyncio.create_subprocess_exec(
                sys.executable, str(_WORKER), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, **_OWN_GROUP
            )
        except OSError as error:  # this machine, or a limit such as `ulimit -n`, leaves no room for one
            raise EngineFailed(f"structured_outputs: no process can try the form ({error.strerror})") from error
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
        try:
            line = await self._ask(worker, await asyncio.to_thread(json.dumps, head), _START_SECONDS)
            if line != b"ready\n":
                if not line and -await worker.wait() in _ENDED_BY_OTHERS:
                    raise EngineFailed("structured_outputs: the system ended the process that was to try the form")
                raise ValueError("structured_outputs: expected a model whose tokenizer llguidance can read")
        except BaseException:  # a client that goes away leaves no process behind
            self._end(worker)
            raise
        return worker

    async def _attempt(self, worker: Process, grammar: str) -> Outcome | None:
        """What a process finds out about a grammar; None: somebody else ended the process."""
        line = await self._ask(worker, json.dumps(grammar), _WAITED * self._limits.form_seconds)
        if line:
            return Outcome(*json.loads(line))
        if -await worker.wait() in _ENDED_BY_OTHERS:  # no limit of its own sends these
            return None
        return Outcome(f"it takes more time or memory than this server allows ({self._limits.form_seconds} s)")

    async def _ask(self, worker: Process, line: str, seconds: float) -> bytes:
        """The line that a process answers with; nothing if it ends. Raises EngineFailed if it does neither in time: it
        has a limit of processor time, so that others have the processors."""
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(line.encode() + b"\n")
            return await within(seconds, worker.stdout.readline)
        except ConnectionError:
            return b""
        except asyncio.TimeoutError:
            raise EngineFailed(f"structured_outputs: this machine is too busy to try the form in {seconds} s") from None

    def _end(self, worker: Process | None) -> None:
        if worker is not None:
            self._processes.discard(worker)
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
