"""Rows from files: JSON lines, CSV, TSV (also as .gz) and Parquet. Every error names the file and the line."""

from __future__ import annotations

import base64
import codecs
import csv
import gzip
import io
import json
import math
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from inlay.data.errors import DataError
from inlay.errors import nearest

Row = dict[str, Any]
QUOTED = re.compile(r'"(?:[^"]|"")*"')
OTHER_SEPARATORS = (";", "\t", "|")
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Table:
    """Rows and where each one stands, so that an error can say it."""

    rows: Sequence[Row]
    source: str
    numbers: Sequence[int] = ()
    """Of every row in its source, which it keeps when rows are drawn; by default from 1."""
    counted: Literal["row", "line"] = "row"
    """What the numbers count."""
    unlabelled: int = 0
    """Further rows of the source, which have no label and are left out."""

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, index: int) -> int:
        return self.numbers[index] if self.numbers else index + 1

    def where(self, index: int) -> str:
        return f"{self.source}, {self.counted} {self.number(index)}"

    def take(self, indices: Sequence[int]) -> Table:
        return replace(self, rows=[self.rows[i] for i in indices], numbers=[self.number(i) for i in indices])

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
        form = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
        raise DataError(
            f"{source}, line {line}: byte {data[error.start]:#04x} is not UTF-8. Convert the file, for instance with: "
            f"iconv -f {form} -t utf-8"
        ) from None


def check_text(texts: Iterable[object], where: str) -> None:
    """Refuse half characters, which no tokenizer and no file takes."""
    for text in texts:
        if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
            raise DataError(f"{where}: {ascii(text)[:60]} is not whole Unicode: it holds half of a pair (a surrogate).")
        if isinstance(text, list | tuple):
            check_text(text, where)


def check_columns(table: Table, columns: Sequence[str]) -> None:
    """Every column that is read must be there; all that are not are named, with the nearest."""
    there = table.columns
    missing = [column for column in columns if column not in there]
    if missing:
        raise DataError(
            "\n".join(f"{table.source} has no column {column!r}.{nearest(column, there)}" for column in missing)
        )


def is_missing(value: Any) -> bool:
    """Null, an empty cell of a CSV file, or what pandas writes for it."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def text_in(row: Row, column: str) -> str:
    """What a row's column says; a text may be empty."""
    value = row.get(column)
    if is_missing(value) and value != "":
        raise DataError(f"column {column!r} is missing or null")
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        raise DataError(f"column {column!r} must be a text, got {kind}: {str(value)[:60]}. Write it as one text.")
    return str(value)


def _json_lines(text: str, source: str) -> Table:
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        rows.append(json_row(line, f"{source}, line {number}"))
        lines.append(number)
    return Table(rows, source, lines, "line")


def json_row(line: str, where: str) -> Row:
    """One line of a JSON lines file."""
    try:
        row = DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        if line.startswith("\ufeff"):  # of a file that was joined to another
            reason = "it begins with a byte order mark (U+FEFF); take that out"
        raise DataError(f"{where}: not a JSON object on one line: {reason}") from None
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"text": ...}}, got {line[:60]}')
    if "\\u" in line:
        check_text((*row, *row.values()), where)
    return row


def _once(pairs: list[tuple[str, Any]]) -> Row:
    """An object whose keys are all different."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"the key {_twice(name for name, _ in pairs)!r} is there twice")
    return row


DECODER = json.JSONDecoder(object_pairs_hook=_once)
"""`json.loads` would make one for every line, which takes longer than reading the line."""


def _twice(names: Iterable[str]) -> str | None:
    """A name that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _separated(text: str, source: str, delimiter: str) -> Table:
    plain = _unquoted(text) if delimiter == "\t" else None
    fields = plain if plain is not None else _quoted(text, source, delimiter)
    rows: list[Row] = []
    lines: list[int] = []
    header: list[str] | None = None
    for line, cells in fields:
        if header is None:
            header = cells
            if (twice := _twice(header)) is not None:
                raise DataError(f"{source}, line {line}: the column {twice!r} is there twice. Rename one of them.")
        elif len(cells) != len(header):
            other = next((mark for mark in OTHER_SEPARATORS if len(header) == 1 and mark in header[0]), None)
            hint = f" It seems to be separated by {other!r}: a .csv has commas, a .tsv tabs." if other else ""
            raise DataError(f"{source}, line {line}: {len(cells)} fields where the header has {len(header)}.{hint}")
        else:
            rows.append(dict(zip(header, cells, strict=True)))
            lines.append(line)
    return Table(rows, source, lines, "line")


def _quoted(text: str, source: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Lines and their cells, where quotes hold separators and line ends."""
    csv.field_size_limit(sys.maxsize if sys.maxsize < 1 << 32 or os.name != "nt" else (1 << 31) - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{source}, line {reader.line_num}: {error}") from None
        if cells:
            yield reader.line_num, cells


def _unquoted(text: str) -> list[tuple[int, list[str]]] | None:
    """A TSV file as GLUE writes it, where a quote is a quote; None: its tabs do not fit that, so quotes hold some."""
    numbered = enumerate(text.replace("\r\n", "\n").split("\n"), start=1)
    rows = [(number, line.split("\t")) for number, line in numbered if line]
    if not rows or any(len(cells) != len(rows[0][1]) for _, cells in rows):
        return None
    always = all(QUOTED.fullmatch(cell) for cell in rows[0][1])
    return [(number, [_bare(cell, always) for cell in cells]) for number, cells in rows]


def _bare(cell: str, always: bool) -> str:
    """A cell without the quotes around it, if they are a writer's: all cells have them, or those inside are doubled."""
    if QUOTED.fullmatch(cell) and (always or '""' in cell[1:-1]):
        return cell[1:-1].replace('""', '"')
    return cell


def _parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        if (twice := _twice(table.column_names)) is not None:
            raise DataError(f"{path}: the column {twice!r} is there twice.")
        for at, field in enumerate(table.schema):
            if pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type):
                with suppress(pyarrow.ArrowInvalid):  # not UTF-8
                    table = table.set_column(at, field.name, table.column(at).cast(pyarrow.large_string()))
        return Table([_as_json_has_it(row) for row in table.to_pylist()], str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from None


def _as_json_has_it(value: Any) -> Any:
    """Dates, times and decimals as text, which keeps every digit, and bytes that are no text in base 64."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {name: _as_json_has_it(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json_has_it(inner) for inner in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
