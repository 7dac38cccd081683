"""`trunkattn serve` as a process: signals, a full disk for its log, an address that is taken."""

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from trunkattn.cli.serve import _bound, _listen
from trunkattn.server import ServerOptions

from .conftest import PATIENCE, wait_for

pytestmark = pytest.mark.slow

LONG = {"prompt": "The trunk is read once.", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}


def command(folder: Path, *options: object) -> list[str]:
    arguments = ["--model", folder, "--served-model-name", "tiny", *options]
    return [sys.executable, "-m", "trunkattn", "serve", *map(str, arguments)]


@contextmanager
def serving(
    folder: Path, *options: object, redirection: str = ""
) -> Iterator[tuple[subprocess.Popen[str], str, Future[str]]]:
    """The process and its address, once it listens, and what it logs from then on. redirection: of its streams, for a
    shell."""
    usual = "env --default-signal=HUP,INT"  # whoever runs the tests may ignore them
    line = f"exec {usual} {shlex.join(command(folder, '--port', 0, *options))} {redirection}"
    process = subprocess.Popen(["bash", "-c", line], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"at (http://\S+),", line):
                yield process, match[1], ThreadPoolExecutor(1).submit(process.stderr.read)  # or the pipe would fill up
                break
        else:
            pytest.fail("the server did not start")
    finally:
        process.kill()
        process.wait()


def streamed(url: str, during: Callable[[], None]) -> str:
    """The text of a streamed answer; `during` is called after its first words."""
    text, called = "", False
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if not called:
                    during()
                    called = True
    return text


@pytest.mark.parametrize(("stop", "redirection"), [(signal.SIGTERM, ""), (signal.SIGINT, ">&-"), (signal.SIGHUP, "")])
def test_a_signal_lets_running_answers_end_and_a_closed_stdout_stops_nobody(
    folder: Path, stop: signal.Signals, redirection: str
) -> None:
    with serving(folder, redirection=redirection) as (process, url, logged):
        form = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "a"}}
        assert httpx.post(f"{url}/v1/completions", json=form, timeout=PATIENCE).status_code == 200
        whole = streamed(url, lambda: None)
        assert streamed(url, lambda: process.send_signal(stop)) == whole
        assert process.wait(PATIENCE) in (0, -stop, 128 + stop)
        last = logged.result(PATIENCE).splitlines()[-1]
        assert "Finished server process" in last  # and no library complains of objects that are left
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=PATIENCE)


def test_a_server_that_is_stopped_for_a_while_loses_nothing(folder: Path) -> None:
    """As by Ctrl+Z and `fg`: its limits of time are over before it reads what came meanwhile."""
    with serving(folder, "--timeout-keep-alive", 1) as (process, url, _):
        whole, idle = streamed(url, lambda: None), HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)

        def stop_for_a_while() -> None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(4)
            idle.request("GET", "/health")
            process.send_signal(signal.SIGCONT)

        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok"}'
        stop_for_a_while()
        assert idle.getresponse().read() == b'{"status":"ok"}'
        assert streamed(url, stop_for_a_while) == whole


def test_a_full_disk_for_the_log_stops_nobody(folder: Path) -> None:
    def listens() -> bool:
        assert process.poll() is None
        with suppress(httpx.ConnectError):
            return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        return False

    with socket.socket() as held, open("/dev/full", "w") as full:  # the port is no other program's meanwhile
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        url, port = "http://{}:{}".format(*held.getsockname()), held.getsockname()[1]
        environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": "/nonexistent"}  # of another program
        process = subprocess.Popen(command(folder, "--port", port), stdout=full, stderr=full, env=environment)
        try:
            wait_for(listens)
            body = {"prompt": "x", "max_tokens": 2}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_log_that_nobody_reads_stops_nobody(folder: Path, number: signal.Signals) -> None:
    """As in `serve 2>&1 | sleep 1000`, or in a terminal after Ctrl+S."""
    line = f"exec {shlex.join(command(folder, '--port', 0))}"
    process = subprocess.Popen(["bash", "-c", line], stderr=subprocess.PIPE, text=True, bufsize=1)
    try:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        url = next(match[1] for line in process.stderr if (match := re.search(r"at (http://\S+),", line)))
        with httpx.Client(timeout=PATIENCE) as client:
            for _ in range(100):
                assert client.get(f"{url}/health", params={"fills": "x" * 1000}).status_code == 200
            body = {"prompt": "x", "max_tokens": 2}
            assert client.post(f"{url}/v1/completions", json=body).status_code == 200
        process.send_signal(number)
        assert process.wait(PATIENCE) in (0, -number, 128 + number)
    finally:
        process.kill()
        process.wait()


def test_a_port_is_one_servers_while_its_model_is_loaded() -> None:
    """It would be told only after its own model is loaded, which may last minutes."""
    with _bound(ServerOptions("a", port=0)) as first:
        second = ServerOptions("b", port=first.getsockname()[1])
        with pytest.raises(typer.BadParameter, match="another program uses it"):
            _bound(second)
        _listen(first, second)
        with socket.create_connection(first.getsockname()):
            first.accept()[0].close()  # the server's end waits for late packets
    with _bound(second) as again:
        _listen(again, second)
        with socket.create_connection(again.getsockname()):
            pass


def test_a_port_with_ended_connections_is_one_servers_too() -> None:
    with socket.socket() as ended:
        ended.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ended.bind(("127.0.0.1", 0))
        ended.listen()
        options = ServerOptions("a", port=ended.getsockname()[1])
        with socket.create_connection(ended.getsockname()):
            ended.accept()[0].close()  # the server's end waits for late packets
    with _bound(options) as first:
        with pytest.raises(typer.BadParameter, match="another program uses it"):
            _bound(options)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as most servers do
            other.bind(first.getsockname())
        _listen(first, options)
        with socket.create_connection(first.getsockname()):
            pass


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_may_have_brackets_as_in_a_url(host: str) -> None:
    with _bound(ServerOptions("a", host, 0, allowed_hosts=(host,))) as listener:
        assert listener.getsockname()[0] == "::1"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "nowhere.invalid", "a..b", "x" * 64])
def test_an_address_of_another_machine_is_blamed_on_the_host(host: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        _bound(ServerOptions("a", host, 0))
    assert raised.value.param_hint == "--host" and host in raised.value.message


def test_a_name_may_have_an_address_of_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = socket.getaddrinfo("::1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with _bound(ServerOptions("a", "llm.example", 0)) as listener:
        assert listener.family == socket.AF_INET6


def test_a_port_that_is_taken(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(command(folder, "--port", port), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--port: {port}: another program uses it" in " ".join(done.stderr.split()).replace("│ ", "")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--port", 70_000, "expected"),
        ("--tool-call-parser", "x", "expected one of"),
        ("--max-waiting", 0, "expected"),
        ("--timeout-keep-alive", 0, "expected a number of seconds > 0"),
        ("--served-model-name", "", "expected a name that is not empty"),
        ("--host", "", "expected an address or a name"),
        ("--host", "127.0.0.1:8000", "expected an address or a name without a scheme, a port"),
        ("--host", "[::1]:8000", "expected an address or a name without a scheme, a port"),
        ("--host", "http://127.0.0.1", "expected an address or a name without a scheme"),
        ("--allowed-host", "", "expected a name without"),
        ("--allowed-host", "llm.example:8000", "expected a name without a scheme, a port or a path"),
        ("--allowed-origin", "https://llm.example/", "expected a scheme and a host without a path"),
    ],
)
def test_a_bad_option_is_named(folder: Path, option: str, value: object, message: str) -> None:
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        command(folder, option, value), capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    assert done.returncode == 2 and option in done.stderr and message in done.stderr


def test_a_key_that_is_set_and_empty_opens_nothing(folder: Path) -> None:
    environment = os.environ | {"TRUNKATTN_API_KEY": " ", "COLUMNS": "200"}
    done = subprocess.run(command(folder), capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert done.returncode == 2 and "TRUNKATTN_API_KEY is set and has no key" in " ".join(done.stderr.split())


def test_an_open_page_delays_no_end_and_what_takes_too_long_is_cut_off_and_told(
    save_tiny_model: Callable[..., None], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, num_positions=100_000)  # an answer as long as no machine computes in a second
    with serving(tmp_path, "--shutdown-seconds", 1) as (process, url, _):
        answers: list[httpx.Response] = []
        body: dict[str, Any] = LONG | {"max_tokens": 90_000, "stream": False}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE))
        )
        with httpx.stream("GET", f"{url}/live", timeout=PATIENCE) as page:
            next(page.iter_lines())
            asking.start()
            wait_for(lambda: "trunkattn_running_sequences 1.0" in httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
            half = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
            half.putrequest("POST", "/v1/completions")
            half.putheader("Content-Length", "100")
            half.endheaders(b"{")
            httpx.get(f"{url}/health", timeout=PATIENCE)  # after it, the server has read that head
            process.send_signal(signal.SIGTERM)
            cut_off = half.getresponse()
            assert cut_off.status == 503 and "shutting down" in json.loads(cut_off.read())["error"]["message"]
            process.wait(PATIENCE)
        asking.join(PATIENCE)
    assert answers[0].status_code == 503 and "shutting down" in answers[0].json()["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_answers_at_once_and_tells_them(
    save_tiny_model: Callable[..., None], tmp_path: Path, number: signal.Signals
) -> None:
    save_tiny_model(tmp_path, num_positions=100_000)
    with serving(tmp_path, "--shutdown-seconds", 3600) as (process, url, logged):
        answers: list[httpx.Response] = []
        body: dict[str, Any] = LONG | {"max_tokens": 90_000, "stream": False}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE))
        )

        def stop() -> None:
            asking.start()
            wait_for(lambda: "trunkattn_running_sequences 2.0" in httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
            process.send_signal(number)
            with suppress(httpx.TransportError):
                wait_for(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).status_code != 200)
            process.send_signal(number)

        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            stop()
            last = [line for line in lines if line][-1]
        asking.join(PATIENCE)
        process.wait(PATIENCE)
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert answers[0].status_code == 503 and "shutting down" in answers[0].json()["error"]["message"]
        assert "Traceback" not in logged.result(PATIENCE)


def test_a_live_page_alone_ends_at_once(folder: Path) -> None:
    with (
        serving(folder, "--shutdown-seconds", 3600) as (process, url, _),
        httpx.stream("GET", f"{url}/live", timeout=PATIENCE) as page,
    ):
        next(page.iter_lines())
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
