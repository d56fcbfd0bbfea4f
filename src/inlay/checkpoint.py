"""Save and load: a folder of JSON and safetensors that proves itself whole before anything on the host is changed.

    <folder>/inlay.json            what it is: format, method, host, head, labels, versions, digests
             weights.safetensors   <place>.<parameter>, shared.<parameter>
             README.md             a model card for people; not read back

`folders.py` writes it whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.anatomy import Anatomy
from inlay.errors import CheckpointError, InlayError, NamingError
from inlay.folders import reading, replacing
from inlay.heads import Head
from inlay.host import NAME, bare, free_name, inlays_of, newcomer
from inlay.methods.base import method_from
from inlay.methods.fusion import Fusion
from inlay.registry import Inlay, Inlays

FORMAT = 1
MANIFEST, WEIGHTS, CARD = "inlay.json", "weights.safetensors", "README.md"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
LARGEST_MANIFEST = 4 << 20


def save(
    host: nn.Module, name: str, path: str | os.PathLike[str], *,
    task: str | None = None, metrics: dict[str, float] | None = None,
) -> Path:  # fmt: skip
    """Write an inlay to a folder, whole or not at all. `task` and `metrics` are noted in the manifest and the card."""
    model, inlays = bare(host), inlays_of(host)
    inlay = inlays[name]
    manifest = {
        "format": FORMAT,
        "kind": "inlay",
        "name": name,
        "method": inlay.method.describe(),
        "host": describe_host(model, inlays.anatomy),
        "head": None if inlay.head is None else inlay.head.model_dump(mode="json"),
        "norms": inlay.norms,
        "task": task,
        "metrics": metrics or {},
        "versions": {package: importlib.metadata.version(package) for package in ("inlay", "torch", "transformers")},
        "members": {member: identity(inlays[member]) for member in getattr(inlay.method, "members", ())},
    }
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in inlay.tensors().items()}
    return write(Path(path), manifest, tensors, card(manifest, tensors))


def load(
    host: nn.Module, path: str | os.PathLike[str], *,
    name: str | None = None, any_members: bool = False, pickled: bool = False,
) -> str | Any:  # fmt: skip
    """Set a saved inlay into a host, under its own or another name; returns the name. All mismatches come at once.

    Folders of `adapters` and `peft` are known by their files and read too; a whole setup of `adapters` returns the
    setup to activate instead of a name.
    any_members: a fusion needs its members on the host, and the very ones it was trained with unless this is set.
    pickled:     also read the `.bin` files of those libraries, as tensors only: nothing in them is executed.
    """
    model = bare(host)
    with reading(Path(path)) as folder:
        if not (folder / MANIFEST).exists():
            from inlay import interop  # it is built on this module

            if (read_foreign := interop.reader_of(folder)) is not None:
                with torch.random.fork_rng(devices=[]):  # building it takes nothing from the run's random numbers
                    return read_foreign(model, folder, name, pickled)
        manifest, tensors = read(folder)
    name = manifest.name if name is None else name
    free_name(model, name)
    with newcomer(model) as inlays, torch.random.fork_rng(devices=[]):
        problems = host_mismatches(manifest.host, describe_host(model, inlays.anatomy))
        here = names_here(manifest.members, inlays)
        members = {here[member]: wanted for member, wanted in manifest.members.items()}
        problems += member_mismatches(members, inlays, any_members)
        try:
            head = None if manifest.head is None else Head(**manifest.head)
            method = method_from(manifest.method)
            if set(getattr(method, "members", ())) != set(manifest.members):
                problems.append("its settings and its manifest name different members")
            elif isinstance(method, Fusion):
                method = method.renamed(here)
            inlays.check_members(tuple(member for member in members if member in inlays))
            draft = Inlay(name, method, head, manifest.norms).fill(model, inlays.anatomy, device="meta")
            problems += tensor_mismatches(draft.tensors(), tensors)
        except InlayError as error:
            problems.append(str(error))
        if problems:
            raise misfit(folder, problems)
        inlay = Inlay(name, method, head, manifest.norms).fill(model, inlays.anatomy)
        pour(inlay, tensors)
        inlay.origin = fingerprint(tensors), fingerprint(inlay.tensors())
        inlays.admit(model, inlay)
    return name


def misfit(folder: Path, problems: list[str]) -> CheckpointError:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return CheckpointError(f"{folder} does not fit this host; nothing was changed:\n{listed}")


def pour(inlay: Inlay, tensors: dict[str, Tensor]) -> None:
    """Put saved tensors into a freshly built inlay."""
    with torch.no_grad():
        for key, tensor in inlay.tensors().items():
            tensor.copy_(tensors[key])


def describe_host(host: PreTrainedModel, anatomy: Anatomy) -> dict[str, Any]:
    """What an inlay has to find again in the host it is loaded into."""
    config = host.config.get_text_config()
    return {
        "family": anatomy.family,
        "hidden_size": anatomy.width,
        "layers": dict(anatomy.depth),
        "heads": getattr(config, "num_attention_heads", None),
        "name": str(getattr(host.config, "name_or_path", "") or ""),
    }


def host_mismatches(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [
        f"it was made for a host with {what} {saved.get(what)!r}, this one has {here[what]!r}"
        for what in ("family", "hidden_size", "layers", "heads") if saved.get(what) != here[what]
    ]  # fmt: skip


def names_here(saved: dict[str, str], inlays: Inlays) -> dict[str, str]:
    """Each member's name on this host, where it may have another one: it is known by its weights."""
    found = {m: m for m, wanted in saved.items() if m in inlays and identity(inlays[m]) == wanted}
    if len(found) < len(saved):
        others = {identity(inlay): inlay.name for inlay in inlays if inlay.name not in found}
        found |= {m: others.pop(wanted) for m, wanted in saved.items() if m not in found and wanted in others}
    here = {m: found.get(m, m) for m in saved}
    return here if len(set(here.values())) == len(saved) else {m: m for m in saved}


def member_mismatches(saved: dict[str, str], inlays: Inlays, any_members: bool) -> list[str]:
    problems = [f"its member {member!r} is not on this host; load it first" for member in saved if member not in inlays]
    if not any_members:
        problems += [
            f"its member {member!r} is not the one it was trained with: the weights differ "
            f"(any_members=True loads all the same)"
            for member, wanted in saved.items() if member in inlays and identity(inlays[member]) != wanted
        ]  # fmt: skip
    return problems


def identity(inlay: Inlay) -> str:
    """By what a fusion knows a member again: the fingerprint of its file while it has not changed since, or its own."""
    now = fingerprint(inlay.tensors())
    return inlay.origin[0] if inlay.origin is not None and inlay.origin[1] == now else now


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tensor_mismatches(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    problems = [f"tensor {key} is missing" for key in wanted.keys() - found.keys()]
    problems += [f"tensor {key} is not expected" for key in found.keys() - wanted.keys()]
    problems += [
        f"tensor {key} has shape {tuple(found[key].shape)}, expected {tuple(wanted[key].shape)}"
        for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape
    ]  # fmt: skip
    return sorted(problems)


def write(folder: Path, manifest: dict[str, Any], tensors: dict[str, Tensor], text: str) -> Path:
    """The folder, complete on disk before it has its name."""
    with replacing(folder, (MANIFEST,)) as temporary:
        (temporary / CARD).write_text(text, encoding="utf-8")
        safetensors.torch.save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        whole = manifest | {"files": {WEIGHTS: _digest(temporary / WEIGHTS)}}
        whole["sha256"] = digest_of(whole)
        (temporary / MANIFEST).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return Path(os.path.abspath(folder))


def read(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Manifest and tensors of a folder, both proven unaltered."""
    manifest = read_manifest(folder)
    problems = []
    for file, digest in manifest.files.items():
        if Path(file).name != file:
            problems.append(f"{file} is not a plain file name")
        elif not (folder / file).is_file():
            problems.append(f"{file} is missing")
        elif _digest(folder / file) != digest:
            problems.append(f"{file} is cut or altered: its sha256 is not the one in {MANIFEST}")
    if WEIGHTS not in manifest.files:
        problems.append(f"{MANIFEST} names no {WEIGHTS}")
    if problems:
        raise CheckpointError(f"{folder} is not whole:\n" + "\n".join(f"  - {p}" for p in problems))
    try:
        return manifest, safetensors.torch.load_file(folder / WEIGHTS)
    except (safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is not a safetensors file: {error}") from None


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
    """inlay.json, checked for form, format and its own digest."""
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


def read_json(file: Path) -> Any:
    """What a small JSON file holds."""
    try:
        if file.stat().st_size > LARGEST_MANIFEST:
            raise ValueError("it is larger than a manifest can be")
        return json.loads(file.read_text(encoding="utf-8"), parse_int=_integer)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None


def _integer(digits: str) -> int:
    """No size or count needs more digits, and Python refuses to print or convert what has thousands."""
    if len(digits) > 20:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def digest_of(manifest: dict[str, Any]) -> str:
    """The digest of a manifest without its own digest."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def card(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A model card in Markdown."""
    count, size = sum(t.numel() for t in tensors.values()), sum(t.numel() * t.element_size() for t in tensors.values())
    host, method = manifest["host"], dict(manifest["method"])
    sizes = f"{host['family']}, hidden size {host['hidden_size']}, layers {host['layers']}"
    facts = {
        "Method": method.pop("kind"),
        "Host": f"{host['name'] or 'not named'} ({sizes})",
        "Parameters": f"{count:,} ({size / 1024:,.0f} KB)",
        "Task": manifest["task"] or "not named",
        **{f"Metric {key}": value for key, value in manifest["metrics"].items()},
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    settings = json.dumps(method, indent=1)
    return (
        f"---\nlibrary_name: inlay\ntags: [inlay, {facts['Method']}]\n---\n"
        f"# {manifest['name']}\n\n| | |\n|---|---|\n{table}\n\n"
        f"```python\nimport inlay\n\n"
        f'inlay.load(host, "path/to/this/folder")\ninlay.activate(host, "{manifest["name"]}")\n```\n\n'
        f"```json\n{settings}\n```\n"
    )


def _not_an_inlay(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder. Give the folder that inlay.save wrote."
    there = sorted(file.name for file in folder.iterdir())
    pickled = [file for file in there if file.endswith(PICKLED)]
    hint = f" {pickled[0]} looks like a pickle, which can run code and is never read." if pickled else ""
    return f"{folder} has no {MANIFEST}; it holds {', '.join(there[:8]) or 'nothing'}.{hint}"


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
