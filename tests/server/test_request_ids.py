"""The id of a request: in a header of its response, in its JSON, and in the log."""

import logging
from typing import Any

import pytest
from openai import BadRequestError

from .conftest import NAME, Server, wait_for

HEADER = "x-request-id"
BODY: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": 2}


def logged(caplog: pytest.LogCaptureFixture, name: str) -> str:
    """The line of the log about a request, which may follow its response."""
    found: list[str] = []
    wait_for(lambda: found.extend(one.getMessage() for one in caplog.records if name in one.getMessage()) or found)
    return found[0]


def test_openais_sdk_has_the_id_of_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = server.client()
    with caplog.at_level(logging.INFO, "trunkattn"):
        answer = client.completions.create(**BODY)
        assert answer.id == f"cmpl-{answer._request_id}"
        assert logged(caplog, str(answer._request_id)).startswith(f"{answer.id}: ")
        messages: Any = [{"role": "user", "content": "x"}]
        chat = client.chat.completions.create(model=NAME, messages=messages, max_tokens=2)
        assert chat.id == f"chatcmpl-{chat._request_id}" and chat._request_id != answer._request_id
    with pytest.raises(BadRequestError) as raised:
        client.completions.create(**BODY | {"temperature": -1})
    assert raised.value.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_name_its_request(server: Server, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "trunkattn"):
        answer = server.post("/v1/completions", BODY | {"stream": stream}, headers={HEADER: "from-a-proxy/7"})
        assert answer.headers[HEADER] == "from-a-proxy/7" and '"id":"cmpl-from-a-proxy/7"' in answer.text
        assert logged(caplog, "from-a-proxy/7").startswith("cmpl-from-a-proxy/7: ")


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "größe"])
def test_what_is_no_id_is_replaced(server: Server, given: str) -> None:
    answer = server.get("/health", headers={HEADER: given.encode()})
    assert answer.headers[HEADER] not in ("", given) and answer.headers.get_list(HEADER) == [answer.headers[HEADER]]


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/models", "/nothing", "/static/live.js"])
def test_every_response_has_one(server: Server, path: str) -> None:
    first, second = (server.get(path).headers[HEADER] for _ in range(2))
    assert first != second


def test_the_log_names_the_request_that_failed(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.app.state.service, "read", fails)
    answer = server.post("/tokenize", {"prompt": "x"})
    assert answer.status_code == 500 and logged(caplog, answer.headers[HEADER]).startswith("Request ")
