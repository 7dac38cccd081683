"""Finds the request that makes a step fail: the requests of a failed step are computed again in ever smaller groups."""

from collections import deque
from collections.abc import Container, Iterable


class Suspects:
    """Requests of steps that failed, in the order in which their groups are computed. None at first."""

    def __init__(self) -> None:
        self._groups: deque[set[str]] = deque()

    def group(self, unfinished: Container[str]) -> frozenset[str] | None:
        """The only requests that may be computed now; None: all may. Those that have ended are forgotten."""
        while self._groups:
            self._groups[0] = {one for one in self._groups[0] if one in unfinished}
            if self._groups[0]:
                return frozenset(self._groups[0])
            self._groups.popleft()
        return None

    def passed(self, request_ids: Iterable[str]) -> None:
        """Clears requests that a step has computed up to a token."""
        if self._groups:
            self._groups[0].difference_update(request_ids)

    def failed(self, request_ids: Iterable[str]) -> str | None:
        """Takes in the requests of a step that failed. Returns the request if there was only one. Otherwise halves
        them."""
        found = sorted(set(request_ids))
        rest = self._groups.popleft() - set(found) if self._groups else set()
        if rest:
            self._groups.appendleft(rest)
        if len(found) == 1:
            return found[0]
        middle = len(found) // 2
        self._groups.extendleft(half for half in (set(found[middle:]), set(found[:middle])) if half)
        return None
