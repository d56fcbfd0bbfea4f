"""inlay.json: the description of a saved inlay, and the checks of its fields, format and digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from inlay.errors import CheckpointError, NamingError
from inlay.storage.folders import reading
from inlay.storage.names import NAME
from inlay.storage.plain_json import digest_of, read_json

FORMAT = 1
MANIFEST, WEIGHTS, CARD = "inlay.json", "weights.safetensors", "README.md"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class HostFacts(BaseModel):
    """What a manifest says of its host."""

    model_config = ConfigDict(strict=True, extra="forbid")

    family: str
    hidden_size: int = Field(ge=1)
    layers: dict[str, int]
    heads: int | None
    name: str
    weights: str | None = None
    """The fingerprint of the host's weights; earlier versions did not note it."""


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
    data: dict[str, Any] | None = None
    """The whole task and the longest input, so that an inlay alone can be used; earlier versions did not note it."""

    @field_validator("method")
    @classmethod
    def _named(cls, method: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(method.get("kind"), str):
            raise ValueError("it names no kind of method")
        return method

    @field_validator("host")
    @classmethod
    def _a_host(cls, host: dict[str, Any]) -> dict[str, Any]:
        HostFacts.model_validate(host)
        return host


def read_manifest(folder: Path) -> Manifest:
    """inlay.json of a folder that nobody replaces meanwhile, checked for form, format and its own digest."""
    with reading(folder) as there:
        return manifest_in(there)


def manifest_in(folder: Path) -> Manifest:
    """inlay.json of a folder that the caller holds by `reading`."""
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
        listed = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:20])
        raise CheckpointError(f"{file} has missing, unknown or wrong fields: {listed}.") from None
    if not NAME.fullmatch(manifest.name):
        raise NamingError(f"{file} names its inlay {manifest.name!r}, which cannot be a name.")
    return manifest


def _not_an_inlay(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder. Give the folder that inlay.save wrote."
    there = sorted(file.name for file in folder.iterdir())
    pickled = [file for file in there if file.endswith(PICKLED)]
    hint = f" {pickled[0]} looks like a pickle, which can run code and is never read." if pickled else ""
    return f"{folder} has no {MANIFEST}; it holds {', '.join(there[:8]) or 'nothing'}.{hint}"
