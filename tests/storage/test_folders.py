"""Only what carries our mark is ours to remove; what a killed process left goes with the next writer."""

import os
import subprocess
import sys
import threading

import pytest

import inlay
from inlay.storage import folders
from inlay.storage.files import PART, write_out, write_whole
from inlay.storage.folders import MARK, check_new, reading, replacing
from inlay.storage.plain_text import printable


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def write(folder, content="{}"):
    with replacing(folder, ("inlay.json",)) as draft:
        (draft / "inlay.json").write_text(content)


def dead_mark():
    code = "from inlay.storage.files import process_mark; print(process_mark())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", [".good.old", ".good.old-mine", ".good.new-mine", ".good.new-", ".good.json"])
def test_a_users_folder_is_left_whatever_its_name(tmp_path, name):
    mine = tmp_path / name
    mine.mkdir()
    (mine / "inlay.json").write_text("three years of work")
    for content in ("1", "2"):
        write(tmp_path / "good", content)
    assert (mine / "inlay.json").read_text() == "three years of work"
    assert (tmp_path / "good" / "inlay.json").read_text() == "2"
    assert names(tmp_path) == sorted([name, "good"])
    assert names(tmp_path / "good") == ["inlay.json"]


def test_what_a_killed_writer_left_is_settled(tmp_path):
    good, mark = tmp_path / "good", dead_mark()
    write(good, "old")
    (good / MARK).write_text(mark)
    good.rename(tmp_path / ".good.old-1234")  # killed between two renames
    for draft in (f".good.new-{mark}-a", f".good.new-{mark}-empty"):
        (tmp_path / draft).mkdir()
    (tmp_path / f".good.new-{mark}-a" / MARK).write_text(mark)
    with reading(good) as there:
        assert (there / "inlay.json").read_text() == "old"
    write(good, "new")
    assert names(tmp_path) == ["good"]
    assert (good / "inlay.json").read_text() == "new"


def test_a_manifest_is_found_between_two_renames(tmp_path, monkeypatch):
    from inlay.checkpoints.manifest import read_manifest
    from tests.hosts import classifier

    host = classifier()
    inlay.add(host, "a", inlay.LoRA(rank=2))
    folder = inlay.save(host, "a", tmp_path / "a")
    (folder / MARK).write_text(dead_mark())
    folder.rename(tmp_path / ".a.old-99")
    assert read_manifest(folder).name == "a"


def test_parts_of_dead_writers_go_and_those_of_others_stay(tmp_path):
    left = tmp_path / f".a.json.{dead_mark()}-abc{PART}"
    kept = [tmp_path / f".a.json.00000000-1-abc{PART}", tmp_path / ".a.json.mine"]
    for file in (left, *kept):
        file.write_text("x")
    write_whole(tmp_path / "a.json", "new")
    assert names(tmp_path) == sorted(["a.json", *(file.name for file in kept)])


def test_output_goes_through_links_pipes_and_devices(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_out(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    heard = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_out(tmp_path / "pipe", "said")
    reader.join(10)
    assert heard == ["said"]
    assert (tmp_path / "pipe").is_fifo()
    write_out(folders.Path("/dev/null"), "nothing")
    assert folders.Path("/dev/null").is_char_device()


def test_nothing_is_written_over_unasked(tmp_path):
    write(tmp_path / "good")
    with pytest.raises(inlay.CheckpointError, match="`overwrite`"):
        check_new(tmp_path / "good")
    check_new(tmp_path / "good", overwrite=True)
    check_new(tmp_path / "new")


def test_no_text_acts_on_a_terminal():
    assert printable("a\tb\nü 🙂") == "a\tb\nü 🙂"
    assert printable("\x1b[31mred\x07\x9b1m\ud800\u202e") == r"\x1b[31mred\x07\x9b1m\ud800\u202e"
