"""The guide to `trunkattn analyze` names every field of what `--json` writes."""

import re
from dataclasses import fields
from pathlib import Path

from trunkattn.analysis.records import Analysis

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/analyze.md").read_text()


def test_every_field_of_the_json_is_named() -> None:
    paragraph = next(text for text in PAGE.split("\n\n") if "`--json FILE`" in text)
    assert not {field.name for field in fields(Analysis)} - set(re.findall(r"`(\w+)`", paragraph))
