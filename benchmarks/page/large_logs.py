"""What `trunkattn analyze` takes for large logs."""

from benchmarks.page.common import Section, load, sources, table

RESULT = "analyze-large"
COMMAND = "python -m benchmarks.host.analyze_large"


def large_logs() -> Section:
    """The table of time and memory."""
    result = load(RESULT)
    rows = [
        [row["kind"], f"{row['requests']:,}", f"{row['log_gb']:.2f}", f"{row['seconds'] / 60:.1f}",
         f"{row['peak_gb']:.1f}"]
        for row in result["rows"]
    ]  # fmt: skip
    text = f"""## Large logs

`trunkattn analyze` with its default settings, on {result["cores"]} cores that nothing else uses. Prompts have
4,096 tokens on average, and are in the log as texts or as hashes of blocks.

{table(["log of", "requests", "log, GB", "minutes", "memory, GB"], rows)}

{sources(COMMAND, RESULT)}
"""
    return Section(text, [])
