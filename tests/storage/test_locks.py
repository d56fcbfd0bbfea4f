"""Locks end with their process, refuse or wait as asked, and leave nothing beside what the user saved."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from inlay.storage.folders import reading, replacing
from inlay.storage.locks import InUse, folder_locked, locked

HOLD = """
import sys, time
from pathlib import Path
from inlay.storage.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process with the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_lock_that_is_taken_is_refused_at_once_and_ends_with_its_process(holder, tmp_path):
    with pytest.raises(InUse), locked(tmp_path / "lock", wait=False):
        pass  # waiting would never end: the holder holds on
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path / "lock", wait=False):
        pass


def test_a_writer_waits_for_a_reader_and_leaves_nothing_beside_the_folder(tmp_path):
    folder = tmp_path / "saved"
    with replacing(folder, ("inlay.json",)) as draft:
        (draft / "inlay.json").write_text("old")

    def write():
        with replacing(folder, ("inlay.json",)) as draft:
            (draft / "inlay.json").write_text("new")

    writer = threading.Thread(target=write)
    with reading(folder) as here:
        writer.start()
        time.sleep(0.1)
        assert (here / "inlay.json").read_text() == "old"
    writer.join()
    assert (folder / "inlay.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_two_folders_of_one_parent_do_not_wait_for_each_other(tmp_path):
    with folder_locked(tmp_path / "a"), folder_locked(tmp_path / "b"):
        pass


def test_a_cache_that_cannot_be_written_hinders_no_reader(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with reading(tmp_path / "file") as here:
        assert here.name == "file"
    assert list((tmp_path / "temporary").glob("inlay-*/locks/*.lock"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with reading(tmp_path / "file") as here:
        assert here.name == "file"
    with pytest.raises(OSError, match="set INLAY_CACHE"), replacing(tmp_path / "new", ("inlay.json",)):
        pass


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows gives each user a temporary folder of their own")
def test_locks_are_in_a_folder_of_ours_alone(tmp_path, monkeypatch):
    """Everybody may write into the system's temporary folder, and knows what ours is called there."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours, theirs = tmp_path / f"inlay-{os.getuid()}", tmp_path / "theirs"
    (theirs / "locks").mkdir(parents=True)
    ours.symlink_to(theirs)
    with reading(tmp_path / "saved"):
        pass
    with pytest.raises(OSError, match="set INLAY_CACHE"), replacing(tmp_path / "new", ("inlay.json",)):
        pass
    assert not list((theirs / "locks").iterdir())
    ours.unlink()
    ours.mkdir(mode=0o777)
    ours.chmod(0o777)
    with reading(tmp_path / "saved"):
        assert list(ours.glob("locks/*.lock"))
    assert ours.stat().st_mode & 0o777 == 0o700
    me = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: me + 1)
    ours.rename(tmp_path / f"inlay-{os.getuid()}")
    with pytest.raises(OSError, match="set INLAY_CACHE"), replacing(tmp_path / "new", ("inlay.json",)):
        pass


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path):
    """A run that somebody else made may have one, and opening a lock empties the file that is there."""
    (tmp_path / "precious").write_text("words")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"), locked(tmp_path / "lock", wait=False):
        pass
    assert (tmp_path / "precious").read_text() == "words"
