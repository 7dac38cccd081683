"""Whether there is room for a request's log-probabilities and forms, beside those of the requests being answered."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.server.engine_loop import EngineLoop, ServerFull, Submission
from trunkattn.server.errors import BadRequest
from trunkattn.server.limits import LIMITS


class Admission:
    """What the requests that are being answered hold. Used on the server's event loop only.

    Args:
        loop: the engine's thread, which says when another try may help.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._num_logprobs, self._form_seconds = 0, 0.0

    def count_logprobs(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Log-probabilities that a prompt and its answers may have. Raises BadRequest if they are too many."""
        longest, kept = self._loop.engine.limits.max_model_len, params.truncate_prompt_tokens
        tokens = min(params.max_tokens or longest, longest)
        own = 0 if params.logprobs is None else params.n * tokens * (params.logprobs + 1)
        read = min(num_prompt_tokens, longest if kept is None or kept == -1 else kept)
        prompt = 0 if params.prompt_logprobs is None else read * (params.prompt_logprobs + 1)
        _check_attainable(own + prompt, 0.0)
        return own + prompt

    @contextmanager
    def room(self, submissions: Sequence[Submission]) -> Iterator[None]:
        """Holds room for a request's log-probabilities, and for the time that its form takes of a step. Raises
        BadRequest if it needs too much by itself, and ServerFull if others leave too little."""
        num_logprobs = sum(submission.num_logprobs for submission in submissions)
        form_seconds = sum(submission.form_seconds for submission in submissions)
        _check_attainable(num_logprobs, form_seconds)
        if self._num_logprobs + num_logprobs > LIMITS.logprob_entries:
            raise ServerFull(f"{self._num_logprobs} log-probabilities are asked for", self._loop.retry_after_s)
        if form_seconds and self._form_seconds + form_seconds > LIMITS.form_token_seconds:
            full = f"the forms of answers may take {self._form_seconds:.3f} s of a step"
            raise ServerFull(full, self._loop.retry_after_s)
        self._num_logprobs += num_logprobs
        self._form_seconds += form_seconds
        try:
            yield
        finally:
            self._num_logprobs -= num_logprobs
            self._form_seconds -= form_seconds


def _check_attainable(num_logprobs: int, form_seconds: float) -> None:
    """Raises BadRequest if a request needs more than all requests together may."""
    if num_logprobs > LIMITS.logprob_entries:
        raise BadRequest(
            f"logprobs of all places are {num_logprobs}: expected at most {LIMITS.logprob_entries}; lower n, "
            f"max_tokens, the prompts or the number of logprobs",
            "logprobs",
        )
    if form_seconds > LIMITS.form_token_seconds:
        raise BadRequest(
            f"structured_outputs: the slowest tokens of all answers take {form_seconds:.3f} s: expected at most "
            f"{LIMITS.form_token_seconds} s; ask for fewer answers or a simpler form",
            "structured_outputs",
        )
