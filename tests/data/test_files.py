"""Files as others write them: quotes of GLUE, long cells, columns that come twice, one row, labels that are lists."""

import pytest

from inlay.data import Data, DataError, prepare
from inlay.data.rows import _once, read_table


def test_a_tsv_as_glue_writes_it(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('sentence\tlabel\n"great" film\t1\n" unclosed\t0\n"whole"\t1\n')
    assert [row["sentence"] for row in read_table(file).rows] == ['"great" film', '" unclosed', '"whole"']


def test_a_tsv_with_a_writers_quotes(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('text\tlabel\n"say ""hi"" now"\tx\nplain\ty\n')
    assert read_table(file).rows[0]["text"] == 'say "hi" now'
    file.write_text('text\tlabel\n"two\nlines\tand a tab"\tx\nplain\ty\n')
    assert read_table(file).rows[0]["text"] == "two\nlines\tand a tab"


@pytest.mark.parametrize("form", ["latin1", "utf-16"])
def test_another_encoding_is_refused_with_what_converts_it(tmp_path, form):
    """Excel writes its Unicode text as UTF-16, which read as latin1 would be noise."""
    (tmp_path / "a.csv").write_bytes("text,label\ncafé,x\n".encode(form))
    with pytest.raises(DataError, match=f"iconv -f {form} -t utf-8"):
        read_table(tmp_path / "a.csv")


def test_a_cell_of_any_length(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "w " * 200_000 + ",x\n")
    assert len(read_table(tmp_path / "a.csv").rows[0]["text"]) == 400_000


@pytest.mark.parametrize(("name", "text"), [("a.csv", "text,text\na,b\n"), ("a.jsonl", '{"text": "a", "text": "b"}\n')])
def test_columns_that_come_twice(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="'text' is there twice"):
        read_table(tmp_path / name)


def test_one_row_and_labels_that_are_lists(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,b\n")
    with pytest.raises(DataError, match="one row"):
        prepare(Data(train_file=tmp_path / "a.csv"))
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": ["x"]}\n' * 20)
    with pytest.raises(DataError, match="must be one label"):
        prepare(Data(train_file=tmp_path / "a.jsonl"))


def test_all_columns_that_are_missing_at_once(tmp_path):
    (tmp_path / "a.csv").write_text("txet,lable\n" + "a,b\n" * 20)
    with pytest.raises(DataError, match="no column 'text'.*\n.*no column 'label'"):
        prepare(Data(train_file=tmp_path / "a.csv"))


class Counted(str):
    """A name that counts how often it is compared."""

    times = 0

    def __eq__(self, other):
        Counted.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_name_that_comes_twice_is_found_without_comparing_each_with_each():
    """A header or an object of a megabyte has a hundred thousand names."""
    names = [Counted(f"k{i}") for i in range(2000)]
    with pytest.raises(ValueError, match="'k1999' is there twice"):
        _once([(name, 1) for name in (*names, Counted("k1999"))])
    assert Counted.times < 20_000
