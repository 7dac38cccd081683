"""Starts the process that compiles the planner while an engine loads its model, and waits for it.

Compiling takes half a minute and holds the interpreter's lock, so a thread would stall the engine. Here another process
(`program`) fills Numba's cache on disk. The first plan on the host waits for it and loads the cache. If the
process fails, that first plan compiles, as it would without the process.
"""

import json
import logging
import subprocess
import sys
from typing import Final

from trunkattn.compiled import cache_folder
from trunkattn.gpu.cards import GpuFacts

_LOG: Final = logging.getLogger(__name__)
_MODULE: Final = "trunkattn.gpu.planner_compilation.program"
_LONGEST_WAIT_S: Final = 120.0


class PlannerCompilation:
    """The process that compiles the planner. process: None if there is none."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process

    def wait(self) -> None:
        """Waits until the process has ended. It must be called before the first plan on the host."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            _LOG.warning("trunkattn waits until its planner is compiled, up to 40 s once")
        try:
            process.wait(_LONGEST_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def compile_ahead(facts: GpuFacts, batch_invariant: bool) -> PlannerCompilation:
    """Starts the process that compiles the host's planner for a card. batch_invariant: whether plans are batch
    invariant."""
    if cache_folder() is None:  # nothing that another process compiles would be found
        return PlannerCompilation(None)
    command = [sys.executable, "-m", _MODULE, json.dumps([*facts, batch_invariant])]
    quiet = subprocess.DEVNULL
    try:
        return PlannerCompilation(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
    except OSError:
        return PlannerCompilation(None)
