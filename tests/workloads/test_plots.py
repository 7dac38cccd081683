"""Every picture of docs/pictures can be traced to a command."""

import matplotlib.pyplot as plt
import pytest

from benchmarks.page.plots.__main__ import DRAWN_BY_RUNS, PICTURES, PLOTS, Plot

BY_HAND = dict.fromkeys(("live-page", "live-page-phone"), "a browser on the first page of a server")


def test_every_png_is_drawn_by_a_command() -> None:
    drawn = {*PLOTS, *DRAWN_BY_RUNS, *BY_HAND}
    assert {path.stem for path in PICTURES.glob("*.png")} == drawn


@pytest.mark.parametrize("name", PLOTS)
def test_a_result_is_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.page.common import load

    plot: Plot = PLOTS[name]
    saved = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, target, **_: saved.append((target, figure)))
    plot.draw(load(plot.result), PICTURES / f"{name}.png")
    ((target, figure),) = saved
    assert target == PICTURES / f"{name}.png"
    assert all(axis.has_data() for axis in figure.axes)
    plt.close(figure)
