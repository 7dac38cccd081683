"""Clients that people have, as they come: openai, LiteLLM, LangChain, lm-evaluation-harness and GuideLLM."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import NAME

pytestmark = pytest.mark.clients
MESSAGES: list[Any] = [{"role": "user", "content": "Which part is read once?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a part up.",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "enum": ["trunk", "leaf"]}},
            "required": ["part"],
            "additionalProperties": False,
        },
    },
}


def test_openai(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    ask: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    forced: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    first = client.chat.completions.create(model=NAME, messages=MESSAGES, seed=1, **forced)
    said = first.choices[0].message
    assert said.tool_calls and said.tool_calls[0].function.name == "look_up"
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "The trunk is read once."}
    ask["messages"] = [*MESSAGES, said.model_dump(), result]
    second = client.chat.completions.create(**ask, tools=[TOOL], store=False, metadata={"a": "b"})
    chunks = client.chat.completions.create(**ask, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (second.choices[0].message.content or "")
    assert [model.id for model in client.models.list()] == [NAME]


def test_litellm(url: str) -> None:
    import litellm

    ask: Any = {"model": f"openai/{NAME}", "api_base": url, "api_key": "none", "messages": MESSAGES, "max_tokens": 8}
    whole = litellm.completion(**ask, temperature=0)
    said = whole.choices[0].message
    chunks = list(litellm.completion(**ask, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said.content
    again = litellm.completion(**(ask | {"messages": [*MESSAGES, said.model_dump(), *MESSAGES]}), temperature=0)
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    text = litellm.text_completion(
        model=f"text-completion-openai/{NAME}", api_base=url, api_key="none", prompt="The trunk", max_tokens=4
    )
    assert text.usage.completion_tokens > 0


def test_langchain(url: str) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(model=NAME, base_url=url, api_key="none", temperature=0, max_tokens=60, max_retries=0)  # type: ignore[call-arg,arg-type]
    caller = ChatOpenAI(model=NAME, base_url=url, api_key="none", seed=1, max_retries=0)  # type: ignore[call-arg,arg-type]
    called = caller.bind_tools([TOOL], tool_choice="look_up").invoke("Which part is read once?")
    assert isinstance(called, AIMessage) and called.tool_calls[0]["name"] == "look_up"
    history = [
        HumanMessage("Which part is read once?"),
        called,
        ToolMessage("The trunk.", tool_call_id=called.tool_calls[0]["id"]),
    ]
    whole = chat.invoke(history)
    assert "".join(str(chunk.content) for chunk in chat.stream(history)) == whole.content
    text = OpenAI(model=NAME, base_url=url, api_key="none", temperature=0, max_tokens=4)  # type: ignore[call-arg,arg-type]
    assert isinstance(text.invoke("The trunk"), str)


def write_task(folder: Path) -> None:
    """A task of multiple choice, which needs no other host."""
    choices = [" the trunk", " a leaf", " both"]
    rows = [{"question": f"Question {i}: what is read?", "choices": choices, "gold": i % 3} for i in range(6)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parts.yaml").write_text(
        f"task: parts\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_target: gold\ndoc_to_choice: choices\n'
        "metric_list:\n  - metric: acc\n"
    )


def scores(model: str, arguments: dict[str, Any], tasks: Path) -> list[float]:
    """What lm-evaluation-harness makes of each choice."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["parts"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["parts"], key=lambda sample: sample["doc_id"])
    return [float(response[0]) for sample in samples for response in sample["filtered_resps"]]


def test_lm_evaluation_harness_gives_transformers_own_scores(url: str, folder: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    served = {"base_url": f"{url}/completions", "model": NAME, "tokenizer": str(folder), "num_concurrent": 2}
    ours = scores("local-completions", served | {"tokenizer_backend": "huggingface", "max_length": 500}, tmp_path)
    own = scores("hf", {"pretrained": str(folder), "device": "cpu", "dtype": "float32", "batch_size": 1}, tmp_path)
    assert len(ours) == 18 and ours == pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(url: str, folder: Path, tmp_path: Path, path: str) -> None:
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model={NAME},request_format={path}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
        "--tokenizer", f"kind=hf_auto,model={folder}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=6",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 3 and totals["errored"] == 0
