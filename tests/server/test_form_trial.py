"""Forms of answers are tried in processes of their own, whatever becomes of those."""

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from trunkattn.engine import StructuredOutputsParams
from trunkattn.engine.forms.grammar import FormGrammar, grammar_of
from trunkattn.engine.forms.limits import FormLimits
from trunkattn.engine.forms.structured_output import StructuredOutputs
from trunkattn.server import limits
from trunkattn.server.engine_loop import Submission
from trunkattn.server.forms import worker as form_worker
from trunkattn.server.forms.trial import FormTrial

from .conftest import Server, wait_for

COMPLETE = "/v1/completions"
BASE: dict[str, Any] = {"prompt": "x", "max_tokens": 2, "temperature": 0}


def test_forms_share_the_time_of_a_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def takes_long(form: StructuredOutputsParams, _: int) -> tuple[FormGrammar, float]:
        return grammar_of(form, FormLimits()), 0.05

    monkeypatch.setattr(server.app.state.service._trial, "check", takes_long)
    body = BASE | {"structured_outputs": {"choice": ["a", "b"]}, "temperature": 1}
    assert server.post(COMPLETE, body | {"n": 3}).status_code == 200
    refused = server.post(COMPLETE, body | {"n": 5})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs"
    with server.app.state.service.admission.room([Submission(None, form_seconds=0.19)]):
        assert server.post(COMPLETE, body).status_code == 429
        assert server.post(COMPLETE, BASE).status_code == 200


def test_a_form_takes_what_its_slowest_token_after_the_first_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a random answer and of one that opens objects. What may be first is found before the engine's steps."""
    now, limits_set = [0.0], list[float]()

    class Matcher:
        seconds, opened = (0.15, 0.001, 0.001), 0.05

        def __init__(self, *args: Any, **options: Any) -> None:
            self.tokens: list[int] = []

        def is_error(self) -> bool:
            return False

        def is_stopped(self) -> bool:
            return len(self.tokens) == len(self.seconds)

        def deep_copy(self) -> "Matcher":
            return Matcher()

        def consume_token(self, token_id: int) -> None:
            self.tokens.append(token_id)

    def fill(matcher: Matcher, bits: np.ndarray) -> None:
        now[0] += matcher.opened if matcher.tokens == [7] else matcher.seconds[len(matcher.tokens)]
        bits[:] = -1

    def attempt() -> tuple[str | None, float]:
        tokens = SimpleNamespace(vocab_size=64, tokenize_str=lambda text: [7] if text == '{"' else [8, 9])
        return form_worker.attempt(tokens, "", {"cpu_seconds": 2.0, "mask_seconds": 0.2})

    monkeypatch.setattr(form_worker.llguidance, "LLMatcher", Matcher)
    monkeypatch.setattr(form_worker, "fill_next_token_bitmask", fill)
    monkeypatch.setattr(form_worker, "time", SimpleNamespace(thread_time=lambda: now[0]))
    monkeypatch.setattr(form_worker, "limit_cpu", limits_set.append)
    assert attempt() == (None, pytest.approx(0.05)) and limits_set == [2.0, 2.0]
    Matcher.opened = 0.21
    assert attempt()[0] == "a token of it takes longer than 0.2 s"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i:03}": {} for i in range(520)}},
        {"properties": {f"p{i:03}": {} for i in range(520)}},
        {"anyOf": [{"type": "object", "properties": {f"{a}{i:03}": {} for i in range(300)}} for a in "pq"]},
    ],
)
def test_an_object_of_which_too_many_names_may_follow_is_refused(server: Server, schema: dict[str, Any]) -> None:
    """Without the trial, every answer that opens such an object would end in an error."""
    response = server.post(COMPLETE, BASE | {"structured_outputs": {"json": schema}})
    assert response.status_code == 400, response.text
    assert "too much may follow in one place of it" in response.json()["error"]["message"]


@pytest.mark.parametrize("form", [{"json": {"multipleOf": 123456789, "type": "integer"}}, {"regex": "(a|b)?" * 1300}])
def test_a_form_that_takes_too_long_is_refused_once_and_for_all(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
) -> None:
    server = start_server()
    body = BASE | {"structured_outputs": form}
    refused = server.post(COMPLETE, body)
    while refused.status_code == 503:  # other work has the processors
        refused = server.post(COMPLETE, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs"
    monkeypatch.setattr("trunkattn.server.forms.trial.FormTrial._attempt", None)  # nothing is tried again
    assert server.post(COMPLETE, body).json() == refused.json()
    assert server.post(COMPLETE, BASE).status_code == 200


def test_a_process_that_dies_of_a_form_is_replaced(start_server: Callable[..., Server]) -> None:
    server = start_server()
    body = BASE | {"structured_outputs": {"regex": "[a-z]{1,9}"}}
    assert server.post(COMPLETE, body).status_code == 200
    trial = server.app.state.service._trial
    workers = list(trial._processes)
    for worker in workers:
        worker.kill()
    wait_for(lambda: all(worker.returncode is not None for worker in workers))
    other = BASE | {"structured_outputs": {"regex": "[0-9]{1,9}"}}
    assert workers and [server.post(COMPLETE, other | {"seed": i}).status_code for i in range(3)] == [200] * 3


def test_processes_give_way_to_their_server_and_signals_to_its_group_are_its_own(server: Server) -> None:
    """Linux may weigh sessions before processes: a process in one of its own would take as much as the whole server.
    A terminal sends Ctrl-C, and `timeout` SIGTERM, to the whole group."""
    assert server.post(COMPLETE, BASE | {"structured_outputs": {"regex": "[a-f]{1,9}"}}).status_code == 200
    workers = [worker.pid for worker in server.app.state.service._trial._processes if worker.returncode is None]
    assert workers
    for pid in workers:
        assert os.getsid(pid) == os.getsid(0) and os.getpgid(pid) == pid
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_a_process_has_its_own_group_from_its_first_moment(form_server: Any) -> None:
    """Otherwise a signal to the server's group ends it, and a good form gets an error."""
    server, replace = form_server
    check = f"import os\nassert os.getpgrp() == os.getpid() and os.getsid(0) == {os.getsid(0)}\n"
    replace(check + Path(form_worker.__file__).read_text())
    assert server.post(COMPLETE, FORM).status_code == 200


def test_the_grammar_of_a_form_is_made_once_for_all_prompts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FormGrammar] = []

    def counted(form: StructuredOutputsParams, limits: FormLimits) -> FormGrammar:
        made.append(grammar_of(form, limits))
        return made[-1]

    monkeypatch.setattr("trunkattn.engine.forms.structured_output.grammar_of", counted)
    form = {"structured_outputs": {"regex": "[g-k]{1,9}"}}
    answer = server.post(COMPLETE, BASE | {"prompt": ["x", "y", "z"]} | form)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 3 and len(made) == 1


FORM = BASE | {"structured_outputs": {"regex": "[0-9]{1,9}"}}
READY = "import os, sys, time\nsys.stdin.readline()\nprint('ready', flush=True)\nsys.stdin.readline()\n"


@pytest.fixture
def form_server(start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A server, and what replaces the program that tries forms; each of its processes adds a line to a file."""
    server, program, starts = start_server(), tmp_path / "worker.py", tmp_path / "starts"
    starts.touch()

    def replace(text: str) -> Callable[[], int]:
        program.write_text(f"open({str(starts)!r}, 'a').write('started\\n')\n{text}")
        monkeypatch.setattr("trunkattn.server.forms.trial._WORKER", program)
        return lambda: starts.read_text().count("started")

    return server, replace


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_form_whose_process_somebody_ends_is_tried_again(server: Server, number: signal.Signals) -> None:
    """systemd sends SIGTERM to every process of a service."""
    trial = server.app.state.service._trial
    for letter in "abc":  # so that each process has started
        form = {"structured_outputs": {"regex": f"{number}{letter}{{1,9}}"}}
        assert server.post(COMPLETE, BASE | form).status_code == 200
    stopped = [worker.pid for worker in trial._processes if worker.returncode is None]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        form = {"structured_outputs": {"regex": f"{number}[0-9]"}}
        answer = threads.submit(server.post, COMPLETE, BASE | form)
        wait_for(lambda: trial._idle.qsize() < 2)
        for pid in stopped:
            os.kill(pid, number)
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGCONT)
        assert answer.result().status_code == 200


def test_a_form_whose_processes_are_always_ended_is_refused(form_server: Any) -> None:
    server, replace = form_server
    num_started = replace(READY + "os.kill(os.getpid(), 9)")
    refused = server.post(COMPLETE, FORM)
    assert refused.status_code == 400 and "ended both processes" in refused.json()["error"]["message"]
    assert server.post(COMPLETE, FORM).json() == refused.json() and num_started() == 2


@pytest.mark.parametrize("program", [READY + "time.sleep(600)", "import os\nos.kill(os.getpid(), 9)"])
def test_a_form_that_nobody_had_time_to_try_is_not_refused(
    form_server: Any, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    server, replace = form_server
    trial = server.app.state.service._trial
    with monkeypatch.context() as patches:
        patches.setattr(trial, "_limits", limits.RequestLimits(form_seconds=0.1))
        replace(program)
        late = server.post(COMPLETE, FORM)
        assert late.status_code == 503 and late.headers["Retry-After"] and not trial._processes
    replace(Path(form_worker.__file__).read_text())
    assert server.post(COMPLETE, FORM).status_code == 200


def test_a_tokenizer_in_python_has_no_forms(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no attribute `backend_tokenizer`, which llguidance reads."""
    tokenizer = ByT5Tokenizer()
    forms = StructuredOutputs(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    with pytest.raises(ValueError, match="expected a model with a fast tokenizer"):
        forms.start(StructuredOutputsParams(regex="[0-9]"))
    service = server.app.state.service
    monkeypatch.setattr(service, "_trial", FormTrial(forms, service._compiling, limits.LIMITS))
    answer = server.post(COMPLETE, FORM)
    assert answer.status_code == 400 and "fast tokenizer" in answer.json()["error"]["message"]


def test_a_machine_without_room_for_a_process_refuses_no_form(
    form_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = form_server

    async def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patches:
        patches.setattr("asyncio.create_subprocess_exec", full)
        answer = server.post(COMPLETE, FORM)
        assert answer.status_code == 503 and "Too many open files" in answer.json()["error"]["message"]
    assert server.post(COMPLETE, FORM).status_code == 200


def test_clients_that_go_away_leave_no_process_of_forms(form_server: Any) -> None:
    server, replace = form_server
    num_started = replace("import time\ntime.sleep(600)")
    with server.send(FORM):
        wait_for(num_started)
    wait_for(lambda: not server.app.state.service._trial._processes)
    assert num_started() == 1


def test_forms_are_tried_under_lower_limits_of_the_system(form_server: Any) -> None:
    server, replace = form_server
    lower = "from resource import *\nsetrlimit(RLIMIT_CPU, (900, 900))\nsetrlimit(RLIMIT_AS, (3 << 30, 3 << 30))\n"
    replace(lower + Path(form_worker.__file__).read_text())
    assert server.post(COMPLETE, FORM).status_code == 200
