"""Network ports that commands on one host do not take from each other."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# Below those that the kernel gives to whoever asks for any; PORTS for each process.
FIRST_PORT, LAST_PORT, PORTS = 31000, 32600, 20


@contextmanager
def own_ports(count: int) -> Iterator[list[int]]:
    """The first of PORTS each, that other commands do not take meanwhile: this one holds the last of each.

    Raises:
        RuntimeError: so many are not free.
    """
    with ExitStack() as held:
        found: list[int] = []
        for first in range(FIRST_PORT, LAST_PORT, PORTS):
            if len(found) == count:
                break
            claim = held.enter_context(socket.socket())
            try:
                claim.bind(("127.0.0.1", first + PORTS - 1))
                with socket.socket() as probe:
                    probe.bind(("", first))  # what an engine that has not ended may have
            except OSError:
                continue
            found.append(first)
        if len(found) < count:
            raise RuntimeError(
                f"{len(found)} of {count} engines find free ports from {FIRST_PORT} to {LAST_PORT}: end what holds them"
            )
        yield found
