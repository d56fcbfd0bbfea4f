"""inlay.json: the description of a saved inlay, and the checks of its fields, format and digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inlay.errors import CheckpointError, NamingError
from inlay.host.verbs import NAME
from inlay.storage.plain_json import read_json

FORMAT = 1
MANIFEST, WEIGHTS, CARD = "inlay.json", "weights.safetensors", "README.md"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class Manifest(BaseModel):
    """What inlay.json holds."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: int = Field(ge=1)
    kind: Literal["inlay"]
    name: str
    method: dict[str, Any]
    host: dict[str, Any]
    head: dict[str, Any] | None
    norms: bool
    task: str | None
    metrics: dict[str, Any]
    versions: dict[str, str]
    members: dict[str, str]
    files: dict[str, str]
    sha256: str


def read_manifest(folder: Path) -> Manifest:
    """inlay.json, with its fields, format and digest checked."""
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(_not_an_inlay(folder))
    found = read_json(file)
    if not isinstance(found, dict) or type(found.get("format")) is not int:
        raise CheckpointError(f"{file} is not a manifest of Inlay.")
    if found["format"] > FORMAT:
        raise CheckpointError(
            f"{file} has format {found['format']}; this version of Inlay reads up to {FORMAT}. Upgrade inlay."
        )
    if found.get("sha256") != digest_of(found):
        raise CheckpointError(f"{file} is cut or altered: its content does not match its sha256.")
    try:
        manifest = Manifest.model_validate(found)
    except ValidationError as error:
        listed = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{file} has missing, unknown or wrong fields: {listed}.") from None
    if not NAME.fullmatch(manifest.name):
        raise NamingError(f"{file} names its inlay {manifest.name!r}, which cannot be a name.")
    return manifest


def digest_of(manifest: dict[str, Any]) -> str:
    """The digest of everything in a manifest except the digest itself."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _not_an_inlay(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder. Give the folder that inlay.save wrote."
    there = sorted(file.name for file in folder.iterdir())
    pickled = [file for file in there if file.endswith(PICKLED)]
    hint = f" {pickled[0]} looks like a pickle, which can run code and is never read." if pickled else ""
    return f"{folder} has no {MANIFEST}; it holds {', '.join(there[:8]) or 'nothing'}.{hint}"
