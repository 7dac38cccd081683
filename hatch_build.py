"""README.md as a package index shows it, where neither the repository's files nor its pictures lie beside it.

With a `Repository` among `[project.urls]`, relative links and pictures point there. Without one, a relative link
becomes plain text and a picture is left out, so that nothing on the page is broken.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r'<img src="(?!https?:)(?P<path>[^"]+)"(?P<rest>[^>]*)>\n*')
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!https?:|#)(?P<path>[^)]+)\)")


def standalone(readme: str, repository: str | None) -> str:
    """The README with absolute links, or without those that would be relative."""
    if repository is None:
        return _LINK.sub(r"\g<text>", _PICTURE.sub("", readme))
    base = repository.rstrip("/")
    readme = _PICTURE.sub(rf'<img src="{base}/raw/main/\g<path>"\g<rest>>\n\n', readme)
    return _LINK.sub(rf"[\g<text>]({base}/blob/main/\g<path>)", readme)


class ReadmeHook(MetadataHookInterface):
    """Fills the dynamic field `readme`."""

    def update(self, metadata: dict) -> None:
        urls = {name.lower(): url for name, url in metadata.get("urls", {}).items()}
        text = standalone((Path(self.root) / "README.md").read_text(encoding="utf-8"), urls.get("repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
