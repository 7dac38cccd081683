"""The versions of an engine that its plug-in is tested with."""

from typing import NamedTuple

from packaging.version import InvalidVersion, Version


class VersionRange(NamedTuple):
    """The versions from `oldest` to `newest`, both included. Only as many numbers count as these two have.

    Example:
        >>> tested = VersionRange("vLLM", (0, 26), (0, 33))
        >>> str(tested), tested.parse("0.32.0+cpu")
        ('0.26 to 0.33', (0, 32))
    """

    engine: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]

    def __str__(self) -> str:
        """The range in words."""
        return f"{'.'.join(map(str, self.oldest))} to {'.'.join(map(str, self.newest))}"

    def parse(self, version: str) -> tuple[int, ...] | None:
        """The first numbers of a release; None for any other build ("dev", "0.1.dev1+g0abc", "main")."""
        try:
            found = Version(version)
        except InvalidVersion:
            return None
        count = len(self.oldest)
        if found.is_devrelease and len(found.release) <= count:
            return None  # a build on the way to this release
        return found.release[:count]

    def caution(self, version: str) -> str | None:
        """A warning about a version; None if it is tested."""
        release = self.parse(version)
        if release is not None and self.oldest <= release <= self.newest:
            return None
        return (
            f"{self.engine} {version} is not a version that TrunkAttention is tested with ({self}): compare outputs "
            "with another attention back end, or look for a newer trunkattn"
        )
