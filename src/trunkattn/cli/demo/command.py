"""`trunkattn demo`: a shop's assistant answers 32 customers, with shared prefixes read once and read per request."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from trunkattn.cli.demo.measure import BatchRun, Step, run_batch
from trunkattn.cli.demo.model import DEMO_MODEL, DEMO_MODEL_COMMAND, find_demo_model
from trunkattn.cli.demo.report import DemoResult, Widest, print_result, summarise
from trunkattn.cli.demo.workload import DemoWorkload, load_demo
from trunkattn.cli.models import working
from trunkattn.cli.options.engine import DemoOptions
from trunkattn.cli.options.from_dataclass import reported_by_option
from trunkattn.cli.streams import check_writable, print_json
from trunkattn.engine import LLM, RequestOutput, SamplingParams
from trunkattn.interrupts import ends_at_once
from trunkattn.other_work import OtherWork
from trunkattn.planner.prefix_forest import Forest, build_forest

POLICIES: Final = ("per_query", "auto")
NUM_STREAMED: Final = 4  # customers whose answers are shown as they grow
NUM_RUNS: Final = 3  # measured runs of each policy
WARM_UP_PROMPT, WARM_UP_ANSWER = 80, 4  # tokens; the ends of the prompts, about the questions, form a small tree
PICTURE: Final = "demo-forest.png"


@dataclass(frozen=True)
class Demo:
    """The inputs of every part of the demo."""

    options: DemoOptions
    workload: DemoWorkload
    engines: dict[str, LLM]
    prompts: list[list[int]]
    console: Console

    @property
    def params(self) -> SamplingParams:
        """Greedy, to the natural end of each answer."""
        return SamplingParams(temperature=0.0, max_tokens=self.options.max_tokens)


def run_demo_command(options: DemoOptions) -> None:
    """The command: the whole workload on the packaged model."""
    model = find_demo_model()
    if model is None:
        typer.echo(f"trunkattn demo: its model, {DEMO_MODEL}, is not installed: {DEMO_MODEL_COMMAND}", err=True)
        raise typer.Exit(1)
    result = run_demo(options, model, load_demo(), Console(file=sys.stderr) if options.as_json else Console())
    if options.as_json:
        print_json(asdict(result))


def run_demo(options: DemoOptions, model: Path, workload: DemoWorkload, console: Console) -> DemoResult:
    """Loads the model, warms up, streams some answers, measures both policies and draws the picture. Prints the figures
    unless `as_json`."""
    make_folder(options.out)
    with reported_by_option(DemoOptions):
        check_writable("out", options.out / PICTURE, {})
    engines = {}
    for policy in POLICIES:
        with working(console, f"Loading {model.stem} for {policy}"), reported_by_option(DemoOptions), ends_at_once():
            engines[policy] = LLM(model, policy=policy, page_size=options.page_size, device="cpu")
    demo = Demo(options, workload, engines, tokenize(engines["auto"], workload), console)
    with ends_at_once():
        warm_up(demo)
        widest = stream(demo)
        others = OtherWork()
        runs = measure(demo)
        busy = others.cores()
    picture = draw(demo, widest)
    result = summarise(engines["auto"], workload, runs, widest, picture, busy)
    if not options.as_json:
        print_result(result, console)
        console.print(f"\nServe this model: {serve_command(model)}", markup=False, highlight=False, soft_wrap=True)
    return result


def serve_command(model: Path) -> str:
    """The shell command that serves the model, by the program that runs now and with its compiled kernels."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "trunkattn" else "trunkattn"
    kept = os.environ.get("NUMBA_CACHE_DIR")
    where = f"NUMBA_CACHE_DIR={shlex.quote(kept)} " if kept else ""
    return where + shlex.join([program, "serve", "--model", str(model)])


def make_folder(folder: Path) -> None:
    """Makes the folder for the picture, before any other work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{str(folder)!r}: expected a folder that exists or can be created ({error.strerror})"
        raise typer.BadParameter(message, param_hint="--out") from error


def tokenize(llm: LLM, workload: DemoWorkload) -> list[list[int]]:
    """Token ids of each conversation, by the model's chat template."""
    assert llm.tokenizer is not None
    return [
        llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in workload.chats
    ]


def warm_up(demo: Demo) -> None:
    """Runs a small batch on both engines, so that no measured step compiles or loads anything."""
    start = max(min(map(len, demo.prompts)) - WARM_UP_PROMPT, 0)
    prompts = [prompt[start:] for prompt in demo.prompts]
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_ANSWER, ignore_eos=True)
    for policy, llm in demo.engines.items():
        with working(demo.console, f"Warming up {policy} (the first time it compiles)"):
            run_batch(llm, prompts, params, lambda *_: None)


def stream(demo: Demo) -> Widest:
    """Answers all customers at once with policy auto, unmeasured, and shows some of the answers as they grow."""
    tokens = sum(map(len, demo.prompts)) // len(demo.prompts)
    demo.console.print(
        f"\n[bold]{len(demo.prompts)} customers ask at the same time; each prompt has about {tokens:,} tokens. "
        "Some of them:[/]",
        highlight=False,
    )
    widest, llm = Widest(), demo.engines["auto"]
    with Live(console=demo.console, auto_refresh=False) as live:

        def show(step: Step, outputs: Sequence[RequestOutput | None]) -> None:
            widest.look(llm, step, outputs)
            live.update(_conversations(demo.workload, outputs), refresh=True)

        run = run_batch(llm, demo.prompts, demo.params, show)
    if not demo.console.is_terminal:
        demo.console.line()
    others = run.outputs[NUM_STREAMED:]
    ended = sum(output.outputs[0].finish_reason == "stop" for output in others)
    tokens = sum(len(output.outputs[0].token_ids) for output in others)
    demo.console.print(
        f"… and {len(others)} more answers with {tokens} tokens in all: {ended} ended by themselves, "
        f"{len(others) - ended} at the limit of {demo.options.max_tokens} tokens.\n"
    )
    return widest


def measure(demo: Demo) -> dict[str, BatchRun]:
    """Times the same batch several times, the policies in turn, and returns each policy's run of median time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs: dict[str, list[BatchRun]] = {policy: [] for policy in POLICIES}
    with Progress(*columns, console=demo.console) as progress:
        task = progress.add_task("Measuring both policies", total=NUM_RUNS * len(POLICIES))
        for _ in range(NUM_RUNS):
            for policy in POLICIES:
                runs[policy].append(run_batch(demo.engines[policy], demo.prompts, demo.params, lambda *_: None))
                progress.advance(task)
    return {policy: sorted(found, key=lambda run: run.seconds)[NUM_RUNS // 2] for policy, found in runs.items()}


def draw(demo: Demo, widest: Widest) -> Path | None:
    """Draws the forest of the widest step and returns the picture's path; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    from trunkattn.cli.demo.picture import ForestPicture, draw_forest

    taken, step, llm = widest.taken, widest.step, demo.engines["auto"]
    queries = np.ones(len(taken.positions), np.int32)
    forest = Forest(*build_forest(taken.block_table, taken.seq_lens, queries, demo.options.page_size, 1))
    picture = ForestPicture(
        forest=forest,
        names=[demo.workload.customers[position] for position in taken.positions],
        groups=[demo.workload.departments[position] for position in taken.positions],
        trunk_name="The shop's guide",
        tokens_read=step.kv_tokens_read,
        tokens_per_query=step.kv_tokens_per_query,
        token_bytes=llm.kv_cache.bytes_per_token,
        num_layers=llm.model.config.num_hidden_layers,
    )
    path = demo.options.out / PICTURE
    draw_forest(picture, path)
    return path


def _conversations(workload: DemoWorkload, outputs: Sequence[RequestOutput | None]) -> Group:
    """Question and answer so far of the first customers, and how many customers have their answers."""
    panels = []
    for position, output in enumerate(outputs[:NUM_STREAMED]):
        answer = "" if output is None else output.outputs[0].text.strip()
        text = Text.assemble((workload.chats[position][-1]["content"], "italic"), "\n", (answer or "…", "bold green"))
        title = f"{workload.customers[position]}, {workload.departments[position].lower()}"
        panels.append(Panel(text, title=title, title_align="left", border_style="dim"))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs if output is not None)
    done = sum(output is not None and output.finished for output in outputs)
    return Group(*panels, Text(f"{tokens} tokens answered, {done} of {len(outputs)} customers served", style="dim"))
