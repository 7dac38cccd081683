"""The guide to `trunkattn analyze` names every field of what `--json` writes, and has the figures of its results."""

import json
import re
from dataclasses import fields
from pathlib import Path

from trunkattn.analysis.records import Analysis

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/analyze.md").read_text()


def test_every_field_of_the_json_is_named() -> None:
    paragraph = next(text for text in PAGE.split("\n\n") if "`--json FILE`" in text)
    assert not {field.name for field in fields(Analysis)} - set(re.findall(r"`(\w+)`", paragraph))


def test_time_and_memory_of_large_logs_are_those_of_the_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/analyze-large.json").read_text())
    hashes, texts = result["rows"]
    assert (hashes["kind"], texts["kind"], result["cores"]) == ("hashes", "text", 2)
    took = [f"{row['seconds'] / 60:.1f} minutes and {row['peak_gb']:.1f} GB" for row in (hashes, texts)]
    text = " ".join(PAGE.split())
    assert f"{hashes['requests']:,} requests of 4k tokens take {took[0]} of memory from hashes" in text
    assert f"and {took[1]} from {texts['log_gb']:.2f} GB of texts, on two cores" in text
