"""The engines that the scripts know, and the options that scripts share."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.engines import sglang, vllm
from benchmarks.engines.interface import Adapter, Start
from benchmarks.lib.options import need_gpu

ENGINES: Final[Mapping[str, Adapter]] = MappingProxyType({"vllm": vllm, "sglang": sglang})


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--engine."""
    parser.add_argument("--engine", choices=list(ENGINES), required=True, help="the engine to run")


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model and --device."""
    parser.add_argument("--model", type=Path, required=True, help="a folder with the config.json of a model")
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="only SGLang has cpu")


def parse(parser: argparse.ArgumentParser, given: Sequence[str] | None) -> tuple[Adapter, argparse.Namespace]:
    """The engine and the options; an option that the engine does not have is refused."""
    arguments = parser.parse_args(given)
    engine = ENGINES[arguments.engine]
    for name in engine.LACKS:
        if getattr(arguments, name, None) != parser.get_default(name):
            others = " and ".join(other for other, has in ENGINES.items() if name not in has.LACKS)
            option = name.replace("_", "-")
            parser.error(f"argument --{option}: {arguments.engine} has no such option: leave it out, or take {others}")
    if getattr(arguments, "model", None) and not (arguments.model / "config.json").is_file():
        parser.error(f"argument --model: {arguments.model} has no config.json")
    return engine, arguments


def need_device(engine: Adapter, device: str) -> None:
    """Ends the script where an engine's device is not there."""
    if device == "cuda":
        need_gpu("" if "device" in engine.LACKS else ", or --device cpu")


@contextmanager
def with_ports(engine: Adapter, starts: Sequence[Start]) -> Iterator[list[Start]]:
    """Starts with ports that no other command takes meanwhile."""
    with engine.own_ports(len(starts)) as ports:
        yield [start._replace(port=port) for start, port in zip(starts, ports, strict=True)] if ports else list(starts)


def card_name(device: str) -> str:
    """Name of the card, or cpu."""
    import torch

    return "cpu" if device == "cpu" or not torch.cuda.is_available() else torch.cuda.get_device_name()
