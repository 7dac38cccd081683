"""`trunkattn generate`: prompts in, answers out."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trunkattn.cli.models import working
from trunkattn.cli.options import GenerateOptions, reported_by_option
from trunkattn.engine import LLM, CompletionOutput, RequestOutput, SamplingParams


def run_generate(options: GenerateOptions) -> None:
    """Checks everything that can be checked without the weights, loads the model, answers, prints."""
    prompts = read_prompts(options)
    errors = Console(file=sys.stderr)
    with reported_by_option(GenerateOptions):
        params = sampling_params(options)
        with working(errors, f"Loading {options.model.name}"):
            llm = LLM(
                options.model,
                policy=options.policy,
                page_size=options.page_size,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                scheduler_policy=options.scheduler_policy,
                device=options.device,
                gpu_memory_utilization=options.gpu_memory_utilization,
                enforce_eager=options.enforce_eager,
            )
    requests = [tokenize(llm, prompt, options.chat) for prompt in prompts]
    with reported_by_option(GenerateOptions):
        stream = llm.stream(requests, params)
    console = Console()
    if len(requests) == 1 and params.n == 1 and console.is_terminal and not options.as_json:
        outputs = print_stream(stream, console)
    else:
        outputs = collect(stream, len(requests), errors)
        if options.as_json:
            typer.echo(json.dumps(as_json(options, prompts, outputs, llm), indent=1, ensure_ascii=False))
            return
        print_answers(prompts, outputs, console)
    if params.logprobs is not None:
        print_logprobs(outputs, console)


def read_prompts(options: GenerateOptions) -> list[str]:
    """The prompts of the one source that was given."""
    if options.prompt and options.prompt_file:
        raise typer.BadParameter("given together with --prompt-file: expected one of them", param_hint="--prompt")
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
        message = "none given: expected --prompt TEXT, --prompt-file PATH, or text on standard input"
        raise typer.BadParameter(message, param_hint="--prompt")
    else:
        prompts, source = [sys.stdin.read()], "standard input"
    for prompt in prompts:
        if not prompt.strip():
            raise typer.BadParameter(f"{prompt!r}: expected text", param_hint=source)
    return prompts


def sampling_params(options: GenerateOptions) -> SamplingParams:
    """The sampling options; raises ValueError as SamplingParams does."""
    return SamplingParams(
        n=options.n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=tuple(options.stop or ()),
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
    )


def tokenize(llm: LLM, prompt: str, chat: bool | None) -> list[int]:
    """Token ids of a prompt, as a user's message of the chat template or as plain text."""
    if llm.tokenizer is None:
        raise typer.BadParameter("has no tokenizer: expected a model folder with tokenizer.json", param_hint="--model")
    has_template = bool(llm.tokenizer.chat_template)
    if chat and not has_template:
        raise typer.BadParameter("the model has no chat template: expected --no-chat", param_hint="--chat")
    if chat or (chat is None and has_template):
        message = [{"role": "user", "content": prompt}]
        return llm.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return llm.tokenizer(prompt)["input_ids"]


def print_stream(stream: Iterator[tuple[int, RequestOutput]], console: Console) -> list[RequestOutput]:
    """Prints the only answer as it grows, then its figures."""
    shown = ""
    for _, output in stream:
        text = output.outputs[0].text
        console.print(text[len(shown) :], end="", markup=False, highlight=False, soft_wrap=True)
        shown = text
    console.print()
    console.print(_figures(output), style="dim")
    return [output]


def collect(stream: Iterator[tuple[int, RequestOutput]], count: int, errors: Console) -> list[RequestOutput]:
    """All answers, in order of the prompts, with a progress bar."""
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
    """Answers as plain text; with more than one, each under the beginning of its prompt."""
    several = len(outputs) > 1 or len(outputs[0].outputs) > 1
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            if several:
                beginning = " ".join(prompt.split())[:60]
                number = f" (answer {answer.index + 1})" if len(output.outputs) > 1 else ""
                console.rule(f"{beginning}{number}".replace("[", r"\["), align="left")
            console.print(answer.text, markup=False, highlight=False, soft_wrap=True)


def print_logprobs(outputs: list[RequestOutput], console: Console) -> None:
    """One table per answer: each token, its log-probability, and the most likely tokens there."""
    for answer in (answer for output in outputs for answer in output.outputs):
        table = Table("token", "log-probability", "rank", "most likely", box=None, header_style="bold")
        for token_id, entry in zip(answer.token_ids, answer.logprobs or [], strict=True):
            best = sorted(entry.values(), key=lambda one: one.rank)
            likely = ", ".join(f"{one.decoded_token!r} {one.logprob:.2f}" for one in best)
            own = entry[token_id]
            cells = (repr(own.decoded_token), f"{own.logprob:.3f}", str(own.rank), likely)
            table.add_row(*(cell.replace("[", r"\[") for cell in cells))
        console.print(table)


def as_json(options: GenerateOptions, prompts: list[str], outputs: list[RequestOutput], llm: LLM) -> dict[str, Any]:
    """What `--json` prints. Times in seconds; log-probabilities are natural logarithms."""
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


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    """The answer's fields; of the log-probabilities a list per token, because JSON has no integer keys."""
    fields = asdict(answer)
    if answer.logprobs is not None:
        fields["logprobs"] = [
            [{"token_id": token_id, **asdict(one)} for token_id, one in entry.items()] for entry in answer.logprobs
        ]
    return fields


def _figures(output: RequestOutput) -> str:
    """Counts and times of one finished request."""
    answer, metrics = output.outputs[0], output.metrics
    first, each = metrics.time_to_first_token, output.time_per_output_token
    parts = [f"{len(output.prompt_token_ids)} prompt tokens", f"{len(answer.token_ids)} answer tokens"]
    parts += [] if first is None else [f"first token after {first:.2f} s"]
    parts += [] if each is None else [f"{1 / each:.1f} tokens/s"]
    return ", ".join([*parts, f"ended by {answer.finish_reason}"])
