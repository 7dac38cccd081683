"""A jitted function that notes its launches, and launches that are bound of it."""

from dataclasses import dataclass, field
from typing import Any

from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.layer import Tensors


@dataclass
class Compiled:
    """What Triton returns of a launch: it takes all arguments in the order of the kernel's parameters."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append((grid, *arguments))


@dataclass
class Kernel:
    """A jitted function. interprets: nothing is compiled, as under Triton's interpreter."""

    interprets: bool = False
    compiled: Compiled = field(default_factory=Compiled)
    calls: list[tuple[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)
    arg_names = ("work", "layer", "SIZE", "scale")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**given: Any) -> Compiled | None:
            self.calls.append((grid, given))
            return None if self.interprets else self.compiled

        return launch


def bound(kernel: Kernel, t: Tensors) -> BoundLaunches:
    given = {"work": "list", "layer": "the first layer's", "SIZE": 3, "scale": "its scale", "num_warps": 4}
    grids = [Grid(7, given), Grid(9, given | {"work": "more"})]
    return BoundLaunches(kernel, grids, ("layer", "scale"), lambda t: (t.q, t.v_scale))
