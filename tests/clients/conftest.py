"""A server process for clients that run in an environment of their own: `make test-clients`."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SERVER_PYTHON = os.environ.get("TRUNKATTN_SERVER_PYTHON", str(PROJECT / ".venv/bin/python"))
NAME = "tiny"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the server's own tests."""
    path = tmp_path_factory.mktemp("tiny-clients")
    make = "import sys, pathlib; from tests.server.conftest import save_model; save_model(pathlib.Path(sys.argv[1]))"
    subprocess.run([SERVER_PYTHON, "-c", make, str(path)], check=True, cwd=PROJECT)
    return path


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """One that no other program takes before the server does."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="session")
def url(folder: Path, port: int) -> Iterator[str]:
    """The address of a server, up to /v1."""
    arguments = ["--model", str(folder), "--served-model-name", NAME, "--port", str(port), "--quiet"]
    process = subprocess.Popen([SERVER_PYTHON, "-m", "trunkattn", "serve", *arguments], cwd=PROJECT)
    try:
        end = time.monotonic() + 180
        while True:
            assert process.poll() is None and time.monotonic() < end, "the server did not start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)
