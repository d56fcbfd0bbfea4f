"""What a run's record says of its job, before the first step and after the last; and whether two are the same."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from inlay.checkpoints.fitting import host_fingerprint
from inlay.checkpoints.manifest import read_manifest
from inlay.data import Example, Task
from inlay.errors import ConfigError
from inlay.host.verbs import summary
from inlay.runs.allowed import Allowed
from inlay.runs.folder import Run, inlay_in, versions
from inlay.runs.job import Job
from inlay.runs.settings import PATHS, Settings
from inlay.storage.files import digest
from inlay.storage.plain_json import as_json
from inlay.training.codec import Codec
from inlay.training.loop import Outcome


def facts_of(job: Job) -> dict[str, Any]:
    """What a record says of a job of one task."""
    settings = job.settings
    own = {"mode": settings.mode, "settings": settings_to_record(settings)}
    if members := job.members:
        own["members_sha256"] = {name: read_manifest(inlay_in(path)).sha256 for name, path in members.items()}
    return facts_of_task(job) | own | facts_of_host(job.host, settings)


def facts_of_task(job: Job) -> dict[str, Any]:
    """What a record says of one task: its labels, rows, inlay and longest input."""
    settings, prepared = job.settings, job.prepared
    return {
        "task": prepared.task.model_dump(mode="json", exclude={"hub"}),
        "method": settings.method if settings.mode == "inlay" else None,
        "name": job.name,
        "rows": {split: len(getattr(prepared, split)) for split in ("train", "validation", "test")},
        "rows_sha256": {split: _rows_digest(getattr(prepared, split)) for split in ("train", "validation", "test")},
        "notes": list(prepared.notes),
        "max_length": job.codec.max_length,
    }


def facts_of_host(host: PreTrainedModel, settings: Settings) -> dict[str, Any]:
    """What a record says of the host and the machine."""
    return {
        "host": settings_to_record(settings)["host"],
        "host_weights": host_fingerprint(host),
        "trained_parameters": sum(p.numel() for p in host.parameters() if p.requires_grad),
        "host_parameters": summary(host).host_parameters,
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "versions": versions(),
    }


def _rows_digest(rows: Sequence[Example]) -> str:
    found = hashlib.sha256()
    for row in rows:
        answers = (row.answers, row.before, row.after) if isinstance(row.target, str) else ()
        found.update(repr((row.texts, row.target, row.group, *answers)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def check_same(begun: dict[str, Any], now: dict[str, Any], allowed: Allowed) -> None:
    """A checkpoint is a place among the rows that the run began with, and of the host that it began with."""
    if not begun:
        return
    if (begun["rows"], Task(**begun["task"])) != (now["rows"], Task(**now["task"])):
        then, here = (f"rows {facts['rows']}, labels {facts['task'].get('labels')}" for facts in (begun, now))
        raise ConfigError(f"the files are not those that the run began with ({then}; now {here}). Start a new run.")
    if begun.get("rows_sha256", now["rows_sha256"]) != now["rows_sha256"]:
        other = [split for split, found in now["rows_sha256"].items() if begun["rows_sha256"].get(split) != found]
        raise ConfigError(
            f"the {' and '.join(other)} rows are not those that the run began with: as many, but others. "
            f"Start a new run."
        )
    fused = now.get("members_sha256", {})
    other = [name for name, found in fused.items() if begun.get("members_sha256", fused).get(name) != found]
    if other:
        raise ConfigError(
            f"{', '.join(other)}: not what the run began to fuse; its files have changed since. Start a new run."
        )
    check_same_host(begun, now, allowed)


def check_same_host(begun: dict[str, Any], now: dict[str, Any], allowed: Allowed) -> None:
    weights = begun.get("host_weights"), now["host_weights"]
    if None not in weights and weights[0] != weights[1] and not allowed.any_host:
        raise ConfigError(
            f"the host {now['host']} has other weights than the one that the run began with ({begun['host']}). "
            f"Give that one as `host`, start a new run, or go on all the same with `any_host`."
        )


def settings_to_record(settings: Settings) -> dict[str, Any]:
    """Every setting, with paths that hold from any folder."""
    found = dict(json.loads(as_json(settings.model_dump(mode="json", exclude_none=True, exclude={"out"}))))
    for name in PATHS:
        if name in found:
            found[name] = str(Path(found[name]).absolute())
    found["members"] = [str(member.absolute()) for member in settings.members]
    if settings.start is not None:
        found["start"] = str(settings.start.absolute())
    if Path(settings.host).is_dir():
        found["host"] = str(Path(settings.host).absolute())
    return found


def training_facts(outcome: Outcome) -> dict[str, Any]:
    """Steps, time and memory of a training, for the record."""
    return {
        "best_step": outcome.best_step,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 1),
        "examples_per_second": round(outcome.examples_per_second, 2),
        "padding": round(outcome.padding, 4),
        "peak_megabytes": peak_megabytes(),
    }


def files_of(run: Run) -> dict[str, str]:
    """The digests of the host's files."""
    return {f"host/{file.name}": digest(file) for file in sorted(run.host.iterdir()) if file.is_file()}


def manifest_data(codec: Codec) -> dict[str, Any]:
    """What an inlay's manifest says of its task, so that it can be used without its run."""
    found = {"task": codec.task.model_dump(mode="json", exclude={"hub"}), "max_length": codec.max_length}
    if codec.form == "text":
        found["generation"] = codec.generation.model_dump(mode="json", exclude_defaults=True)
    return found


def peak_megabytes() -> float | None:
    """The most memory that this process has had; Windows does not say.

    Linux says it twice, and what getrusage says counts the process that started this one as well.
    """
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        if (found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.M)) is not None:
            return round(int(found[1]) / 1024, 1)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 1024 / (1024 if sys.platform == "darwin" else 1), 1)  # macOS counts bytes, Linux kilobytes
