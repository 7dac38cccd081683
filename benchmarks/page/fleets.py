"""What routing by prefix is worth to a fleet, by replays of the analysis."""

from benchmarks.page.common import Section, exists, load, sources, table

RESULT = "fleet"
COMMAND = "python -m benchmarks.host.fleet --trace FILE"


def fleets() -> Section | None:
    if not exists(RESULT):
        return None
    result = load(RESULT)
    rows = []
    for row in result["rows"]:
        saved = 1 - row["shared_tpot_ms"] / row["tpot_ms"]
        read = row["kv_bytes"] / row["unique_kv_bytes"]
        rows.append(
            [
                f"{row['workload']}, {row['requests']:,} requests", f"`{row['route']}`",
                f"{100 * row['hit_rate']:.0f} of {100 * row['ceiling']:.0f} %", f"{read:.2f}×",
                f"{row['tpot_ms']:.1f}", f"{row['shared_tpot_ms']:.1f}", f"{100 * saved:.0f} %",
                f"{row['shared_ttft_ms']:,.0f}", f"{row['shared_tokens_per_s']:,.0f}", f"{row['balance']:.2f}",
            ]
        )  # fmt: skip
    head = ["workload", "route", "hits", "read by several", "one by one", "shared", "saved", "first token, ms",
            "tokens/s", "balance"]  # fmt: skip
    text = f"""## Fleets and routes

{result["replicas"]} engines of {result["model"]}, each with an {result["card"]} and a cache of its own, replayed by
`trunkattn analyze --replicas`. A router sends each request to any engine (`random`, `round-robin`), to the one that has
most of the prompt cached (`prefix`), or to the one whose unfinished requests have most of it (`sharers`). For the last
two a prefix counts from a quarter of the prompt on, and engines with far more work than the others are passed over.

"Hits" are prompt tokens found in an engine's cache, of those that one cache without an end would find. "Read by
several" is the bytes of keys and values that requests read over those that leave memory if each shared page is read
once. "One by one" and "shared" are ms per token, and "saved" is what sharing takes off them. "Balance" is the tokens of
the busiest engine over the mean. First token (ms) and tokens/s are those of sharing engines.

{table(head, rows, 2)}

{sources(COMMAND, RESULT)}
"""
    return Section(text, [])
