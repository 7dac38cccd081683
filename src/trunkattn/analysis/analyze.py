"""A whole analysis: replays at several settings, what spoils sharing, a fleet, and a verdict in one sentence."""

from trunkattn.analysis.records import Analysis, Log
from trunkattn.analysis.settings import Progress, Settings


def analyze(log: Log, settings: Settings, progress: Progress | None = None) -> Analysis:
    """Replays a log and says what sharing prefixes is worth.

    Args:
        log: what a reader returned.
        settings: see `Settings`.
        progress: see `Progress`.

    Raises:
        ValueError: the log has no request, or a setting is out of range. No replay has begun then.
    """
    raise NotImplementedError
