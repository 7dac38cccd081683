"""Options of the commands that predict: `trunkattn analyze` and `trunkattn explain`. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trunkattn.analysis.settings import ROUTES, Settings
from trunkattn.cli.options.from_dataclass import fields_of
from trunkattn.cli.options.kinds import (
    ENGINE,
    JSON_OPTION,
    OUTPUT,
    PREFIX_CACHING_OPTION,
    flag_option,
    integer,
    integer_option,
    number,
    parsed_option,
    size_option,
    text_option,
)
from trunkattn.names import FP8_CACHES
from trunkattn.validate import check_int

LOG, MODEL, FLEET = "Log", "Card and model", "Fleet"
_DEFAULT: Final = Settings()
_MODEL_HELP: Final = (
    "A built-in shape, such as llama-3-8b, or a config.json, or a folder that has one. For a name that does not exist "
    "the command lists the built-in ones."
)


def _log(text: str) -> Path:
    """The value of LOG as a path. Refuses an empty text, such as that of an unset variable: as a path it would mean the
    current folder, and every file in it would count as a prompt."""
    if not text:
        raise typer.BadParameter("'': expected a file, a folder, or - for standard input")
    return Path(text)


class Listed(tuple[Any, ...]):
    """Values of an option that takes a list, separated by commas."""


def _listed(parser: Callable[[str], Any]) -> Callable[[Any], Listed]:
    """The parser of an option that takes a list. Empty text is an empty list, and the default stays as it is."""

    def listed(text: Any) -> Listed:
        if isinstance(text, Listed):
            return text
        return Listed(parser(part) for part in text.split(",")) if text else Listed()

    return listed


_CONCURRENCIES, _RATES = Listed(_DEFAULT.concurrencies), Listed(_DEFAULT.rates)
CARD_OPTION: Final = text_option(MODEL, "A card that was measured, such as 'NVIDIA H100'.", "--gpu", metavar="NAME")
PARALLEL_OPTION: Final = integer_option(MODEL, "Cards that share each layer.", "--tp")
CACHE_DTYPE_OPTION: Final = parsed_option(
    MODEL,
    "Type of the KV cache: auto (16 bits), fp8 (also fp8_e4m3 or float8_e4m3fn), fp8_e5m2 (also float8_e5m2).",
    metavar="NAME",
    parser=lambda text: FP8_CACHES.get(text, text),
)


@dataclass(frozen=True)
class AnalyzeOptions:
    """Command line of `trunkattn analyze`. An option with the name of a field of `Settings` sets that field, which
    checks its value before anything large is loaded.

    Raises:
        TypeError, ValueError: `name=value: expected ...`, of the option with that name.
    """

    log: Annotated[
        Path,
        typer.Argument(
            parser=_log,
            metavar="LOG",
            help="A file of requests (JSON lines, a JSON array, CSV or Parquet; also gzip or Zstandard), a folder, or "
            "- for standard input.",
        ),
    ]
    log_format: Annotated[
        str,
        text_option(
            LOG,
            "The log's format; auto recognises it. For a name that does not exist the command lists all.",
            "--format",
            metavar="NAME",
        ),
    ] = "auto"
    tokenizer: Annotated[
        Path | None,
        text_option(
            LOG,
            "A tokenizer's folder, for logs with text. Default: an estimate from the bytes.",
            "--tokenizer",
            metavar="PATH",
        ),
    ] = None
    strict: Annotated[bool, flag_option(LOG, "--strict", "Stop at the first line that is wrong.")] = False
    output_tokens: Annotated[int, integer_option(LOG, "Tokens of an answer whose length the log does not say.")] = (
        _DEFAULT.output_tokens
    )
    max_requests: Annotated[
        int | None, integer_option(LOG, "Most requests of each replay but the first; 0: all of the log.")
    ] = _DEFAULT.max_requests
    find_spoilers: Annotated[
        bool,
        flag_option(LOG, "--find-spoilers/--no-find-spoilers", "Look for what keeps prompts from sharing more."),
    ] = _DEFAULT.find_spoilers
    card: Annotated[str, CARD_OPTION] = _DEFAULT.card
    model: Annotated[str, text_option(MODEL, _MODEL_HELP, metavar="NAME")] = _DEFAULT.model
    tensor_parallel: Annotated[int, PARALLEL_OPTION] = _DEFAULT.tensor_parallel
    kv_cache_dtype: Annotated[str, CACHE_DTYPE_OPTION] = _DEFAULT.kv_cache_dtype
    concurrencies: Annotated[
        Listed,
        parsed_option(
            ENGINE,
            "Replay with this many requests at a time. Several numbers: one replay each; an empty text: none.",
            "--concurrency",
            metavar="N,N,...",
            parser=_listed(integer),
        ),
    ] = _CONCURRENCIES
    rates: Annotated[
        Listed,
        parsed_option(
            ENGINE,
            "Replay with this many requests per second. Several numbers: one replay each.",
            "--rate",
            metavar="R,R,...",
            parser=_listed(number),
        ),
    ] = _RATES
    as_logged: Annotated[
        bool,
        flag_option(ENGINE, "--as-logged/--no-as-logged", "Replay the log's own times."),
    ] = _DEFAULT.as_logged
    max_num_seqs: Annotated[int, integer_option(ENGINE, "Most sequences at once where requests arrive by time.")] = (
        _DEFAULT.max_num_seqs
    )
    page_size: Annotated[int, integer_option(ENGINE, "Tokens per KV page.")] = _DEFAULT.page_size
    num_pages: Annotated[
        int | None, integer_option(ENGINE, "Pages of the KV cache. Default: what the card holds beside the weights.")
    ] = _DEFAULT.num_pages
    kv_cache_bytes: Annotated[
        int | None,
        size_option(
            ENGINE,
            "Bytes of the KV cache on all cards together, such as 40GiB, instead of --num-pages.",
            "--kv-cache-bytes",
            "--kv-memory",
        ),
    ] = _DEFAULT.kv_cache_bytes
    max_num_batched_tokens: Annotated[int, integer_option(ENGINE, "Most tokens of a step.")] = (
        _DEFAULT.max_num_batched_tokens
    )
    scheduler_policy: Annotated[
        str,
        text_option(ENGINE, "How the tokens of a step are shared out: chunked_prefill, prefill_first.", metavar="NAME"),
    ] = _DEFAULT.scheduler_policy
    enable_prefix_caching: Annotated[bool, PREFIX_CACHING_OPTION] = _DEFAULT.enable_prefix_caching
    seed: Annotated[int, integer_option(ENGINE, "Seed of the arrivals at a rate, and of random routes.")] = (
        _DEFAULT.seed
    )
    replicas: Annotated[int, integer_option(FLEET, "Engines among which requests are spread.")] = _DEFAULT.replicas
    route: Annotated[
        str | None,
        text_option(
            FLEET, f"How requests are spread: {', '.join(ROUTES)}. Default: each of them is replayed.", metavar="NAME"
        ),
    ] = _DEFAULT.route
    json_file: Annotated[
        Path | None, text_option(OUTPUT, "Write the analysis as JSON; -: to standard output.", "--json", metavar="FILE")
    ] = None
    html_file: Annotated[
        Path | None,
        text_option(OUTPUT, "Write a report, one HTML file that needs no network.", "--html", metavar="FILE"),
    ] = None
    show_text: Annotated[
        bool,
        flag_option(OUTPUT, "--show-text", "Put texts of the log into the output, which has none otherwise."),
    ] = False

    def __post_init__(self) -> None:
        check_int("max_requests", self.max_requests or 0, at_least=0)
        self.settings()

    def settings(self) -> Settings:
        """The settings that these options name."""
        given = fields_of(Settings, self)
        return Settings(**{**given, "max_requests": self.max_requests or None})


@dataclass(frozen=True)
class ExplainOptions:
    """Command line of `trunkattn explain`. Values are checked as those of `AnalyzeOptions` are."""

    batch: Annotated[
        str,
        typer.Argument(
            metavar="BATCH",
            help="A tree such as 1,4,64_1024,512,128 (nodes of each level _ tokens of each), or a file: .json or .npz "
            "with block_table, seq_lens and page_size.",
        ),
    ]
    card: Annotated[str, CARD_OPTION] = _DEFAULT.card
    model: Annotated[str, text_option(MODEL, _MODEL_HELP, metavar="NAME")] = _DEFAULT.model
    tensor_parallel: Annotated[int, PARALLEL_OPTION] = _DEFAULT.tensor_parallel
    kv_cache_dtype: Annotated[str, CACHE_DTYPE_OPTION] = _DEFAULT.kv_cache_dtype
    page_size: Annotated[
        int | None, integer_option(ENGINE, "Tokens per KV page. Default: the file's; of a tree, 16 or less.")
    ] = None
    as_json: Annotated[bool, JSON_OPTION] = False
    svg_file: Annotated[
        Path | None, text_option(OUTPUT, "Draw the forest as SVG; -: to standard output.", "--svg", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        Settings(**{name: value for name, value in fields_of(Settings, self).items() if value is not None})
