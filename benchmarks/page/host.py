"""What a step and a layer take the host."""

from benchmarks.page.common import Section, load, sources, table

HOST = "host-time-h100"


def host() -> Section:
    result = load(HOST)
    newest = result["rows"][-1]["source"]
    rows = [
        [row["step"], f"`{row['execution']}`", f"{row['plan_into_us']:,.0f}", f"{row['run_into_us']:,.0f}"]
        for row in result["rows"]
        if row["source"] == newest and "step" in row
    ]
    text = f"""## Time of the host on a GPU machine

Microseconds of planning a step on the host into a plan of fixed size, and of launching one layer of it without a CUDA
graph. 10 decodes of 5,120 tokens, by themselves or with a prompt chunk of 1,014.

{table(["step", "execution", "plan", "a layer"], rows, 2)}

{sources("python -m benchmarks.host.host_time --source OLD --source .", HOST)}
"""
    return Section(text, [])
