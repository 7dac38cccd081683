"""What the documentation site takes from elsewhere: the repository's address; what its search leaves out; and options
that stay whole."""

import re
from pathlib import Path
from typing import Any, Final

import tomllib

_CODE: Final = re.compile(r"<code\b.*?</code>", re.DOTALL)
_TAG_OR_OPTION: Final = re.compile(r"(<[^>]*>)|(?<![\w-])(--[a-z]\w*)")


def repository_of(pyproject: str) -> str | None:
    """The `Repository` among `[project.urls]` of a pyproject.toml's text; None: it names none."""
    urls = tomllib.loads(pyproject)["project"].get("urls", {})
    return {name.lower(): url for name, url in urls.items()}.get("repository")


def on_config(config: Any) -> Any:
    """The configuration with a link to the repository, if pyproject.toml names one."""
    repository = repository_of((Path(__file__).parent / "pyproject.toml").read_text(encoding="utf-8"))
    if repository:
        config.repo_url, config.repo_name = repository, repository.rstrip("/").rsplit("/", 1)[-1]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as it is; lab notes are kept out of the search, because they say what was true on their day."""
    if page.file.src_uri.startswith("lab/") and page.file.src_uri != "lab/index.md":
        page.meta["search"] = {"exclude": True}
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """The page with options in spans that do not wrap: a line would end after their first dash."""

    def in_span(found: re.Match[str]) -> str:
        return found[1] or f'<span class="option">{found[2]}</span>'

    return _CODE.sub(lambda code: _TAG_OR_OPTION.sub(in_span, code[0]), html)
