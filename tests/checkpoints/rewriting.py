"""Manifests that somebody with intent has changed."""

from __future__ import annotations

import json
from pathlib import Path

from inlay.checkpoints import manifest as manifests


def rewrite(folder: Path, **changes: object) -> None:
    """Change a manifest and sign it anew, as somebody with intent would."""
    manifest = json.loads((folder / "inlay.json").read_text()) | changes
    manifest["sha256"] = manifests.digest_of(manifest)
    (folder / "inlay.json").write_text(json.dumps(manifest))
