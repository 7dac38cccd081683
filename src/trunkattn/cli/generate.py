"""`trunkattn generate`: prompts in, answers out."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trunkattn.cli.models import working
from trunkattn.cli.options import GenerateOptions, fields_of, reported_by_option
from trunkattn.engine import LLM, CompletionOutput, EngineConfig, Logprob, RequestOutput
from trunkattn.engine.config import check_text


def run_generate(options: GenerateOptions) -> None:
    """Checks the prompts and options, loads the model, answers, and prints. Weights are loaded after the checks."""
    prompts = read_prompts(options)
    errors = Console(file=sys.stderr)
    with reported_by_option(GenerateOptions):
        params = options.sampling_params()
        with working(errors, f"Loading {options.model.name}"):
            llm = LLM(options.model, **fields_of(EngineConfig, options))
    requests = [tokenize(llm, prompt, options.chat) for prompt in prompts]
    with reported_by_option(GenerateOptions):
        stream = llm.stream(requests, params)
    console = Console()
    if len(requests) == 1 and params.n == 1 and console.is_terminal and not options.as_json:
        outputs = print_stream(stream, console)
    else:
        outputs = collect(stream, len(requests), errors)
        if options.as_json:
            printed = valid_json(as_json(options, prompts, outputs, llm))
            typer.echo(json.dumps(printed, indent=1, ensure_ascii=False, allow_nan=False))
            return
        print_answers(prompts, outputs, console)
    if params.logprobs is not None:
        print_logprobs(outputs, console)


def read_prompts(options: GenerateOptions) -> list[str]:
    """The prompts from the one source that is given."""
    if options.prompt and options.prompt_file:
        raise typer.BadParameter("given together with --prompt-file: expected one of the two", param_hint="--prompt")
    if options.prompt:
        prompts, source = list(options.prompt), "--prompt"
    elif options.prompt_file:
        prompts, source = [], "--prompt-file"
        for path in options.prompt_file:
            try:
                prompts.append(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                message = f"{str(path)!r}: expected a UTF-8 text file ({error})"
                raise typer.BadParameter(message, param_hint=source) from error
    elif sys.stdin.isatty():
        message = "no prompt given: expected --prompt TEXT, --prompt-file PATH, or text on standard input"
        raise typer.BadParameter(message, param_hint="--prompt")
    else:
        prompts, source = [_standard_input()], "standard input"
    for prompt in prompts:
        if not prompt.strip():
            raise typer.BadParameter(f"{prompt!r}: expected text", param_hint=source)
        try:
            check_text(source, prompt)
        except ValueError as error:
            raise typer.BadParameter(f"{prompt!r}: expected UTF-8 text", param_hint=source) from error
    return prompts


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"expected UTF-8 text ({error})", param_hint="standard input") from error


def tokenize(llm: LLM, prompt: str, chat: bool | None) -> list[int]:
    """Token ids of a prompt, as a user's message in the chat template or as plain text."""
    if llm.tokenizer is None:
        message = "the model has no tokenizer: expected a folder with tokenizer.json"
        raise typer.BadParameter(message, param_hint="--model")
    has_template = bool(llm.tokenizer.chat_template)
    if chat and not has_template:
        raise typer.BadParameter("the model has no chat template: expected --no-chat", param_hint="--chat")
    if chat or (chat is None and has_template):
        conversation = [{"role": "user", "content": prompt}]
        return llm.render_chat(conversation)
    return llm.tokenizer(prompt)["input_ids"]


def print_stream(stream: Iterator[tuple[int, RequestOutput]], console: Console) -> list[RequestOutput]:
    """Prints the one answer as it grows, then its figures."""
    shown = ""
    for _, output in stream:
        text = output.outputs[0].text
        console.print(text[len(shown) :], end="", markup=False, highlight=False, soft_wrap=True)
        shown = text
    console.print()
    if output.outputs[0].error is not None:
        console.print(f"ended by an error: {output.outputs[0].error}", style="red", markup=False, highlight=False)
    console.print(_figures(output), style="dim")
    return [output]


def collect(stream: Iterator[tuple[int, RequestOutput]], count: int, errors: Console) -> list[RequestOutput]:
    """Shows a progress bar and returns all answers in order of the prompts."""
    results: dict[int, RequestOutput] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task("Answering", total=count)
        for position, output in stream:
            if output.finished:
                results[position] = output
                progress.advance(task)
    return [results[position] for position in range(count)]


def print_answers(prompts: list[str], outputs: list[RequestOutput], console: Console) -> None:
    """Prints the answers as plain text. If there are several, each comes after the beginning of its prompt."""
    several = len(outputs) > 1 or len(outputs[0].outputs) > 1
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            if several:
                beginning = " ".join(prompt.split())[:60]
                number = f" (answer {answer.index + 1})" if len(output.outputs) > 1 else ""
                console.rule(f"{beginning}{number}".replace("[", r"\["), align="left")
            console.print(answer.text, markup=False, highlight=False, soft_wrap=True)
            if answer.error is not None:
                console.print(f"ended by an error: {answer.error}", style="red", markup=False, highlight=False)


def print_logprobs(outputs: list[RequestOutput], console: Console) -> None:
    """Prints a table per answer: each token, its log-probability, and the most likely tokens in its place."""
    for answer in (answer for output in outputs for answer in output.outputs):
        table = Table("token", "log-probability", "rank", "most likely", box=None, header_style="bold")
        for token_id, entry in zip(answer.token_ids, answer.logprobs or [], strict=True):
            best = sorted(entry.values(), key=lambda logprob: logprob.rank)
            likely = ", ".join(f"{logprob.decoded_token!r} {logprob.logprob:.2f}" for logprob in best)
            own = entry[token_id]
            cells = (repr(own.decoded_token), f"{own.logprob:.3f}", str(own.rank), likely)
            table.add_row(*(cell.replace("[", r"\[") for cell in cells))
        console.print(table)


def as_json(options: GenerateOptions, prompts: list[str], outputs: list[RequestOutput], llm: LLM) -> dict[str, Any]:
    """The output of `--json`. Times are in seconds; log-probabilities are natural logarithms."""
    stats = llm.stats
    return {
        "model": str(options.model),
        "policy": options.policy,
        "page_size": options.page_size,
        "outputs": [
            {
                "prompt": prompt,
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.num_cached_tokens,
                "time_to_first_token": output.metrics.time_to_first_token,
                "time_per_output_token": output.time_per_output_token,
                "prompt_logprobs": _logprobs(output.prompt_logprobs),
                "answers": [_answer(answer) for answer in output.outputs],
            }
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
        "stats": {
            "steps": stats.steps,
            "busy_seconds": stats.busy_seconds,
            "generated_tokens": stats.generated_tokens,
            "kv_tokens_read": stats.kv_tokens_read,
            "kv_tokens_per_query": stats.kv_tokens_per_query,
        },
    }


def valid_json(value: Any) -> Any:
    """A value that JSON has: null for a number that is not finite, such as the logarithm of 0, and a replacement
    character for what is not Unicode."""
    if isinstance(value, dict):
        return {valid_json(name): valid_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    """The answer's fields."""
    return {**asdict(answer), "logprobs": _logprobs(answer.logprobs)}


def _logprobs(entries: Sequence[dict[int, Logprob] | None] | None) -> list[Any] | None:
    """Log-probabilities as a list per token, because JSON has no integer keys."""
    if entries is None:
        return None
    return [
        None if entry is None else [_logprob(token_id, logprob) for token_id, logprob in entry.items()]
        for entry in entries
    ]


def _figures(output: RequestOutput) -> str:
    """Counts and times of one finished request."""
    answer, metrics = output.outputs[0], output.metrics
    first, each = metrics.time_to_first_token, output.time_per_output_token
    parts = [f"{len(output.prompt_token_ids)} prompt tokens", f"{len(answer.token_ids)} answer tokens"]
    parts += [] if first is None else [f"first token after {first:.2f} s"]
    parts += [] if each is None else [f"{1 / each:.1f} tokens/s"]
    return ", ".join([*parts, f"ended by {answer.finish_reason}"])


def _logprob(token_id: int, logprob: Logprob) -> dict[str, Any]:
    """A token's log-probability; its bytes as numbers, which JSON has."""
    written = logprob.token_bytes
    return {"token_id": token_id, **asdict(logprob), "token_bytes": None if written is None else list(written)}
