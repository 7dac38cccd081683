"""The engine on a thread of its own, and asyncio in front of it.

Only this thread touches the engine. It takes commands (a new request, one that is not wanted any more), computes a
step, and hands each output to the event loop of whoever waits for it. An output holds the whole answer so far, so a
slow reader gets the newest one and nothing queues up behind it.
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from trunkattn.engine.checked_request import CheckedRequest
from trunkattn.engine.engine import Engine
from trunkattn.engine.outputs import RequestOutput

_LOG: Final = logging.getLogger(__name__)
_FIRST_TOKEN_WEIGHT: Final = 0.1  # of the newest time to a first token in the running mean
_LONGEST_RETRY_S: Final = 60
_WATCH_INTERVAL_S: Final = 0.5
_COMMAND_SECONDS: Final = 0.02  # of commands between two steps


class ServerFull(Exception):
    """The server holds as much as it may. full: what there is too much of. retry_after_s: seconds until another try is
    worth it."""

    def __init__(self, full: str, retry_after_s: int) -> None:
        super().__init__(f"{full}, as many as this server allows; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class EngineFailed(Exception):
    """What another try may mend: the engine could not compute a step or has stopped, or a form could not be tried."""


@dataclass(frozen=True)
class Submission:
    """A request for the engine.

    Attributes:
        checked: what `Engine.check_request` has made of it.
        cache_salt: only requests of equal salt share cached prefixes.
        tenant: only this tenant sees it on the live page; None: everybody does.
        arrival_time: when it came, on the monotonic clock; None: when it is submitted.
        num_logprobs: log-probabilities that its output may have.
        form_seconds: the part of a step that the slowest tokens of its answers' form may take.
    """

    checked: CheckedRequest
    cache_salt: bytes = b""
    tenant: str | None = None
    arrival_time: float | None = None
    num_logprobs: int = 0
    form_seconds: float = 0.0


@dataclass(eq=False)
class _Inbox:
    """Where one request's newest output waits for its reader. `put` is called on the reader's event loop only."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    newest: RequestOutput | Exception | None = None
    request_id: str | None = None  # set on the engine's thread
    tenant: str | None = None

    def put(self, newest: RequestOutput | Exception) -> None:
        if not isinstance(self.newest, Exception):
            self.newest = newest
        self.arrived.set()

    def send(self, newest: RequestOutput | Exception) -> None:
        """Hands an output over from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.put, newest)

    async def get(self) -> RequestOutput:
        await self.arrived.wait()
        self.arrived.clear()
        if isinstance(self.newest, Exception):
            raise self.newest
        assert self.newest is not None
        return self.newest


class EngineLoop:
    """Runs an engine on a thread. Its methods are for the thread of an event loop, except where they say otherwise.

    Args:
        engine: nobody else may use it from `start` to `stop`.
        max_waiting: requests that may wait, from their last byte to their first token.
        stepped: called after each step, on the engine's thread, with the tokens that it computed; None: nothing is.

    Example:
        >>> loop = EngineLoop(LLM("path/to/model").engine, max_waiting=8)  # doctest: +SKIP
        >>> checked = loop.engine.check_request([1, 2, 3], SamplingParams())  # doctest: +SKIP
        >>> async for output in loop.stream(Submission(checked)):  # doctest: +SKIP
        ...     print(output.outputs[0].text)
    """

    def __init__(self, engine: Engine, max_waiting: int, stepped: Callable[[int], None] | None = None) -> None:
        self.engine = engine
        self._stepped, self._num_computed = stepped, engine.stats.computed_tokens
        self.max_waiting = max_waiting
        self.num_waiting = 0  # requests without a first token
        self._watch: Callable[[Engine], None] | None = None
        self._last_watch_s = 0.0
        self._first_token_s = 1.0  # running mean of the seconds to a first token
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._inboxes: dict[str, _Inbox] = {}  # of unfinished requests; only the engine's thread uses it
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="trunkattn-engine", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread takes requests."""
        return self._thread.is_alive() and not self._stopping

    def start(self, watch: Callable[[Engine], None] | None = None) -> None:
        """Starts the thread. watch: called on it with the engine, every half second."""
        self._watch = watch
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step in progress; requests that have not finished fail. From any thread."""
        self._stopping = True
        self._commands.put(lambda: None)  # the thread may wait for a command
        self._thread.join()

    def call(self, function: Callable[[Engine], None]) -> None:
        """Calls a function with the engine, between two steps, on the engine's thread. From any thread. What it raises
        goes into the log."""
        self._commands.put(lambda: self._call_safely(function))

    async def stream(self, submission: Submission) -> AsyncGenerator[RequestOutput, None]:
        """The request's output so far, whenever it has grown; the last one is finished.

        To close the generator, or to cancel its task, ends the request and frees its pages.

        Raises:
            ServerFull: too many requests wait.
            EngineFailed: the engine failed or stopped.
        """
        if not self.is_running:
            raise EngineFailed("the engine has stopped")
        inbox = _Inbox(asyncio.get_running_loop(), tenant=submission.tenant)
        with contextlib.ExitStack() as waiting:
            waiting.enter_context(self.waiting_place())
            self._commands.put(lambda: self._add(submission, inbox))
            try:
                if not self.is_running:  # the thread may have taken its last command before this one
                    raise EngineFailed("the server is shutting down")
                output = await inbox.get()
                waiting.close()
                if (seconds := output.metrics.time_to_first_token) is not None:
                    self._first_token_s += _FIRST_TOKEN_WEIGHT * (seconds - self._first_token_s)
                while True:
                    yield output
                    if output.finished:
                        return
                    output = await inbox.get()
            finally:
                self._commands.put(lambda: self._abort(inbox))

    @contextlib.contextmanager
    def waiting_place(self) -> Iterator[None]:
        """A place among the requests that wait: for a tokenizer, or for the first token. Raises ServerFull if there is
        none."""
        if self.num_waiting >= self.max_waiting:
            raise ServerFull(f"{self.max_waiting} requests are waiting", self.retry_after_s)
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    @property
    def retry_after_s(self) -> int:
        """Seconds after which another try may help."""
        return min(max(1, math.ceil(self._first_token_s)), _LONGEST_RETRY_S)

    def is_visible(self, request_id: str, tenant: str | None) -> bool:
        """Whether a tenant may see an unfinished request; None may see all. On the engine's thread."""
        inbox = self._inboxes.get(request_id)
        return tenant is None or (inbox is not None and inbox.tenant == tenant)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._stopping and self.engine.has_unfinished:
                    self._step()
                self._watch_if_due()
        finally:  # nobody may wait for an answer that never comes
            message = "the server is shutting down" if self._stopping else "the engine has stopped"
            self._stopping = True
            self._take_all_commands()
            self._fail_all(EngineFailed(message))

    def _take_commands(self) -> None:
        """Runs the commands that wait, for a short time: running answers wait meanwhile."""
        with contextlib.suppress(queue.Empty):
            command, began = self._first_command(), time.monotonic()
            command()
            while time.monotonic() - began <= _COMMAND_SECONDS:
                command = self._commands.get_nowait()
                command()

    def _first_command(self) -> Callable[[], None]:
        """The next command. Raises queue.Empty if there is none. While the engine has no request it waits for a
        command, until `watch` is due."""
        if self.engine.has_unfinished:
            return self._commands.get_nowait()
        return self._commands.get(timeout=None if self._watch is None else _WATCH_INTERVAL_S)

    def _take_all_commands(self) -> None:
        """Runs all commands that came during the last step."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                command()

    def _add(self, submission: Submission, inbox: _Inbox) -> None:
        try:
            inbox.request_id = self.engine.add_checked(
                submission.checked, cache_salt=submission.cache_salt, arrival_time=submission.arrival_time
            )
        except Exception as error:  # one that cannot be added ends nothing else
            _LOG.exception("A request could not be added.")
            inbox.send(EngineFailed(f"the engine could not take a request: {type(error).__name__}"))
        else:
            self._inboxes[inbox.request_id] = inbox

    def _abort(self, inbox: _Inbox) -> None:
        if inbox.request_id is not None and self._inboxes.pop(inbox.request_id, None) is not None:
            self.engine.abort_request(inbox.request_id)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # whatever a model's code raises: the request that causes it ends, the others go on
            _LOG.exception("A step failed.")
            outputs = self.engine.blame(error)
        if self._stepped is not None:
            before, self._num_computed = self._num_computed, self.engine.stats.computed_tokens
            if self._num_computed > before:
                self._stepped(self._num_computed - before)
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if output.finished:
                self._inboxes.pop(output.request_id, None)
            if inbox is not None:
                inbox.send(output)

    def _fail_all(self, error: EngineFailed) -> None:
        for inbox in self._inboxes.values():  # all of them first: an engine that has failed may fail here, too
            inbox.send(error)
        for request_id in self._inboxes:
            self.engine.abort_request(request_id)
        self._inboxes.clear()

    def _watch_if_due(self) -> None:
        now = time.monotonic()
        if self._watch is not None and now - self._last_watch_s >= _WATCH_INTERVAL_S:
            self._last_watch_s = now
            self._call_safely(self._watch)

    def _call_safely(self, function: Callable[[Engine], None]) -> None:
        """Calls a function that only looks at the engine: what it raises goes into the log and ends nobody's answer."""
        try:
            function(self.engine)
        except Exception:
            _LOG.exception("A look at the engine failed.")
