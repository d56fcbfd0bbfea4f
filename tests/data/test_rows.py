import gzip
import json
import math

import pytest

from inlay.data.errors import DataError
from inlay.data.examples import examples
from inlay.data.rows import Table, read_table
from inlay.data.task import Task

ROWS = [{"text": 'a, "quoted" text\nwith a line', "label": "x"}, {"text": "näive ☃", "label": "y"}]


def write(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_every_format_gives_the_same_rows(tmp_path):
    import csv
    import io

    import pyarrow
    import pyarrow.parquet

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, ["text", "label"])
    writer.writeheader()
    writer.writerows(ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    files = [
        write(tmp_path / "a.jsonl", lines), write(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + lines.encode()),
        write(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode())), write(tmp_path / "a.csv", stream.getvalue()),
        write(tmp_path / "a.csv.gz", gzip.compress(stream.getvalue().encode())), tmp_path / "a.parquet",
    ]  # fmt: skip
    for file in files:
        assert read_table(file).rows == ROWS, file


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2: not a JSON object"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "line 2: expected an object"),
        ("a.jsonl", '{"text": "a"}\n\ufeff{"text": "b"}\n', "line 2: not a JSON object.*byte order mark"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xe9"}\n', "line 3: byte 0xe9 is not UTF-8"),
        ("a.csv", "text,label\na,b\nc\n", "line 3: 1 fields where the header has 2"),
        ("a.csv", "text,label\na,b,c\n", "line 2: 3 fields where the header has 2"),
        ("a.csv", "text;label\na, b;c\n", "It seems to be separated by ';': a .csv has commas, a .tsv tabs"),
        ("a.csv", "text,label\n", "is empty"),
        ("a.csv", 'text,label\n"a"b,c\n', "line 2"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-12], "cannot be read"),
        ("a.parquet", b"no parquet", "is not a Parquet file"),
        ("a.xlsx", b"", "which must end in .jsonl"),
    ],
)
def test_broken_files_say_where(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read_table(write(tmp_path / name, content))
    assert name in str(caught.value)


def test_what_json_has_no_form_for_is_text_in_a_parquet_file(tmp_path):
    """A column that no task reads must not stop `inlay predict`, which writes all of them."""
    import datetime
    from decimal import Decimal

    import pyarrow
    import pyarrow.parquet

    day = datetime.datetime(2024, 5, 6, 7, 8, 9, 123456)
    row = {
        "day": day.date(), "at": day, "time": day.time(), "price": Decimal("1.10"), "text": "größer".encode(),
        "image": b"\xff\x00", "list": [day.date()], "nested": {"price": Decimal("2.50")}, "n": 1, "x": 0.5, "none": None,
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    [read] = read_table(tmp_path / "a.parquet").rows
    assert read == json.loads(json.dumps(read))
    assert read == {
        "day": "2024-05-06", "at": "2024-05-06 07:08:09.123456", "time": "07:08:09.123456", "price": "1.10",
        "text": "größer", "image": "/wA=", "list": ["2024-05-06"], "nested": {"price": "2.50"}, "n": 1, "x": 0.5,
        "none": None,
    }  # fmt: skip


ODD = {"title": {"en": "a"}, "words": ["a", "b"], "score": math.nan, "choices": ["x", {"text": "y"}]}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"text": "words"}, "column 'words' must be a text, got a list: ['a', 'b']."),
        ({"text": "{text}: {title}"}, "column 'title' must be a text, got an object: {'en': 'a'}."),
        ({"pair": "words"}, "column 'words' must be a text, got a list"),
        ({"pair": "score"}, "column 'score' is missing or null"),
        ({"kind": "text", "template": "{text} {words} {target}"}, "column 'words' must be a text, got a list"),
        ({"kind": "text", "template": "{text} {score} {target}"}, "column 'score' is missing or null"),
        ({"prompt": "{text} {title}"}, "column 'title' must be a text, got an object"),
        ({"prompt": "{text} {score}"}, "column 'score' is missing or null"),
        ({"kind": "choice"}, "'choices' must be a list of two or more choices, got ['x', {'text': 'y'}]"),
    ],
)
def test_what_is_no_text_is_not_read_as_one(how, says):
    """As Python would write it, brackets and all, no host has ever seen it."""
    with pytest.raises(DataError) as told:
        examples(Task(**{"labels": ("x",)} | how), Table([{"text": "a", "label": "x"} | ODD], "rows"))
    assert str(told.value).startswith(f"rows, row 1: {says}")


def test_lists_that_are_meant_stay():
    row = {"text": "a", "label": "x", "empty": "", "n": 1.5} | ODD
    prompted = Task(labels=("x",), prompt="{text} {words}, {title[en]} {n}", pair="empty", group="{words}")
    [made] = examples(prompted, Table([row], "rows"))
    assert (made.prompt, made.texts, made.group) == ("a a, b, a 1.5", (("a", ""),), "['a', 'b']")
    triples = Task(kind="text", text="words", linearise="triples", template="{words} {target}")
    [made] = examples(triples, Table([row | {"words": [["s", "r", "o"]]}], "rows"))
    assert made.before == "s : r : o "


def test_a_file_that_is_not_there_shows_what_is(tmp_path):
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(DataError, match=r"there is: train\.jsonl"):
        read_table(tmp_path / "trian.jsonl")
