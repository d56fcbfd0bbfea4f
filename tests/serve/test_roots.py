"""No name and no path leads out of the root folder: nothing outside it is opened."""

from __future__ import annotations

import builtins
import io
import os
import random
import shutil
from pathlib import Path

import pytest

from inlay.errors import InlayError
from inlay.serve.errors import Forbidden, Invalid, NotFound, ServeError, public_text
from inlay.serve.pieces import piece_at
from inlay.serve.roots import below, inside
from tests.serve.conftest import ADMIN

PIECES = (
    "..", ".", "/", "\\", "//", "a", "b", "root", "etc", "passwd", "%2e%2e", "..%2f", "%00", "\0", "~", "~root", "C:", "file:",
    "inlay.json", "\u2025", "\uff0e\uff0e", "a" * 300, "\ud800", "\n", " ", "$HOME", "`id`", "'", '"', "<script>", "\x1b[2J", "proc", "self", "environ",
)  # fmt: skip


def hostile(count: int) -> list[str]:
    chance = random.Random(0)
    made = ["../secret", "/etc/passwd", "a/../../secret", "out", "a/out", "....//secret", "..\\secret", ""]
    while len(made) < count:
        joint = chance.choice(("", "/", "\\", "/../"))
        made.append(joint.join(chance.choice(PIECES) for _ in range(chance.randint(1, 5))))
    return made


@pytest.fixture
def tempting(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "inlay.json").write_text("{}")
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "trap").mkdir()
    (root / "trap" / "inlay.json").symlink_to(tmp_path / "secret" / "inlay.json")
    return root


def test_a_folder_below_the_root_is_found(tempting):
    assert below(tempting, "a") == (tempting / "a").resolve()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("out", Forbidden),
        ("trap", Forbidden),
        ("../secret", Invalid),
        ("/etc", Invalid),
        ("nothing", NotFound),
        (".", Forbidden),
    ],
)
def test_what_leads_out_is_refused(tempting, given, error):
    with pytest.raises(error):
        below(tempting, given)


def test_a_thousand_hostile_paths_open_nothing_outside(tempting, monkeypatch):
    real, opened = builtins.open, []
    watch = lambda file, *rest, **how: opened.append(os.path.realpath(file)) or real(file, *rest, **how)
    monkeypatch.setattr(builtins, "open", watch)
    monkeypatch.setattr(io, "open", watch)
    inside, said = os.path.realpath(tempting), []
    for given in hostile(1000):
        try:
            found = below(tempting, given)
        except ServeError as error:
            said.append(public_text(error))
        else:
            assert str(found).startswith(inside + os.sep)
    assert not opened
    assert str(tempting.parent) not in "".join(said)


@pytest.mark.long
def test_a_thousand_hostile_names_and_paths_over_http(guarded, monkeypatch):
    client, root, _engine = guarded
    real, opened = builtins.open, []

    def watch(file, *rest, **how):
        if isinstance(file, str | Path):
            opened.append(os.path.realpath(file))
        return real(file, *rest, **how)

    monkeypatch.setattr(builtins, "open", watch)
    monkeypatch.setattr(io, "open", watch)
    statuses = set()
    from urllib.parse import quote

    for i, given in enumerate(hostile(1000)):
        name = quote(given.encode("utf-8", "surrogatepass"), safe="")
        if i % 2:
            answer = client.put(
                f"/v1/inlays/{name}",
                content=b'{"path": "b"}',
                headers={"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"},
            )
        else:
            import json

            answer = client.put(
                "/v1/inlays/x",
                content=json.dumps({"path": given}),
                headers={"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"},
            )
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (given, answer.text)
        assert str(root.parent) not in answer.text
        if answer.status_code == 201:
            client.delete(f"/v1/inlays/{answer.json()['id']}", headers={"Authorization": f"Bearer {ADMIN}"})
    assert statuses <= {200, 201, 400, 403, 404, 405, 422}
    outside = [file for file in opened if not file.startswith(os.path.realpath(root))]
    assert not [file for file in outside if "inlay" in Path(file).name or "passwd" in file or "secret" in file]


def test_messages_have_no_folders():
    assert public_text("see /home/me/runs/rte/inlay.json: cut") == "see inlay.json: cut"
    assert public_text("C:\\Users\\me\\x is not") == "x is not"
    assert (
        public_text("a/b and 1/2 stay, so does https://example.org/x")
        == "a/b and 1/2 stay, so does https://example.org/x"
    )
    assert public_text("\x1b[2J") == "\\x1b[2J"
    assert len(public_text("x" * 10_000)) < 2100


def test_messages_have_the_routes_that_they_mean_and_still_no_folders():
    error = NotFound("no '/a b/c' in /srv/runs; ask /v1/classify.", urls=["'/a b/c'", "/v1/classify"])
    assert public_text(error) == "no '/a b/c' in runs; ask /v1/classify."
    assert public_text(Invalid("no '/a b/c' in /srv/runs")) == "no 'a b/c' in runs"


def test_members_of_a_fusion_are_looked_for_below_the_root_only(guarded, shop, tmp_path):
    client, root, engine = guarded
    shutil.copytree(shop / "inlays" / "fused-classification", root / "fused")
    shutil.rmtree(root / "b")
    shutil.copytree(shop / "inlays" / "b", tmp_path / "elsewhere")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    admin = {"Authorization": f"Bearer {ADMIN}"}
    refused = client.put("/v1/inlays/f", json={"path": "fused"}, headers=admin)
    assert refused.status_code == 422
    assert "its member 'b' is not on this host" in refused.text
    (root / "b").unlink()
    shutil.copytree(shop / "inlays" / "b", root / "b")
    assert client.put("/v1/inlays/f", json={"path": "fused"}, headers=admin).status_code == 201
    assert engine.models["f"].facts()["members"] == ["a", "b"]


def test_what_precedes_a_colon_in_a_folders_name_is_not_opened(tempting, monkeypatch):
    """`a:b` is also how a task of a joint run is called; as a folder below the root it is only that folder."""
    (tempting.parent / "secret" / "run.json").write_text("{}")
    (tempting / "some" / "run:task").mkdir(parents=True)
    (tempting / "some" / "run").symlink_to(tempting.parent / "secret")
    real, opened = io.open, []
    watch = lambda file, *rest, **how: opened.append(os.path.realpath(file)) or real(file, *rest, **how)
    monkeypatch.setattr(io, "open", watch)
    with pytest.raises(InlayError, match=r"has no inlay\.json"):
        piece_at(below(tempting, "some/run:task"), "x", inside(tempting))
    assert not [file for file in opened if "secret" in file]


def test_a_folder_that_leads_out_later_is_not_loaded_again(guarded, shop, tmp_path):
    """--reload looks at what requests have loaded too, and the folder may have become a link since."""
    client, root, engine = guarded
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert client.put("/v1/inlays/x", json={"path": "b"}, headers=headers).status_code == 201
    before = engine.classify("x", ["good w1"])
    shutil.copytree(shop / "inlays" / "classification-1", tmp_path / "outside")
    shutil.move(root / "b", tmp_path / "aside")
    (root / "b").symlink_to(tmp_path / "outside")
    assert engine.refresh() == []
    assert engine.classify("x", ["good w1"]) == before
    (root / "b").unlink()
    shutil.copytree(tmp_path / "outside", root / "b")
    assert engine.refresh() == ["x"]
    assert engine.classify("x", ["good w1"]) != before
