"""Options of the commands: dataclasses from which typer makes a command line. No torch here."""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trunkattn.cli.command import fields_of
from trunkattn.engine.config import DTYPES, EngineConfig, check_scheduler_policy
from trunkattn.names import POLICIES
from trunkattn.validate import check_int

if TYPE_CHECKING:
    from trunkattn.engine import SamplingParams, StructuredOutputsParams

SAMPLING, ENGINE, SERVER, OUTPUT = "Sampling", "Engine", "Server", "Output"
JSON_OPTION = typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
UNITS: Final = MappingProxyType(
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
)
MOST_THREADS = 4096
STEP_SECONDS: Final = 0.25  # of a server's step; with what else it waits for, a stream pauses for less than twice that
LEAST_DEMO_TOKENS = 8  # with fewer no step has every customer decoding


def integer(text: str) -> int:
    """An option's value as an integer. The library checks its range."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected an integer") from None


def number(text: str) -> float:
    """An option's value as a number. The library checks its range."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a number") from None


def size(value: str | int) -> int:
    """An option's value, or its default, as a number of bytes. The library checks its range."""
    text = str(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text.strip())
    if match is None or match[2].lower() not in UNITS:
        raise typer.BadParameter(f"{text!r}: expected bytes, such as 2GiB, 512MiB or 2147483648")
    return int(Fraction(match[1]) * UNITS[match[2].lower()])


def _integer(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, parser=integer, metavar="INTEGER", help=text, rich_help_panel=panel)


def _size(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, parser=size, metavar="SIZE", help=text, rich_help_panel=panel)


def _number(panel: str, text: str) -> Any:
    return typer.Option(parser=number, metavar="NUMBER", help=text, rich_help_panel=panel)


def _text(panel: str, text: str, metavar: str = "TEXT") -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel)


def _flag(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class DoctorOptions:
    """Command line of `trunkattn doctor`."""

    as_json: Annotated[bool, JSON_OPTION] = False


@dataclass(frozen=True)
class DemoOptions:
    """Command line of `trunkattn demo`. Raises ValueError for too few tokens; the engine checks the page size."""

    max_tokens: Annotated[int, _integer(SAMPLING, f"Most tokens of an answer, at least {LEAST_DEMO_TOKENS}.")] = 64
    page_size: Annotated[int, _integer(ENGINE, "Tokens per KV page.")] = 8
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The folder for the forest's picture.", rich_help_panel=OUTPUT)
    ] = Path("out")
    as_json: Annotated[bool, JSON_OPTION] = False

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, LEAST_DEMO_TOKENS)


@dataclass(frozen=True)
class EngineOptions:
    """Options of every command that loads a model. An option with the name of a field of `EngineConfig` sets that
    field, which checks its value before torch is loaded. The model is given as an argument or as an option.

    Raises:
        TypeError, ValueError: `name=value: expected ...`, of the option with that name.
    """

    model: Annotated[
        Path,
        typer.Option(metavar="PATH", help="The same as MODEL."),
    ]
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"How shared prefixes are packed: {', '.join(POLICIES)}. per_query shares nothing, auto chooses the "
            "cheapest packing. The policy changes the speed, not the answers.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    page_size: Annotated[int, _integer(ENGINE, "Tokens per KV page.")] = 16
    max_num_seqs: Annotated[int, _integer(ENGINE, "Most answers that run at once; the others wait.")] = 256
    max_num_batched_tokens: Annotated[
        int, _integer(ENGINE, "Most tokens of a step, at least --max-num-seqs. Fewer: steadier times between tokens.")
    ] = 2048
    scheduler_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the tokens of a step are shared out: chunked_prefill, prefill_first. chunked_prefill (older "
            "name: hybrid) computes long prompts in chunks together with the running answers; prefill_first computes "
            "whole prompts while the running answers stall.",
            rich_help_panel=ENGINE,
        ),
    ] = "chunked_prefill"
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where the model runs: auto (a GPU if there is one, else the CPU), cpu, cuda, or one GPU such as "
            "cuda:1.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Type of the weights: {', '.join(DTYPES)}. auto: float32 on a CPU, the model's own on a GPU.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    threads: Annotated[
        int | None, _integer(ENGINE, "Threads that compute on the CPU. Default: OMP_NUM_THREADS, or one a core.")
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep the KV pages of prompts, and use them again for prompts that begin alike.",
            rich_help_panel=ENGINE,
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float | None,
        _number(ENGINE, "The KV cache's share of the GPU's free memory. Default: 0.9."),
    ] = None
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Capture no CUDA graphs on a GPU.", rich_help_panel=ENGINE),
    ] = False
    max_model_len: Annotated[
        int | None,
        _integer(ENGINE, "Most tokens of a sequence. Default: the lower of the model's and the cache's limit."),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        _size(
            ENGINE,
            "Bytes of the KV cache, such as 2GiB. Default: 1 GiB on a CPU.",
            "--kv-cache-bytes",
            "--kv-cache-memory-bytes",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Type of the KV cache: auto (that of the weights), fp8 (also fp8_e4m3), fp8_e5m2.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        _text(
            ENGINE,
            "int8: round the weights of linear layers on a CPU, so that a token reads a quarter of the bytes.",
            "NAME",
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="An answer's bits do not depend on the other requests.", rich_help_panel=ENGINE
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python that the model's folder brings.", rich_help_panel=ENGINE),
    ] = False

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_int("threads", self.threads, 1, MOST_THREADS)
        EngineConfig(**fields_of(EngineConfig, self))


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled. An option with the name of a field of `SamplingParams` sets that field, which checks its
    value; `sampling_params` makes the others. The names are vLLM's.
    """

    max_tokens: Annotated[int, _integer(SAMPLING, "Most tokens of an answer.")] = 128
    temperature: Annotated[
        float, _number(SAMPLING, "0: always the most likely token. 1: sample from the model's own distribution.")
    ] = 0.0
    top_p: Annotated[
        float, _number(SAMPLING, "Keep the fewest most likely tokens whose probabilities sum to this.")
    ] = 1.0
    top_k: Annotated[int, _integer(SAMPLING, "Keep this many most likely tokens; 0 keeps all.")] = 0
    min_p: Annotated[
        float, _number(SAMPLING, "Drop tokens less likely than this share of the most likely one's probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, _number(SAMPLING, "Above 1: make tokens of the prompt and the answer less likely.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _number(SAMPLING, "From -2 to 2: taken from the logits of tokens that the answer has.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _number(SAMPLING, "From -2 to 2: taken as many times as the answer has the token.")
    ] = 0.0
    n: Annotated[int, _integer(SAMPLING, "Answers per prompt; the prompt is computed once.", "--n", "-n")] = 1
    seed: Annotated[int | None, _integer(SAMPLING, "The same seed gives the same answers.")] = None
    min_tokens: Annotated[int, _integer(SAMPLING, "Nothing ends an answer before this many tokens.")] = 0
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A text that ends an answer. Repeat the option for more.", rich_help_panel=SAMPLING
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, _flag(SAMPLING, "--include-stop-str-in-output", "Keep the text that ended an answer.")
    ] = False
    bad_words: Annotated[
        list[str] | None, _text(SAMPLING, "A text that no answer has. Repeat the option for more.")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _text(
            SAMPLING, "ID=NUMBER: add the number to the logit of a token id. Repeat the option for more.", "ID=NUMBER"
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            parser=integer, metavar="ID", help="The only token ids of an answer. Repeat it.", rich_help_panel=SAMPLING
        ),
    ] = None
    logprobs: Annotated[
        int | None, _integer(SAMPLING, "Report the log-probabilities of this many most likely tokens at each step.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, _integer(SAMPLING, "With --json: the same for each token of the prompt.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, _integer(SAMPLING, "Keep this many last tokens of a prompt; -1: as many as the model accepts.")
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.", rich_help_panel=SAMPLING),
    ] = False
    keep_special_tokens: Annotated[
        bool, _flag(SAMPLING, "--keep-special-tokens", "Show special tokens in the text.")
    ] = False
    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A file with a JSON schema that answers follow.", rich_help_panel=SAMPLING),
    ] = None
    regex: Annotated[str | None, _text(SAMPLING, "A regular expression that answers match.")] = None
    choice: Annotated[list[str] | None, _text(SAMPLING, "An answer to choose from. Repeat the option for more.")] = None
    grammar: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A file with a Lark grammar that answers follow.", rich_help_panel=SAMPLING),
    ] = None

    def sampling_params(self) -> "SamplingParams":
        """The parameters of these options.

        Raises:
            TypeError, ValueError: `name=value: expected ...`, of the option with that name.
        """
        from trunkattn.engine import SamplingParams, StructuredOutputsParams

        given = fields_of(SamplingParams, self)
        given["logit_bias"] = _biases(self.logit_bias) if self.logit_bias else None
        forms = {
            "json": _read("json_schema", self.json_schema),
            "regex": self.regex,
            "choice": self.choice,
            "grammar": _read("grammar", self.grammar),
        }
        forms = {name: form for name, form in forms.items() if form is not None}
        if forms:
            given["structured_outputs"] = form = StructuredOutputsParams(**forms)  # type: ignore[arg-type]
            _check_form(form)
        return SamplingParams(**given, skip_special_tokens=not self.keep_special_tokens)


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions, EngineOptions):
    """Command line of `trunkattn generate`."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A prompt. Repeat the option for more: a shared prefix is read once."),
    ] = None
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A UTF-8 text file with one prompt; -: standard input. Repeat it for more."),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put each prompt into the model's chat template, or leave it as it is. Default: --chat if the model "
            "has a template.",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, JSON_OPTION] = False


def _biases(texts: list[str]) -> dict[int, float]:
    """Texts of ID=NUMBER as numbers by token id."""
    found: dict[int, float] = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise ValueError(f"logit_bias={text!r}: expected ID=NUMBER, such as 42=-1.5") from None
        if number in found:
            raise ValueError(f"logit_bias={text!r}: expected each token id once")
        found[number] = value
    return found


def _check_form(form: "StructuredOutputsParams") -> None:
    """Raises ValueError, of the option that gave it, if a form of answers cannot be compiled."""
    from trunkattn.engine.form_grammar import check_grammar
    from trunkattn.engine.form_limits import FormLimits

    try:
        check_grammar(form, FormLimits())
    except ValueError as error:
        message = re.sub(r"^structured_outputs(: |\.)", "", str(error))
        raise ValueError(re.sub(r"^json\b", "json_schema", message)) from error


def _read(name: str, path: Path | None) -> str | None:
    """The text of an option's file."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}={str(path)!r}: expected a UTF-8 text file ({error})") from error


def _texts(panel: str, text: str, metavar: str = "TEXT") -> Any:
    return typer.Option(metavar=metavar, help=f"{text} Repeat the option for more.", rich_help_panel=panel)


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """Command line of `trunkattn serve`. An option with the name of a field of `ServerOptions` sets that field."""

    max_step_seconds: Annotated[
        float | None,
        _number(
            ENGINE,
            "How long a step should take at most: while steps take longer, prompts get fewer tokens and no more "
            f"answers start, so that running ones do not pause for long. Default: {STEP_SECONDS} with chunked_prefill.",
        ),
    ] = None
    host: Annotated[
        str, typer.Option(metavar="NAME", help="Where to listen; 0.0.0.0: on every network.", rich_help_panel=SERVER)
    ] = "127.0.0.1"
    port: Annotated[int, _integer(SERVER, "The port; 0: any free one.")] = 8000
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model. Default: the name of its folder or file.",
            rich_help_panel=SERVER,
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="TRUNKATTN_API_KEY",
            help="A key that requests must carry. Each key is a tenant with cached prefixes of its own. Repeat the "
            "option for more.",
            rich_help_panel=SERVER,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _texts(SERVER, "A name by which clients may call the server, beside its addresses and localhost.", "NAME"),
    ] = None
    allowed_origin: Annotated[
        list[str] | None, _texts(SERVER, "An origin whose web pages may call the server (CORS).", "ORIGIN")
    ] = None
    max_waiting: Annotated[int, _integer(SERVER, "Requests that may wait; one more is answered with 429.")] = 1024
    max_body_bytes: Annotated[int, _size(SERVER, "Most bytes of a request's body, such as 16MiB.")] = 16 << 20
    max_answers: Annotated[int, _integer(SERVER, "Most answers of one request.")] = 128
    max_prompt_tokens: Annotated[int | None, _integer(SERVER, "Most tokens of a prompt.")] = None
    max_answer_tokens: Annotated[int | None, _integer(SERVER, "Most tokens of an answer.")] = None
    shutdown_seconds: Annotated[float, _number(SERVER, "How long running answers may take to end after SIGTERM.")] = (
        30.0
    )
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model writes tool calls: hermes, llama3_json, mistral.",
            rich_help_panel=SERVER,
        ),
    ] = "hermes"
    strict_requests: Annotated[
        bool, _flag(SERVER, "--strict-requests", "Refuse every field of a request that does not exist.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Log no requests.", rich_help_panel=SERVER)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = check_scheduler_policy("scheduler_policy", self.scheduler_policy)
        if self.max_step_seconds is None and policy == "chunked_prefill":
            object.__setattr__(self, "max_step_seconds", STEP_SECONDS)
