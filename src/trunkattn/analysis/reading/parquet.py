"""Rows of tables in Parquet as values of JSON, if pyarrow is there."""

from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

_ROWS: Final = 1024  # rows in memory at once


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table.

    Raises:
        ValueError: pyarrow is missing, or the file is damaged or holds a time that Python has no name for.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(
            f"{file}: it is Parquet, and the package pyarrow is missing; run pip install pyarrow, or export JSON lines"
        ) from error
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=_ROWS):
            yield from map(_plain, _in_microseconds(batch).to_pylist())
    except OverflowError as error:
        raise ValueError(f"{file}: it holds a time outside of the years 1 to 9999; expected none") from error
    except Exception as error:  # Arrow has errors of its own
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: it is no whole Parquet file ({reason}); copy or download it again") from error


def _in_microseconds(batch: Any) -> Any:
    """The rows with all times in microseconds: Python's `datetime` has no nanoseconds, which pandas writes."""
    import pyarrow

    for place, column in enumerate(batch.schema):
        if pyarrow.types.is_timestamp(column.type) and column.type.unit == "ns":
            times = batch.column(place).cast(pyarrow.timestamp("us", column.type.tz), safe=False)
            batch = batch.set_column(place, column.name, times)
    return batch


def _plain(value: Any) -> Any:
    """A value as JSON has it: bytes and dates become texts, decimals numbers, and maps, which are lists of pairs,
    objects."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(inner, tuple) for inner in value):
            return {str(name): _plain(inner) for name, inner in value}
        return value if value and isinstance(value[0], int) else [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date) and not isinstance(value, datetime) else value
