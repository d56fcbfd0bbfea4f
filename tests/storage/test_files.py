"""A file is the old one or the new one; the cache folder is where the system keeps such things."""

import errno
import os
import sys
import types
from pathlib import Path

import pytest

from inlay.storage.cache import cache_folder
from inlay.storage.files import write_whole


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
