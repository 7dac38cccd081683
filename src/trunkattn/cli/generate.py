"""`trunkattn generate`: prompts in, answers out."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trunkattn.cli.models import name_of, place, use_threads, working
from trunkattn.cli.options.engine import GenerateOptions
from trunkattn.cli.options.from_dataclass import fields_of, reported_by_option
from trunkattn.cli.streams import STANDARD_STREAM, print_json
from trunkattn.engine import CompletionOutput, EngineConfig, Logprob, RequestOutput
from trunkattn.engine.model.path import existing_path
from trunkattn.interrupts import ends_at_once, importing
from trunkattn.validate import check_text, shown

if TYPE_CHECKING:
    from trunkattn.engine import LLM


def run_generate(options: GenerateOptions) -> None:
    """Checks the options and prompts, loads the model, answers, and prints.

    Options are checked first, then the path of the model, and only then standard input is read, so that a user does not
    type a prompt in vain. torch is loaded after these checks, and weights after all others.
    """
    with reported_by_option(GenerateOptions):
        params = options.sampling_params()
    given = given_prompts(options)
    with reported_by_option(GenerateOptions):
        existing_path(options.model)
    prompts = [_standard_input() if prompt is None else prompt for prompt in given]
    errors = Console(file=sys.stderr)
    with reported_by_option(GenerateOptions), working(errors, f"Loading {name_of(options.model)}"):
        with importing():
            from trunkattn.engine import LLM

        use_threads(options.threads)
        with ends_at_once():
            llm = LLM(options.model, **fields_of(EngineConfig, options))
    errors.print(f"{name_of(options.model)} runs on {place(llm)}", style="dim", markup=False, highlight=False)
    requests = [tokenize(llm, prompt, options.chat) for prompt in prompts]
    with reported_by_option(GenerateOptions):
        stream = llm.stream(requests, params)
    console = Console()
    if len(requests) == 1 and params.n == 1 and console.is_terminal and not options.as_json:
        with ends_at_once():
            outputs = print_stream(stream, console)
    else:
        with ends_at_once():
            outputs = collect(stream, len(requests), params.n * options.max_tokens, errors)
        if options.as_json:
            print_json(valid_json(as_json(options, prompts, outputs, llm)))
            return
        print_answers(prompts, outputs, console, errors)
    if params.logprobs is not None:
        print_logprobs(outputs, console)


def given_prompts(options: GenerateOptions) -> list[str | None]:
    """The prompts from the only source that is given; None stands for the text of standard input."""
    if options.prompt and options.prompt_file:
        raise typer.BadParameter("given together with --prompt-file: expected one of the two", param_hint="--prompt")
    if options.prompt:
        return [_checked("--prompt", prompt) for prompt in options.prompt]
    if options.prompt_file:
        return [None if path == STANDARD_STREAM else _file_text(path) for path in options.prompt_file]
    if sys.stdin is None or sys.stdin.isatty():
        message = "no prompt given: expected --prompt TEXT, --prompt-file PATH, or text on standard input"
        raise typer.BadParameter(message, param_hint="--prompt")
    return [None]


def _file_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{str(path)!r}: expected a UTF-8 text file ({error})"
        raise typer.BadParameter(message, param_hint="--prompt-file") from error
    return _checked(f"--prompt-file {path}", text)


def _standard_input() -> str:
    if sys.stdin is None:
        raise typer.BadParameter("expected text, and it is closed", param_hint="standard input")
    try:
        return _checked("standard input", sys.stdin.read().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"expected UTF-8 text ({error})", param_hint="standard input") from error


def _checked(source: str, prompt: str) -> str:
    """A prompt, if it is valid text that is not blank."""
    if not prompt.strip():
        raise typer.BadParameter(f"nothing but white space ({shown(prompt)}): expected text", param_hint=source)
    try:
        check_text(source, prompt)
    except ValueError as error:
        raise typer.BadParameter(f"{shown(prompt)}: expected UTF-8 text", param_hint=source) from error
    return prompt


def tokenize(llm: "LLM", prompt: str, chat: bool | None) -> list[int]:
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
    return list(llm.tokenizer(prompt)["input_ids"])


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
    _mark_cut(output.outputs[0], console)
    console.print(_figures(output), style="dim")
    return [output]


def collect(
    stream: Iterator[tuple[int, RequestOutput]], count: int, most_tokens: int, errors: Console
) -> list[RequestOutput]:
    """Shows a bar of the tokens and their speed, and returns all answers in order of the prompts.

    Args:
        stream: what `LLM.stream` returns.
        count: prompts.
        most_tokens: most tokens that the answers to one prompt can have together; the bar is full when all have ended.
        errors: where the bar is shown.
    """
    results: dict[int, RequestOutput] = {}
    columns = (TextColumn("Answering"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    start = time.perf_counter()
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task("", total=count * most_tokens)
        for position, output in stream:
            results[position] = output
            done = sum(most_tokens if one.finished else num_tokens(one) for one in results.values())
            tokens = sum(map(num_tokens, results.values()))
            speed = tokens / max(time.perf_counter() - start, 1e-9)
            ended = sum(one.finished for one in results.values())
            words = f"{tokens} tokens, {speed:.1f} tokens/s, {ended} of {count} prompts"
            progress.update(task, completed=done, description=words)
    first = [one.metrics.time_to_first_token for one in results.values()]
    seconds = [each for each in first if each is not None]
    if seconds:
        bounds = dict.fromkeys(f"{each(seconds):.2f}" for each in (min, max))  # one number if they are equal
        errors.print(f"first token after {' to '.join(bounds)} s", style="dim", highlight=False)
    return [results[position] for position in range(count)]


def num_tokens(output: RequestOutput) -> int:
    """Tokens of all answers of a request so far."""
    return sum(len(answer.token_ids) for answer in output.outputs)


def print_answers(prompts: list[str], outputs: list[RequestOutput], console: Console, errors: Console) -> None:
    """Prints the answers as plain text. If there are several, each comes after the beginning of its prompt. What is
    no answer's text, such as the mark of one that was cut, goes to `errors`."""
    several = len(outputs) > 1 or len(outputs[0].outputs) > 1
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            if several:
                beginning = " ".join(prompt.split())[:60]
                number = f" (answer {answer.index + 1})" if len(output.outputs) > 1 else ""
                console.rule(Text(f"{beginning}{number}", "rule.text"), align="left")
            console.print(answer.text, markup=False, highlight=False, soft_wrap=True)
            if answer.error is not None:
                console.print(f"ended by an error: {answer.error}", style="red", markup=False, highlight=False)
            _mark_cut(answer, errors)


def _mark_cut(answer: CompletionOutput, console: Console) -> None:
    """Says of an answer that ended at its limit that it has no end."""
    if answer.finish_reason == "length":
        words = f"… cut after {len(answer.token_ids)} tokens; --max-tokens, the model or the cache allows no more"
        console.print(words, style="yellow", markup=False, highlight=False)


def print_logprobs(outputs: list[RequestOutput], console: Console) -> None:
    """Prints a table per answer: each token, its log-probability, and the most likely tokens in its place."""
    for answer in (answer for output in outputs for answer in output.outputs):
        table = Table("token", "log-probability", "rank", "most likely", box=None, header_style="bold")
        for token_id, entry in zip(answer.token_ids, answer.logprobs or [], strict=True):
            best = sorted(entry.values(), key=lambda logprob: logprob.rank)
            likely = ", ".join(f"{logprob.decoded_token!r} {logprob.logprob:.2f}" for logprob in best)
            own = entry[token_id]
            cells = (repr(own.decoded_token), f"{own.logprob:.3f}", str(own.rank), likely)
            table.add_row(*map(Text, cells))
        console.print(table)


def as_json(options: GenerateOptions, prompts: list[str], outputs: list[RequestOutput], llm: "LLM") -> dict[str, Any]:
    """The output of `--json`. Times are in seconds; log-probabilities are natural logarithms."""
    stats = llm.stats
    return {
        "model": str(options.model),
        "device": str(llm.info.device),
        "dtype": str(llm.info.dtype).removeprefix("torch."),
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
    return {**asdict(replace(answer, logprobs=None)), "logprobs": _logprobs(answer.logprobs)}


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
