"""One engine for several calls at once: `generate` and `stream` of any threads share its steps."""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from trunkattn.engine.checked_request import CheckedRequest
from trunkattn.engine.engine import Engine
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.turns import Turns
from trunkattn.interrupts import held_interrupts


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request of one call. prompt: its text; None: it was given as tokens."""

    prompt: str | None
    checked: CheckedRequest


class SharedEngine:
    """An engine that several calls use in turn. Whoever has the turn computes a step for all of them.

    Args:
        engine: the engine.

    Attributes:
        turn: whoever has it may use the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.turn = Turns()
        self._engine = engine
        # Requests of all calls, with newest outputs that the calls have not seen
        self._unfetched: dict[str, RequestOutput | None] = {}
        self._abandoned: deque[str] = deque()  # requests that nobody waits for any more

    def run(self, prepared: Sequence[PreparedRequest]) -> Generator[tuple[int, RequestOutput], None, None]:
        """Yields (position of the request, its output so far) whenever one of these requests gets a token. To close the
        iterator aborts those that have not finished.

        Raises:
            RuntimeError: somebody else has ended one of the requests, or taken its answer.
            Exception: what a step raised that one of the requests caused.
        """
        positions: dict[str, int] = {}
        try:
            with held_interrupts(), self.turn:
                for position, request in enumerate(prepared):
                    request_id = self._engine.add_checked(request.checked, request.prompt)
                    positions[request_id], self._unfetched[request_id] = position, None
            while positions:
                for output in self._next_outputs(positions):
                    position = positions[output.request_id]
                    if output.finished:
                        del positions[output.request_id]
                    yield position, output
        finally:
            with held_interrupts():
                self._abandoned.extend(positions)
                if not self.turn.is_own:  # within a step Python closes an iterator that has become garbage
                    with self.turn:
                        self._end_abandoned()

    def _next_outputs(self, positions: Mapping[str, int]) -> list[RequestOutput]:
        """New outputs of these requests: those that another call's step has computed, or those of a step."""
        with held_interrupts(), self.turn:
            self._end_abandoned()
            if all(self._unfetched[request_id] is None for request_id in positions):
                for computed in self._step(positions):
                    if computed.request_id in self._unfetched:  # no call would fetch those of other requests
                        self._unfetched[computed.request_id] = computed
            for request_id in positions:
                if self._unfetched[request_id] is None and not self._engine.is_unfinished(request_id):
                    raise RuntimeError(
                        f"request {request_id!r} has left the engine, and its answer went to somebody else: expected "
                        f"that nobody aborts requests of generate, chat and stream or calls the engine's step; to end "
                        f"a prompt, close its iterator"
                    )
            outputs = [output for request_id in positions if (output := self._unfetched[request_id]) is not None]
            for output in outputs:
                if output.finished:
                    del self._unfetched[output.request_id]
                else:
                    self._unfetched[output.request_id] = None
            return outputs

    def _step(self, own: Mapping[str, int]) -> list[RequestOutput]:
        """The outputs of a step. An error that may be other calls' is raised only when it is clear that a request of
        this call causes it; one of another call ends with the error."""
        try:
            return self._engine.step()
        except Exception as error:
            if self._engine.failed_requests <= own.keys():
                raise
            outputs = self._engine.blame(error)
            if any(output.request_id in own for output in outputs):
                raise
            return outputs

    def _end_abandoned(self) -> None:
        """Ends the requests that nobody waits for, and frees their pages. In a turn."""
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._engine.abort_request(request_id)
            self._unfetched.pop(request_id, None)
