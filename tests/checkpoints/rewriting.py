"""Manifests that somebody with intent has changed."""

from __future__ import annotations

import json
from pathlib import Path

from inlay.storage.plain_json import digest_of


def rewrite(folder: Path, **changes: object) -> None:
    """Change a manifest and sign it anew, as somebody with intent would."""
    manifest = json.loads((folder / "inlay.json").read_text()) | changes
    manifest["sha256"] = digest_of(manifest)
    (folder / "inlay.json").write_text(json.dumps(manifest))
