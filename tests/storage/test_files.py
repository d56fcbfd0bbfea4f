"""A file is the old one or the new one; the cache folder is where the system keeps such things."""

import errno
import os
import sys
import types
from pathlib import Path

import pytest

from inlay.storage.cache import cache_folder
from inlay.storage.files import write_whole
from inlay.storage.folders import replacing


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.txt", "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a.txt", "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_the_cache_is_where_the_user_says_or_where_the_system_keeps_such_things(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("INLAY_CACHE")
    asked = types.SimpleNamespace(user_cache_dir=lambda name, **more: f"/caches/{name}")
    monkeypatch.setitem(sys.modules, "platformdirs", asked)
    assert cache_folder() == Path("/caches/inlay")


@pytest.mark.skipif(os.name == "nt", reason="modes are of POSIX")
def test_what_a_user_keeps_private_stays_private(tmp_path):
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "new.txt", "mine")
        with replacing(tmp_path / "folder", ("manifest.json",)) as folder:
            (folder / "manifest.json").write_text("{}")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new.txt", "folder")] == [0o600, 0o700]
    (tmp_path / "folder").chmod(0o750)
    write_whole(tmp_path / "new.txt", "again")
    with replacing(tmp_path / "folder", ("manifest.json",)) as folder:
        (folder / "manifest.json").write_text("{}")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new.txt", "folder")] == [0o600, 0o750]
