"""Rows from files: JSON lines, CSV, TSV (also as .gz) and Parquet. Every error names the file and the line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.data.errors import DataError

Row = dict[str, Any]
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Table:
    """Rows and where each one stands, so that an error can say it."""

    rows: Sequence[Row]
    source: str
    lines: Sequence[int] = field(default=())

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        return f"{self.source}, line {self.lines[index]}" if self.lines else f"{self.source}, row {index + 1}"

    def take(self, indices: Sequence[int]) -> Table:
        lines = [self.lines[i] for i in indices] if self.lines else []
        return Table([self.rows[i] for i in indices], self.source, lines)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows[:100] for column in row))


def read_table(path: str | Path) -> Table:
    """The rows of a file; the format is recognised by its name."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} is not a file.{_beside(path)}")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    zipped = bool(suffixes) and suffixes[-1] == ".gz"
    kind = (suffixes[:-1] if zipped else suffixes)[-1:] or [""]
    if kind[0] == ".parquet" and not zipped:
        table = _parquet(path)
    elif kind[0] in (".jsonl", ".json"):
        table = _json_lines(read_text(path, zipped), str(path))
    elif kind[0] in (".csv", ".tsv"):
        table = _separated(read_text(path, zipped), str(path), "," if kind[0] == ".csv" else "\t")
    else:
        raise DataError(
            f"{path}: the format is recognised by the name, which must end in {', '.join(FORMATS)}, or .gz after it."
        )
    if not table.rows:
        raise DataError(f"{path} is empty: it has no rows.")
    return table


def _beside(path: Path) -> str:
    there = sorted(file.name for file in path.parent.iterdir()) if path.parent.is_dir() else []
    return (
        f" In {path.parent} there is: {', '.join(there[:12])}."
        if there
        else f" The folder {path.parent} does not exist or is empty."
    )


def read_text(path: Path, zipped: bool = False) -> str:
    """What a file says."""
    try:
        data = path.read_bytes()
        if zipped:
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return decoded(data, str(path))


def decoded(data: bytes, source: str) -> str:
    """UTF-8, with or without a mark at its start."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{source}, line {line}: byte {data[error.start]:#04x} is not UTF-8. Convert the file, for instance with: "
            f"iconv -f latin1 -t utf-8"
        ) from None


def _json_lines(text: str, source: str) -> Table:
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        rows.append(json_row(line, f"{source}, line {number}"))
        lines.append(number)
    return Table(rows, source, lines)


def json_row(line: str, where: str) -> Row:
    """One line of a JSON lines file."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{where}: not a JSON object on one line: {reason}") from None
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"text": ...}}, got {line[:60]}')
    return row


def _separated(text: str, source: str, delimiter: str) -> Table:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    lines: list[int] = []
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return Table(rows, source, lines)
        except csv.Error as error:
            raise DataError(f"{source}, line {reader.line_num + 1}: {error}") from None
        names = len(reader.fieldnames or ())
        if None in row or None in row.values():
            seen = names + len(row[None]) if None in row else sum(value is not None for value in row.values())
            raise DataError(f"{source}, line {reader.line_num}: {seen} fields where the header has {names}.")
        rows.append(dict(row))
        lines.append(reader.line_num)


def _parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        return Table(pyarrow.parquet.read_table(path).to_pylist(), str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from None
