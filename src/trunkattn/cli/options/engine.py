"""Options of the commands that run a model: dataclasses from which typer makes a command line. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from trunkattn.cli.options.from_dataclass import fields_of
from trunkattn.cli.options.kinds import (
    ENGINE,
    JSON_OPTION,
    OUTPUT,
    PREFIX_CACHING_OPTION,
    SAMPLING,
    SERVER,
    flag_option,
    integer_option,
    local_model,
    number_option,
    parsed_option,
    size_option,
    text_option,
    texts_option,
)
from trunkattn.cli.options.sampling import SamplingOptions
from trunkattn.engine.config import DTYPES, EngineConfig, check_scheduler_policy
from trunkattn.names import POLICIES
from trunkattn.validate import check_int

MOST_THREADS = 4096
STEP_SECONDS: Final = 0.15  # of a server's step; a stream pauses for longer by what else it waits for
LEAST_DEMO_TOKENS = 8  # with fewer no step has every customer decoding


@dataclass(frozen=True)
class DoctorOptions:
    """Command line of `trunkattn doctor`."""

    as_json: Annotated[bool, JSON_OPTION] = False


@dataclass(frozen=True)
class DemoOptions:
    """Command line of `trunkattn demo`. Raises ValueError for a number that is too small."""

    max_tokens: Annotated[int, integer_option(SAMPLING, f"Most tokens of an answer, at least {LEAST_DEMO_TOKENS}.")] = (
        64
    )
    page_size: Annotated[int, integer_option(ENGINE, "Tokens per KV page.")] = 8
    out: Annotated[Path, text_option(OUTPUT, "The folder for the forest's picture.", metavar="FOLDER")] = Path("out")
    as_json: Annotated[bool, JSON_OPTION] = False

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, LEAST_DEMO_TOKENS)
        check_int("page_size", self.page_size, at_least=1)


@dataclass(frozen=True)
class EngineOptions:
    """Options of every command that loads a model. An option with the name of a field of `EngineConfig` sets that
    field, which checks its value before torch is loaded. The model is given as an argument or as an option.

    Raises:
        TypeError, ValueError: `name=value: expected ...`, of the option with that name.
    """

    model: Annotated[
        Path,
        parsed_option(None, "The same as MODEL.", metavar="PATH", parser=local_model),
    ]
    policy: Annotated[
        str,
        text_option(
            ENGINE,
            f"How shared prefixes are packed: {', '.join(POLICIES)}. per_query shares nothing, auto chooses the "
            "cheapest packing. The policy changes the speed, not the answers.",
            metavar="NAME",
        ),
    ] = "auto"
    page_size: Annotated[int, integer_option(ENGINE, "Tokens per KV page.")] = 16
    max_num_seqs: Annotated[int, integer_option(ENGINE, "Most answers that run at once; the others wait.")] = 256
    max_num_batched_tokens: Annotated[
        int,
        integer_option(ENGINE, "Most tokens of a step, at least --max-num-seqs. Fewer: steadier times between tokens."),
    ] = 2048
    scheduler_policy: Annotated[
        str,
        text_option(
            ENGINE,
            "How the tokens of a step are shared out: chunked_prefill, prefill_first. chunked_prefill (older "
            "name: hybrid) computes long prompts in chunks together with the running answers; prefill_first computes "
            "whole prompts while the running answers stall.",
            metavar="NAME",
        ),
    ] = "chunked_prefill"
    device: Annotated[
        str,
        text_option(
            ENGINE,
            "Where the model runs: auto (a GPU if there is one, else the CPU), cpu, cuda, or one GPU such as cuda:1.",
            metavar="NAME",
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        text_option(
            ENGINE,
            f"Type of the weights: {', '.join(DTYPES)}. auto: float32 on a CPU, the model's own on a GPU.",
            metavar="NAME",
        ),
    ] = "auto"
    threads: Annotated[
        int | None, integer_option(ENGINE, "Threads that compute on the CPU. Default: OMP_NUM_THREADS, or one a core.")
    ] = None
    enable_prefix_caching: Annotated[bool, PREFIX_CACHING_OPTION] = True
    gpu_memory_utilization: Annotated[
        float | None,
        number_option(ENGINE, "The KV cache's share of the GPU's free memory. Default: 0.9."),
    ] = None
    enforce_eager: Annotated[
        bool,
        flag_option(ENGINE, "--enforce-eager", "Capture no CUDA graphs on a GPU."),
    ] = False
    max_model_len: Annotated[
        int | None,
        integer_option(ENGINE, "Most tokens of a sequence. Default: the lower of the model's and the cache's limit."),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        size_option(
            ENGINE,
            "Bytes of the KV cache, such as 2GiB. Default: 1 GiB on a CPU.",
            "--kv-cache-bytes",
            "--kv-cache-memory-bytes",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        text_option(
            ENGINE, "Type of the KV cache: auto (that of the weights), fp8 (also fp8_e4m3), fp8_e5m2.", metavar="NAME"
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        text_option(
            ENGINE,
            "int8: round the weights of linear layers on a CPU, so that a token reads a quarter of the bytes.",
            metavar="NAME",
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        flag_option(ENGINE, "--batch-invariant", "An answer's bits do not depend on the other requests."),
    ] = False
    trust_remote_code: Annotated[
        bool,
        flag_option(ENGINE, "--trust-remote-code", "Run Python that the model's folder brings."),
    ] = False

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_int("threads", self.threads, 1, MOST_THREADS)
        EngineConfig(**fields_of(EngineConfig, self))


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions, EngineOptions):
    """Command line of `trunkattn generate`."""

    prompt: Annotated[
        list[str] | None,
        text_option(None, "A prompt. Repeat the option for more: a shared prefix is read once.", metavar="TEXT"),
    ] = None
    prompt_file: Annotated[
        list[Path] | None,
        text_option(None, "A UTF-8 text file with one prompt; -: standard input. Repeat it for more.", metavar="PATH"),
    ] = None
    chat: Annotated[
        bool | None,
        flag_option(
            None,
            "--chat/--no-chat",
            "Put each prompt into the model's chat template, or leave it as it is. Default: --chat if the model "
            "has a template.",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, JSON_OPTION] = False


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """Command line of `trunkattn serve`. An option with the name of a field of `ServerOptions` sets that field."""

    max_step_seconds: Annotated[
        float | None,
        number_option(
            ENGINE,
            "How long a step should take at most: while steps take longer, prompts get fewer tokens and no more "
            f"answers start, so that running ones do not pause for long. Default: {STEP_SECONDS} with chunked_prefill.",
        ),
    ] = None
    host: Annotated[str, text_option(SERVER, "Where to listen; 0.0.0.0: on every network.", metavar="NAME")] = (
        "127.0.0.1"
    )
    port: Annotated[int, integer_option(SERVER, "The port; 0: any free one.")] = 8000
    served_model_name: Annotated[
        str | None,
        text_option(SERVER, "What requests call the model. Default: the name of its folder or file.", metavar="NAME"),
    ] = None
    api_key: Annotated[
        list[str] | None,
        texts_option(
            SERVER,
            "A key that requests must carry. Each key is a tenant with cached prefixes of its own.",
            metavar="KEY",
            envvar="TRUNKATTN_API_KEY",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        texts_option(
            SERVER, "A name by which clients may call the server, beside its addresses and localhost.", metavar="NAME"
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        texts_option(SERVER, "An origin whose web pages may call the server (CORS).", metavar="ORIGIN"),
    ] = None
    max_waiting: Annotated[int, integer_option(SERVER, "Requests that may wait; one more is answered with 429.")] = 1024
    max_body_bytes: Annotated[int, size_option(SERVER, "Most bytes of a request's body, such as 16MiB.")] = 16 << 20
    max_answers: Annotated[int, integer_option(SERVER, "Most answers of one request.")] = 128
    max_prompt_tokens: Annotated[int | None, integer_option(SERVER, "Most tokens of a prompt.")] = None
    max_answer_tokens: Annotated[int | None, integer_option(SERVER, "Most tokens of an answer.")] = None
    shutdown_seconds: Annotated[
        float, number_option(SERVER, "How long running answers may take to end after SIGTERM, Ctrl+C or SIGHUP.")
    ] = 30.0
    timeout_keep_alive: Annotated[
        float,
        number_option(
            SERVER,
            "Seconds that a connection stays open between two requests: more than a proxy in front keeps it for.",
        ),
    ] = 75.0
    tool_call_parser: Annotated[
        str,
        text_option(SERVER, "How the model writes tool calls: hermes, llama3_json, mistral.", metavar="NAME"),
    ] = "hermes"
    strict_requests: Annotated[
        bool, flag_option(SERVER, "--strict-requests", "Refuse every field of a request that does not exist.")
    ] = False
    quiet: Annotated[bool, flag_option(SERVER, "--quiet", "Log no requests.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = check_scheduler_policy("scheduler_policy", self.scheduler_policy)
        if self.max_step_seconds is None and policy == "chunked_prefill":
            object.__setattr__(self, "max_step_seconds", STEP_SECONDS)
