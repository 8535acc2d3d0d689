"""The file ``metrics.jsonl``: one line per epoch, each with a checksum of itself and of all lines before it.

The last entry of a line, ``sha256``, is the SHA-256 of the checksum before it (none for the first line) and of the
bytes of the line before that entry. A changed, missing or reordered line is detected at its number.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from egru.records import without_format
from egru.training.records import EpochMetrics

_LINE = re.compile(rb'(.*),"sha256":"([0-9a-f]{64})"}')


class DamagedMetricsError(ValueError):
    """A file of metrics with a line that was changed after it was written."""


def encode(metrics: Iterable[EpochMetrics], previous: bytes = b"") -> bytes:
    """Return the lines of some epochs.

    Args:
        metrics: The epochs, in order.
        previous: Checksum of the line before them, from :func:`last_checksum`.
    """
    lines: list[bytes] = []
    for epoch in metrics:
        body = json.dumps(epoch.to_dict(), separators=(",", ":")).encode()[:-1]
        previous = _checksum(previous, body)
        lines.append(body + b',"sha256":"' + previous + b'"}\n')
    return b"".join(lines)


def last_checksum(path: Path) -> bytes:
    """Return the checksum of the last line of ``path``, empty if there is no line."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    match = _LINE.fullmatch(lines[-1]) if lines else None
    return b"" if match is None else match[2]


def read(path: Path) -> list[EpochMetrics]:
    """Read the metrics of all epochs, verified by their checksums.

    An incomplete last line, left by an interrupted write, is ignored. Without a file there are no metrics.

    Raises:
        FormatError: If the metrics were written in another record format.
        DamagedMetricsError: If a line does not match its checksum. The message names the file and the line.
    """
    if not path.exists():
        return []
    *lines, incomplete = path.read_bytes().split(b"\n")
    metrics: list[EpochMetrics] = []
    previous = b""
    if _LINE.fullmatch(incomplete):  # only its line feed is missing
        lines.append(incomplete)
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None and ("format" in record or number == 1):  # a damaged line may have lost its number
            without_format(record, path)
        match = _LINE.fullmatch(line)
        if record is None or match is None or _checksum(previous, match[1]) != match[2]:
            raise DamagedMetricsError(
                f"{path}, line {number}: the checksum does not match, so this line was changed, or lines before it are "
                "missing; restore the file, or remove it to continue without the metrics of earlier epochs"
            )
        del record["sha256"]
        metrics.append(EpochMetrics.from_dict(record, f"{path}, line {number}"))
        previous = match[2]
    return metrics


def _checksum(previous: bytes, body: bytes) -> bytes:
    return hashlib.sha256(previous + body).hexdigest().encode()


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``line``, or None if there is none."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):  # ValueError includes UnicodeDecodeError
        return None
    return parsed if isinstance(parsed, dict) else None
