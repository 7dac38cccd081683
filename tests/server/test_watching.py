"""Health, metrics, and the live page's data."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trunkattn.server.limits import LIMITS
from trunkattn.server.monitoring.live import Live, _Shot

from .conftest import NAME, PATIENCE, Server, wait_for


def test_health_and_models_are_served(server: Server, folder: Path) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    (model,) = server.client().models.list().data
    assert server.client().models.retrieve(NAME) == model
    assert (model.id, model.created) == (NAME, int(folder.stat().st_mtime))


def samples(server: Server) -> dict[str, float]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value for one in families for sample in one.samples
    }


def test_what_is_read_has_a_head(server: Server) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models", f"/v1/models/{NAME}"):
        head = httpx.head(f"{server.url}{path}", timeout=PATIENCE)
        assert head.status_code == 200 and head.content == b"", path


def test_metrics_count_requests_and_tokens(server: Server) -> None:
    before = samples(server)
    server.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 6, "ignore_eos": True})
    server.post("/v1/completions", {"prompt": 1})
    server.get("/some/path/that/is/not/there")
    after = samples(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("trunkattn_generated_tokens_total[]") == 6
    assert grown("trunkattn_time_to_first_token_seconds_count[]") == 1
    path = "('path', '/v1/completions')"
    assert grown(f"trunkattn_http_requests_total[{path}, ('status', '200')]") == 1
    assert grown(f"trunkattn_http_requests_total[{path}, ('status', '400')]") == 1
    assert grown("trunkattn_http_requests_total[('path', 'other'), ('status', '404')]") == 1
    assert after["trunkattn_running_sequences[]"] == after["trunkattn_kv_pages_in_use[]"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_finished_requests_count_under_vllms_names(server: Server, stream: bool) -> None:
    before = samples(server)
    body = {"prompt": ["x" * 40, "y" * 30], "n": 3, "max_tokens": 6, "ignore_eos": True, "stream": stream}
    server.post("/v1/completions", body)
    after = samples(server)
    label = f"[('model_name', '{NAME}')]"

    def grown(name: str, labels: str = label) -> float:
        return after[f"vllm:{name}{labels}"] - before.get(f"vllm:{name}{labels}", 0)

    counted = {
        "request_prompt_tokens": (2, 70),
        "request_generation_tokens": (6, 36),
        "request_max_num_generation_tokens": (2, 12),
        "request_params_n": (2, 6),
        "request_params_max_tokens": (2, 12),
    }
    assert {name: (grown(f"{name}_count"), grown(f"{name}_sum")) for name in counted} == counted
    assert grown("request_success_total", f"[('finished_reason', 'length'), {label[1:]}") == 6
    parts = ("queue", "prefill", "decode", "inference")
    assert [grown(f"request_{part}_time_seconds_count") for part in parts] == [2] * 4
    queue, prefill, decode, inference = (grown(f"request_{part}_time_seconds_sum") for part in parts)
    assert min(queue, prefill, decode) > 0 and prefill + decode == pytest.approx(inference)
    assert queue + inference == pytest.approx(grown("e2e_request_latency_seconds_sum"))


def test_the_tokens_of_steps_and_the_cache_have_vllms_names(server: Server) -> None:
    before = samples(server)
    server.post("/v1/completions", {"prompt": [9] * 50, "n": 2, "max_tokens": 5, "ignore_eos": True})
    after = samples(server)

    def grown(name: str) -> float:
        found = f"vllm:iteration_tokens_total_{name}]"
        return after[found] - before.get(found, 0)

    label = f"('model_name', '{NAME}')"
    assert grown(f"sum[{label}") == 50 + 2 * 4
    assert grown(f"count[{label}") == 5 and grown(f"bucket[('le', '2.0'), {label}") == 4  # all but that of the prompt
    cache = server.llm.engine.scheduler.cache
    labels = {"block_size": cache.page_size, "enable_prefix_caching": True, "num_gpu_blocks": cache.pool.num_pages}
    assert after[f"vllm:cache_config_info{[(name, str(value)) for name, value in labels.items()]}"] == 1


def test_what_waits_for_its_first_step_is_counted_as_waiting(server: Server) -> None:
    """An engine's thread that is busy for a time, as with a long step."""
    before = samples(server)
    held = threading.Event()
    server.app.state.service.loop.call(lambda engine: held.wait(0.3) and None)
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "ignore_eos": True})
    name = f"vllm:request_queue_time_seconds_sum[('model_name', '{NAME}')]"
    assert samples(server)[name] - before[name] > 0.2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_counts_no_token(server: Server, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    before = samples(server)
    body = {"prompt": ["x" * 40, "y"], "n": 2, "echo": True, "max_tokens": 0, "stream": stream}
    with caplog.at_level(logging.INFO, "trunkattn"):
        response = server.post("/v1/completions", body)
        wait_for(lambda: any("all" in record.getMessage() for record in caplog.records))
    after = samples(server)
    grown = {name: after[name] - before.get(name, 0) for name in after if "created" not in name}
    for name in ("trunkattn_generated_tokens", "vllm:generation_tokens"):
        assert [value for found, value in grown.items() if found.startswith(f"{name}_total")] == [0]
    for name in ("trunkattn_time_to_first_token", "vllm:time_to_first_token", "trunkattn_inter_token"):
        assert [value for found, value in grown.items() if found.startswith(f"{name}_seconds_count")] == [0], name
    assert grown["trunkattn_prompt_tokens_total[]"] == 41 and grown["trunkattn_request_seconds_count[]"] == 2
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0
    line = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("cmpl-"))
    assert "length, prompt 41 tokens (" in line and "answers 0 tokens, first token after none, " in line


@pytest.mark.parametrize(
    ("method", "path", "route", "status"),
    [
        ("GET", f"/v1/models/{NAME}", "/v1/models/{name}", 200),
        ("GET", "/v1/models/another/model", "/v1/models/{name}", 404),
        ("GET", "/static/live.js", "/static/{path}", 200),
        ("GET", "/static/nothing", "/static/{path}", 404),
        ("DELETE", "/v1/models", "/v1/models", 405),
        ("GET", "/v1", "other", 404),
    ],
)
def test_requests_are_counted_by_their_route(server: Server, method: str, path: str, route: str, status: int) -> None:
    name = f"trunkattn_http_requests_total[('path', '{route}'), ('status', '{status}')]"
    before = samples(server).get(name, 0)
    assert httpx.request(method, f"{server.url}{path}", timeout=PATIENCE).status_code == status
    assert samples(server)[name] == before + 1


def snapshots(server: Server, headers: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """What the live page reads, every half second."""
    with httpx.stream("GET", f"{server.url}/live", headers=headers, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def test_the_forest_is_the_one_that_is_read(server: Server) -> None:
    trunk = "Every request begins with these words, which fill several pages of the cache. "
    body = {"prompt": [trunk + end for end in "abc"], "max_tokens": 300, "ignore_eos": True}
    seen = threading.Event()

    def keep_asking() -> None:
        """Until a snapshot falls into a step: the first step may compile for seconds, all of them may take less."""
        while not seen.is_set():
            server.post("/v1/completions", body)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    forests, read_bytes, unshared, end = list[dict[str, Any]](), 0.0, 0.0, time.monotonic() + PATIENCE
    try:
        with closing(snapshots(server)) as read:
            while not (forests and read_bytes):  # a picture of the first step comes before the sample that counts it
                shot = next(read)
                if shot["forest"]["requests"] == 3:
                    forests.append(shot["forest"])
                read_bytes += sum(sample["bytes_read"] for sample in shot["samples"])
                unshared += sum(sample["bytes_unshared"] for sample in shot["samples"])
                assert time.monotonic() < end, (shot, forests, read_bytes)
    finally:
        seen.set()
        asking.join()
    root = forests[-1]["nodes"][0]
    assert (root["parent"], root["requests"], root["start"]) == (-1, 3, 0)
    assert root["tokens"] == len(trunk) // 16 * 16 and trunk.startswith(root["text"])
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, float32
    assert root["bytes"] == root["tokens"] * token_bytes
    assert [node["parent"] for node in forests[-1]["nodes"][1:]] == [0, 0, 0]
    assert 0 < read_bytes <= unshared


def test_nobody_looks_and_no_picture_is_made(server: Server) -> None:
    live = server.app.state.live
    with closing(snapshots(server)) as read:
        next(read)
        assert live._readers
    wait_for(lambda: not live._readers)


def test_a_tenant_has_few_pages_and_many_that_open_cost_one_picture(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, made = server.app.state.live, list[float]()
    picture = live._picture

    def counted(*arguments: Any) -> Any:
        made.append(time.monotonic())
        return picture(*arguments)

    monkeypatch.setattr(live, "_picture", counted)
    began = time.monotonic()
    with ExitStack() as pages:
        for _ in range(LIMITS.live_pages):
            next(pages.enter_context(closing(snapshots(server))))
        took = time.monotonic() - began
        assert len(made) <= 2 + 2 * took / 0.5
        refused = server.get("/live")
        assert refused.status_code == 429 and "live pages are open" in refused.json()["error"]["message"]
    wait_for(lambda: not live._readers)
    with closing(snapshots(server)) as read:
        assert next(read)["running"] == 0


@pytest.mark.parametrize("jump", [0.0, -7200.0, 7200.0])
def test_the_last_minutes_are_sent_at_once_and_each_sample_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Also while the machine's clock is set to another time."""
    server.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 6, "ignore_eos": True})
    server.wait_idle()
    server.wait_for_samples(2)
    wall_clock = time.time
    with closing(snapshots(server)) as read:
        shots = [next(read)]
        monkeypatch.setattr(time, "time", lambda: wall_clock() + jump)
        shots += [next(read) for _ in range(3)]
    assert sum(sample["tokens"] for sample in shots[0]["samples"]) >= 6
    times = [sample["uptime"] for shot in shots for sample in shot["samples"]]
    assert times == sorted(set(times)) and times[-1] <= shots[-1]["uptime"]
    seconds = [sample["seconds"] for shot in shots for sample in shot["samples"]]
    assert np.allclose(np.diff(times), seconds[1:])
    assert all(sample["seconds"] > 0 for shot in shots for sample in shot["samples"])


def test_the_samples_are_bounded(server: Server) -> None:
    service = server.app.state.service
    many = Live(server.llm, service.metrics, service.loop)
    for _ in range(700):
        many.watch(server.llm.engine)
    assert len(many._samples) == 600
    shot = _Shot(tuple(many._samples), 700, "{}")
    assert shot.event(0).count('"seconds"') == 600
    assert shot.event(699).count('"seconds"') == 1 and shot.event(700).count('"seconds"') == 0


def test_the_page_has_the_figures_of_the_whole_server(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 6, "ignore_eos": True})
    server.post("/v1/completions", {"prompt": 1})
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\n")  # as those ask who look what listens at a port
        assert b" 505 " in connection.recv(100)
    with closing(snapshots(server)) as read:
        shot = next(read)
    assert (shot["refused"], shot["failed"], shot["running"], shot["requests"]) == (2, 0, 0, [])
    assert 0 < shot["first_token_p50"] <= shot["first_token_p99"] <= shot["uptime"]


def test_a_tenant_reads_the_list_of_its_own_requests(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(api_keys=("first", "second"))
    server.stand_still(monkeypatch)
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("first", "second")}
    body = {"prompt": "x" * 40, "max_tokens": 400, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=keys["first"], timeout=PATIENCE) as answer:
        lines = answer.iter_lines()  # without a reader the answer would end
        next(lines)
        shown = {name: next(snapshots(server, headers)) for name, headers in keys.items()}
    assert shown["second"]["requests"] == [] == shown["second"]["forest"]["nodes"]
    (request,) = shown["first"]["requests"]
    assert (request["state"], request["prompt_tokens"], request["max_tokens"]) == ("running", 40, 400)
    server.wait_idle()


def test_the_page_comes_from_this_host_alone(server: Server) -> None:
    page = server.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    assert "//" not in page.text.replace("<!doctype html>", "")  # no address of another host
    for name in ("live.js", "live.css", "uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"):
        assert server.get(f"/static/{name}").status_code == 200
    assert server.get("/static/../app.py").status_code == 404


@pytest.mark.parametrize("asked", ["bytes=0-3", "bytes=9999999-", "bytes=3-1", "lines=1", "x"])
def test_a_file_of_the_page_is_whole_whatever_range_is_asked_for(server: Server, asked: str) -> None:
    whole, part = (server.get("/static/live.js", headers=given) for given in ({}, {"Range": asked}))
    assert (part.status_code, part.content, part.headers["accept-ranges"]) == (200, whole.content, "none")
