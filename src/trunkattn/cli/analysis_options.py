"""Options of the commands that predict: `trunkattn analyze` and `trunkattn explain`. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trunkattn.analysis.settings import ROUTES, Settings
from trunkattn.cli.command import fields_of
from trunkattn.cli.options import OUTPUT, integer, number, size
from trunkattn.names import FP8_CACHES
from trunkattn.validate import check_int

LOG, MODEL, ENGINE, FLEET = "Log", "Card and model", "Engine", "Fleet"
_DEFAULT: Final = Settings()
_MODEL_HELP: Final = (
    "A built-in shape, such as llama-3-8b, or a config.json, or a folder that has one. For a name that does not exist "
    "the command lists the built-in ones."
)


def _parsed(parser: Callable[[str], Any], metavar: str, panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, parser=parser, metavar=metavar, help=text, rich_help_panel=panel)


def _integer(panel: str, text: str, *names: str) -> Any:
    return _parsed(integer, "INTEGER", panel, text, *names)


def _log(text: str) -> Path:
    """The value of LOG as a path. An empty text, which a variable without a value gives, would be the current folder,
    all of whose files would be prompts."""
    if not text:
        raise typer.BadParameter("'': expected a file, a folder, or - for standard input")
    return Path(text)


def _text(panel: str, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel)


class Listed(tuple[Any, ...]):
    """Values of an option that takes several, with commas between them."""


def _listed(parser: Callable[[str], Any]) -> Callable[[Any], Listed]:
    """The parser of such an option, which leaves its default as it is. No text at all stands for no value."""

    def listed(text: Any) -> Listed:
        if isinstance(text, Listed):
            return text
        return Listed(parser(part) for part in text.split(",")) if text else Listed()

    return listed


_CONCURRENCIES, _RATES = Listed(_DEFAULT.concurrencies), Listed(_DEFAULT.rates)
CARD_OPTION: Final = _text(MODEL, "NAME", "A card that was measured, such as 'NVIDIA H100'.", "--gpu")
PARALLEL_OPTION: Final = _integer(MODEL, "Cards that share each layer.", "--tp")
CACHE_DTYPE_OPTION: Final = _parsed(
    lambda text: FP8_CACHES.get(text, text),  # as on the command lines that a user copies
    "NAME",
    MODEL,
    "Type of the KV cache: auto (16 bits), fp8 (also fp8_e4m3 or float8_e4m3fn), fp8_e5m2 (also float8_e5m2).",
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
        _text(
            LOG,
            "NAME",
            "The log's format; auto recognises it. For a name that does not exist the command lists all.",
            "--format",
        ),
    ] = "auto"
    tokenizer: Annotated[
        Path | None,
        _text(
            LOG, "PATH", "A tokenizer's folder, for logs with text. Default: an estimate from the bytes.", "--tokenizer"
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first line that is wrong.", rich_help_panel=LOG)
    ] = False
    output_tokens: Annotated[int, _integer(LOG, "Tokens of an answer whose length the log does not say.")] = (
        _DEFAULT.output_tokens
    )
    max_requests: Annotated[
        int | None, _integer(LOG, "Most requests of each replay but the first; 0: all of the log.")
    ] = _DEFAULT.max_requests
    find_spoilers: Annotated[
        bool,
        typer.Option(
            "--find-spoilers/--no-find-spoilers",
            help="Look for what keeps prompts from sharing more.",
            rich_help_panel=LOG,
        ),
    ] = _DEFAULT.find_spoilers
    card: Annotated[str, CARD_OPTION] = _DEFAULT.card
    model: Annotated[str, _text(MODEL, "NAME", _MODEL_HELP)] = _DEFAULT.model
    tensor_parallel: Annotated[int, PARALLEL_OPTION] = _DEFAULT.tensor_parallel
    kv_cache_dtype: Annotated[str, CACHE_DTYPE_OPTION] = _DEFAULT.kv_cache_dtype
    concurrencies: Annotated[
        Listed,
        _parsed(
            _listed(integer),
            "N,N,...",
            ENGINE,
            "Replay with this many requests at a time. Several numbers: one replay each; an empty text: none.",
            "--concurrency",
        ),
    ] = _CONCURRENCIES
    rates: Annotated[
        Listed,
        _parsed(
            _listed(number),
            "R,R,...",
            ENGINE,
            "Replay with this many requests per second. Several numbers: one replay each.",
            "--rate",
        ),
    ] = _RATES
    as_logged: Annotated[
        bool,
        typer.Option("--as-logged/--no-as-logged", help="Replay the log's own times.", rich_help_panel=ENGINE),
    ] = _DEFAULT.as_logged
    max_num_seqs: Annotated[int, _integer(ENGINE, "Most sequences at once where requests arrive by time.")] = (
        _DEFAULT.max_num_seqs
    )
    page_size: Annotated[int, _integer(ENGINE, "Tokens per KV page.")] = _DEFAULT.page_size
    num_pages: Annotated[
        int | None, _integer(ENGINE, "Pages of the KV cache. Default: what the card holds beside the weights.")
    ] = _DEFAULT.num_pages
    kv_cache_bytes: Annotated[
        int | None,
        _parsed(
            size,
            "SIZE",
            ENGINE,
            "Bytes of the KV cache on all cards together, such as 40GiB, instead of --num-pages.",
            "--kv-cache-bytes",
            "--kv-memory",
        ),
    ] = _DEFAULT.kv_cache_bytes
    max_num_batched_tokens: Annotated[int, _integer(ENGINE, "Most tokens of a step.")] = _DEFAULT.max_num_batched_tokens
    scheduler_policy: Annotated[
        str, _text(ENGINE, "NAME", "How the tokens of a step are shared out: chunked_prefill, prefill_first.")
    ] = _DEFAULT.scheduler_policy
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep the KV pages of prompts, and use them again for prompts that begin alike.",
            rich_help_panel=ENGINE,
        ),
    ] = _DEFAULT.enable_prefix_caching
    seed: Annotated[int, _integer(ENGINE, "Seed of the arrivals at a rate, and of random routes.")] = _DEFAULT.seed
    replicas: Annotated[int, _integer(FLEET, "Engines among which requests are spread.")] = _DEFAULT.replicas
    route: Annotated[
        str | None,
        _text(FLEET, "NAME", f"How requests are spread: {', '.join(ROUTES)}. Default: each of them is replayed."),
    ] = _DEFAULT.route
    json_file: Annotated[
        Path | None, _text(OUTPUT, "FILE", "Write the analysis as JSON; -: to standard output.", "--json")
    ] = None
    html_file: Annotated[
        Path | None, _text(OUTPUT, "FILE", "Write a report, one HTML file that needs no network.", "--html")
    ] = None
    show_text: Annotated[
        bool,
        typer.Option(
            "--show-text",
            help="Put texts of the log into the output, which has none otherwise.",
            rich_help_panel=OUTPUT,
        ),
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
    model: Annotated[str, _text(MODEL, "NAME", _MODEL_HELP)] = _DEFAULT.model
    tensor_parallel: Annotated[int, PARALLEL_OPTION] = _DEFAULT.tensor_parallel
    kv_cache_dtype: Annotated[str, CACHE_DTYPE_OPTION] = _DEFAULT.kv_cache_dtype
    page_size: Annotated[
        int | None, _integer(ENGINE, "Tokens per KV page. Default: the file's; of a tree, 16 or less.")
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
    ] = False
    svg_file: Annotated[
        Path | None, _text(OUTPUT, "FILE", "Draw the forest as SVG; -: to standard output.", "--svg")
    ] = None

    def __post_init__(self) -> None:
        Settings(**{name: value for name, value in fields_of(Settings, self).items() if value is not None})
