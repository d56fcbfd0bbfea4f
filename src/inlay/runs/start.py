"""Going on from what was trained before: a run as the host of the next one, an inlay as the start of another."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from inlay.checkpoints.fitting import describe_host, host_mismatches, misfit
from inlay.checkpoints.manifest import read_manifest
from inlay.checkpoints.ours import read
from inlay.errors import CheckpointError, ConfigError
from inlay.host.heads import Head
from inlay.host.verbs import inlays_of
from inlay.methods import Method, method_from
from inlay.runs.folder import inlay_in, run_at
from inlay.runs.settings import Settings, given_to


def begun_from_a_run(settings: Settings) -> Settings:
    """With a run as the host: its full host, or its host with its inlay as the start of the new one."""
    folder = Path(settings.host)
    run = run_at(folder)
    if run is None:
        return settings
    record = run.record()
    if record.get("status") != "finished":
        raise CheckpointError(f"the host {folder} is a run that is not finished. Go on: inlay train --resume {folder}")
    if run.host.is_dir():
        return settings.model_copy(update={"host": str(run.host)})
    if settings.mode == "full":
        raise ConfigError(
            f"the host {folder} is a run of mode {record['mode']}, whose inlay full fine-tuning would not use. "
            f"Use its own host {record['host']}, or a run of mode full."
        )
    changed: dict[str, object] = {"host": record["host"]}
    if settings.mode == "inlay" and settings.start is None:
        if record["mode"] != "inlay":
            raise ConfigError(
                f"the host {folder} is a run of mode {record['mode']}, which a single inlay cannot start from. "
                f"Use its own host {record['host']}."
            )
        changed["start"] = run.of_one_task().inlay
    return settings.model_copy(update=changed)


def method_of(settings: Settings) -> Method | None:
    """The method that is named, or the one of the inlay to start from."""
    if settings.mode != "inlay":
        return None
    if settings.start is None:
        return method_from({"kind": settings.method, **settings.options})
    manifest, said = read_manifest(inlay_in(settings.start)), given_to(settings)
    method = method_from(manifest.method)
    named = "method" in settings.model_fields_set and settings.method != settings.by_recipe().get("method")
    other = named and settings.method != method.kind
    if (
        method.needs
        or other
        or any(getattr(method, name, None) != value for name, value in said.get("options", {}).items())
    ):
        raise ConfigError(
            f"{settings.start} is a {method.kind} inlay with settings of its own; what starts from it has the same. "
            f"Leave `method` and `options` out, or start from an inlay of another method."
        )
    return method


def norms_of(settings: Settings) -> bool | None:
    """Whether the inlay owns norms: as it was said, or as the inlay to start from does."""
    if settings.norms is None and settings.start is not None:
        return read_manifest(inlay_in(settings.start)).norms
    return settings.norms


def _alike(one: Head, other: Head) -> bool:
    """Whether two heads are of one form; how many choices a row has is no part of it."""
    return one == other.model_copy(update={"choices": one.choices})


def start_from(host: PreTrainedModel, name: str, folder: Path) -> None:
    """Copy a saved inlay's weights into one on the host: all of them, its head only where the labels are the same."""
    manifest, tensors = read(folder)
    inlays = inlays_of(host)
    inlay = inlays[name]
    problems = host_mismatches(manifest.host, describe_host(host, inlays.anatomy))
    head = None if manifest.head is None else Head(**manifest.head)
    same_head = head is not None and inlay.head is not None and _alike(head, inlay.head)
    mine = {key: tensor for key, tensor in inlay.tensors().items() if same_head or not key.startswith("head.")}
    problems += [
        f"{key} has shape {tuple(tensors[key].shape)}, here it has {tuple(tensor.shape)}"
        for key, tensor in mine.items()
        if key in tensors and tensors[key].shape != tensor.shape
    ]
    if not any(key in tensors for key in mine):
        problems.append("it has no weights in common with the new inlay")
    if problems:
        raise misfit(folder, problems)
    with torch.no_grad():
        for key, tensor in mine.items():
            if key in tensors:
                tensor.copy_(tensors[key])
