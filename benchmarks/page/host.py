"""What a step and a layer take the host, and what a change of the code took."""

from benchmarks.page.common import Section, load, sources, table

HOST, COMPARED = "host-time-h100", ("compare-h100", "compare-prefill-h100", "compare-hybrid-h100", "compare-cpu")


def host() -> Section:
    rows = []
    by_version: dict[str, list[dict]] = {}
    for row in load(HOST)["rows"]:
        by_version.setdefault(row["source"], []).append(row)
    before, after = by_version.values()
    for old, new in zip(before, after, strict=True):
        times = (old["plan_into_us"], new["plan_into_us"], old["run_into_us"], new["run_into_us"])
        rows.append([new["step"], f"`{new['execution']}`", *(f"{us:,.0f}" for us in times)])
    parts = [
        [name, part["cells"], f"{part['geomean']:.3f}", f"{part['worst']['ratio']:.3f}", len(part["over_3_percent"])]
        for result in COMPARED
        for name, part in load(result)["parts"].items()
    ]
    text = f"""## On the host

µs of planning a step into a plan of fixed size, and of launching one layer of it without a CUDA graph; before and after
launches were bound once for all layers of a plan. 10 decodes of 5,120 tokens, alone or with a prompt chunk of 1,014.

{table(["step", "execution", "plan, before", "after", "a layer, before", "after"], rows, 2)}

{sources("python -m benchmarks.host.host_time --source OLD --source .", HOST)}

The kernels of both versions, on the card and on a CPU: time after over time before.

{table(["benchmark", "cells", "geometric mean", "worst cell", "cells over 1.03"], parts)}

{sources("python -m benchmarks.tools.compare_versions --before OLD", *COMPARED)}
"""
    return Section(text, [])
