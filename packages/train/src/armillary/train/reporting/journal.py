"""metrics.jsonl: every step, validation and event of a run, one line of JSON each, across restarts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from armillary.core.parts import open_file, parse_json
from armillary.train.reporting.metrics import StepMetrics
from armillary.train.reporting.sinks import Sink

BUFFER = 1 << 20
"""Size of the file's buffer in bytes, which keeps lines while the disk is full."""


class Journal(Sink):
    """Writes metrics.jsonl. A number that is not finite becomes null, and its line has "bad": true.

    Args:
        fence: called before each change of the file; raises if another run has taken the output folder.
    """

    def __init__(self, path: Path, fence: Callable[[], None] = lambda: None) -> None:
        self.path, self._fence = path, fence
        self._file: BinaryIO | None = None

    def on_resume(self, step: int) -> None:
        self._fence()
        cut(self.path, step)
        self.event("resumed" if step else "started", step, "")

    def step(self, metrics: StepMetrics) -> None:
        self._write(asdict(metrics))

    def on_validation(self, step: int, values: dict[str, float]) -> None:
        self._write({"step": step, "validation": values})

    def event(self, kind: str, step: int, text: str) -> None:
        self._write({"step": step, "event": kind} | ({"text": text} if text else {}))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._fence()
        if self._file is None:
            self._file = self.path.open("ab", buffering=BUFFER)
        finite_record = replace_nonfinite(record)
        marked_record = finite_record if finite_record == record else finite_record | {"bad": True}
        self._file.write(json.dumps(marked_record | {"time": time.time()}, allow_nan=False).encode() + b"\n")
        # On a full disk this raises and keeps the lines in the buffer; the next flush that succeeds writes them.
        self._file.flush()


def replace_nonfinite(value: Any) -> Any:
    """Returns a record with None for each number that JSON cannot express: NaN and infinities."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def cut(path: Path, step: int) -> None:
    """Truncates the file before the first record of a step after `step`, or before an incomplete line.

    This works on a full disk too. Later lines have later steps too, except some events of saves in the background.

    Raises:
        OSError: the file exists and cannot be read or changed.
    """
    if not path.exists():
        return
    with open_file(path) as file:
        kept_bytes = 0
        for line in file:
            record = parse_record(line)
            if not line.endswith(b"\n") or (record is not None and record["step"] > step):
                break
            kept_bytes += len(line)
    os.truncate(path, kept_bytes)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file, oldest first; skips lines that are no record.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield record


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns the record on a line; None if the line is not complete JSON with a step."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
