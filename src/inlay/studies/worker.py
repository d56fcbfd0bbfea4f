"""One cell, from its description to cell.json. The same function runs in local processes and as a Ray task.

A description is plain data, so that it can be sent anywhere:

    folder, cell       the study's folder and the cell's name
    work               train, joint, part, embeddings, setfit or route
    settings           as `inlay train` has them, the host's place among them
    members, start, of the names of the cells that it needs
    identity           all that decides its name
    again              whether it is run although its record is here, for its weights
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from inlay.errors import ConfigError, InlayError
from inlay.storage.files import is_full, write_whole
from inlay.storage.locks import InUse, locked
from inlay.storage.plain_json import as_json, number, read_json
from inlay.studies.cells import PARTS, Result, StudyFolder
from inlay.studies.ways import JOINT

if TYPE_CHECKING:
    from inlay.data import Example, Prepared, Task
    from inlay.runs.folder import TaskRun
    from inlay.runs.job import Finishing, Job
    from inlay.runs.joint_settings import JointSettings
    from inlay.runs.settings import Settings
    from inlay.studies.baseline import Fitted
    from inlay.training.codec import Answer, EncodedSplit
    from inlay.training.progress import Watcher

Ending = Literal["finished", "elsewhere", "interrupted", "failed", "full"]
"""How running a cell ended. elsewhere: another process has it. full: the disk is."""
Description = Mapping[str, Any]
ANSWERS = "answers.json"
ATTENTION_ROWS = 256
"""Validation rows that a fusion's attention is measured on."""
LEAK = 0.2
"""The share of judged rows that may also be trained on or choose: data sets repeat some."""


def run_cell(cell: Description, watch: Watcher | None = None) -> tuple[Ending, str]:
    """Run a cell that nobody else runs, or go on with it; how it ended, and what went wrong."""
    folder, name = StudyFolder(Path(cell["folder"])), str(cell["cell"])
    try:
        with locked(folder.lease(name), wait=False):
            if folder.result(name) is not None:
                if not cell.get("again") or folder.has_weights(name):
                    return "finished", ""
                folder.as_record(name)  # its weights are needed; what it said stays
            folder.log("begin", name)
            ending, error = _run(folder, name, cell, watch)
            folder.log(ending, name, **({"error": error.strip().split("\n")[-1][:400]} if error else {}))
            return ending, error
    except InUse:
        return "elsewhere", ""
    except OSError as problem:
        ending, error = _of_the_disk(problem)
        if ending == "failed":
            with suppress(OSError):  # it may be the very folder that cannot be written to
                folder.note_failure(name, error, final=False)
        return ending, error


def _run(folder: StudyFolder, name: str, cell: Description, watch: Watcher | None) -> tuple[Ending, str]:
    from inlay.training.interrupt import Interrupted

    _forget_peak()
    began = time.monotonic()
    try:
        result = WORK[cell["work"]](folder, name, cell, watch)
        result["whole_seconds"] = round(time.monotonic() - began, 3)
        folder.write_result(name, {"identity": dict(cell["identity"]), "work": cell["work"]} | result)
        folder.forgive(name)
        if cell.get("drop_host"):
            folder.drop_host(name)
        return "finished", ""
    except (Interrupted, KeyboardInterrupt):
        return "interrupted", ""
    except OSError as problem:
        ending, error = _of_the_disk(problem)
        if ending == "failed":
            folder.note_failure(name, error, final=False)
        return ending, error
    except InlayError as problem:
        folder.note_failure(name, str(problem), final=True)
        return "failed", str(problem)
    except Exception:  # whatever a cell breaks on, the others go on
        folder.note_failure(name, traceback.format_exc(), final=False)
        return "failed", traceback.format_exc()


def _of_the_disk(problem: OSError) -> tuple[Ending, str]:
    return ("full" if is_full(problem) else "failed"), str(problem)


# the works


def _train(folder: StudyFolder, name: str, cell: Description, watch: Watcher | None) -> Result:
    from inlay.data import prepare
    from inlay.runs.folder import Run
    from inlay.runs.settings import Settings
    from inlay.runs.train import train_run

    run = Run(folder.cell(name))
    said = dict(cell["settings"]) | {"out": run.folder, "threads": 1}
    needs = [*(cell.get("members") or ()), *([cell["start"]] if cell.get("start") else [])]
    if (host := folder.host_of(needs)) is not None:
        said["host"] = host
    if cell.get("members"):
        said["members"] = tuple(folder.place(member) for member in cell["members"])
    if cell.get("start"):
        said["start"] = folder.place(cell["start"])
    settings, record = Settings(**said), run.record()
    if record.get("status") != "finished":
        check_apart(prepare(settings))
        keep = _finishing(lambda job: run.folder / ANSWERS, folder, needs)
        train_run(settings, resume=bool(record), watch=watch, finishing=keep)
        if record:
            write_whole(run.folder / "resumed", "")  # its seconds are not those of the whole run
        record = run.record()
    return _of_record(record, run.folder, run.folder / ANSWERS) | _over_time(run.history(), record, settings)


def _joint(folder: StudyFolder, name: str, cell: Description, watch: Watcher | None) -> Result:
    """Train several tasks together; `_part` says what came of each."""
    from inlay.data import prepare
    from inlay.runs.folder import Run
    from inlay.runs.joint import train_jointly

    run, settings = Run(folder.cell(name)), _joint_settings(folder.cell(name), cell["settings"])
    record = run.record()
    if record.get("status") != "finished":
        for task, own in settings.tasks:
            check_apart(prepare(settings.task_settings(task, own)))
        shared = [name] if settings.mode in ("mt-a", "full") else []  # on a frozen host no task learns from another
        keep = _finishing(lambda job: run.folder / PARTS / f"{job.settings.task}.json", folder, shared)
        train_jointly(settings, resume=bool(record), watch=watch, finishing=keep)
        if record:
            write_whole(run.folder / "resumed", "")
        record = run.record()
    parts = {task.task: _of_task(run.folder, task, settings) for task in run.tasks()}
    kept = ("trained_parameters", "host_parameters", "steps", "best_step", "seconds", "notes", "versions")
    return {name: record[name] for name in kept} | {
        "task": {"name": JOINT, "kind": "joint", "metrics": ["mean"], "labels": 0},
        "rows": record["rows"],
        "judged": "test",
        "scores": {"mean": _mean([next(iter(part["scores"].values())) for part in parts.values()])},
        "validation": {"mean": _mean([next(iter(part["validation"].values()), None) for part in parts.values()])},
        "selected": _mean([part["selected"] for part in parts.values()]),
        "resumed": (run.folder / "resumed").exists(),
        "peak_megabytes": record.get("peak_megabytes"),
        "host_bytes": _host_bytes(run.folder),
    }


def _part(folder: StudyFolder, name: str, cell: Description, watch: Watcher | None) -> Result:
    """One task of a joint training that is done: an equal share of its time and of the host that it left."""
    from inlay.runs.folder import Run

    whole = folder.cell(cell["of"])
    run = Run(whole)
    tasks = {task.task: task for task in run.tasks()}
    settings = _joint_settings(whole, run.config())
    folder.note_part(name, cell["of"], cell["settings"]["task"])
    found = _of_task(whole, tasks[cell["settings"]["task"]], settings)
    host = (folder.result(cell["of"]) or {}).get("host_bytes") or _host_bytes(whole)  # the host itself may be gone
    return found | {
        "seconds": round(found["seconds"] / len(tasks), 3),
        "stored_bytes": found["stored_bytes"] + host // len(tasks),
        "together_with": [task for task in tasks if task != cell["settings"]["task"]],
    }


def _joint_settings(out: Path, said: Mapping[str, Any]) -> JointSettings:
    from inlay.runs.joint_settings import JointSettings

    return JointSettings(**dict(said) | {"out": out, "threads": 1})


def _of_task(folder: Path, task: TaskRun, settings: JointSettings) -> Result:
    """What a joint run says of one of its tasks."""
    record = task.record()
    own = settings.task_settings(task.task, dict(settings.tasks)[task.task])
    found = _of_record(record, task.inlay.parent.parent, folder / PARTS / f"{task.task}.json", task.inlay)
    return found | _over_time(task.history(), record, own)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _finishing(
    file_of: Callable[[Job], Path], folder: StudyFolder | None = None, needs: Sequence[str] = ()
) -> Finishing:
    """Keeps what only the run itself knows: its answers, their loss, a fusion's attention, judged rows known before."""
    from inlay.host.verbs import activate
    from inlay.studies.answers import judged_facts
    from inlay.studies.efficiency import step_costs
    from inlay.studies.overlap import seen_before
    from inlay.training.evaluate import attention_on

    def keep(job: Job, judged: EncodedSplit, answers: list[Answer]) -> None:
        if job.name is not None:
            activate(job.host, job.name)  # of several tasks, another one may be
        facts = judged_facts(job.prepared.task, judged.examples, [answer.prediction for answer in answers])
        facts["loss"] = _loss(judged.examples, answers)
        facts["costs"] = step_costs(job)
        if folder is not None and (seen := seen_before(folder, needs, job.prepared.task.name, judged.examples)):
            facts["seen_before"] = seen
        if job.settings.mode == "fusion":
            assert job.name is not None
            some = job.codec.encode((job.prepared.validation or job.prepared.train)[:ATTENTION_ROWS])
            heard = attention_on(job.host, job.name, some)
            facts["attention"] = {
                "members": list(heard.members),
                "places": {place: [round(share, 5) for share in mean.tolist()] for place, mean in heard.mean.items()},
            }
        write_whole(file_of(job), as_json(facts))

    return keep


def _of_record(record: dict[str, Any], folder: Path, answers: Path, inlay: Path | None = None) -> Result:
    """What the run's record and its answers say, as a cell's result."""
    from inlay.data import Task

    weights = (inlay or folder / "inlay") / "weights.safetensors"
    stored = _host_bytes(folder) if record["mode"] == "full" and inlay is None else 0
    return read_json(answers) | {
        "task": _task_facts(Task(**record["task"])),
        "rows": record["rows"],
        "judged": record["judged"],
        "scores": record["scores"],
        "validation": record["validation"],
        "trained_parameters": record["trained_parameters"],
        "host_parameters": record["host_parameters"],
        "stored_bytes": stored or (weights.stat().st_size if weights.is_file() else 0),
        "steps": record["steps"],
        "batch_size": (record.get("settings") or {}).get("batch_size"),
        "best_step": record["best_step"],
        "seconds": record["seconds"],
        "rows_per_second": record["examples_per_second"],
        "resumed": (folder / "resumed").exists(),
        "peak_megabytes": record.get("peak_megabytes"),
        "notes": record["notes"],
        "versions": record["versions"],
    }


def _host_bytes(folder: Path) -> int:
    """What the host that a run left takes."""
    return sum(file.stat().st_size for file in (folder / "host").glob("*.safetensors"))


def _over_time(entries: list[dict[str, Any]], record: dict[str, Any], settings: Settings) -> Result:
    """[step, training loss, main validation metric] of every evaluation, and what a grid is chosen by.

    Where no metric decides, it is the lowest loss of the validation rows.
    """
    validation = {key: number(value) for key, value in record["validation"].items()}
    selected = settings.selected(validation)[1] if validation else math.nan
    losses = [entry["validation_loss"] for entry in entries if entry.get("validation_loss") is not None]
    if math.isnan(selected) and losses:
        selected = -min(losses)
    main = f"validation_{next(iter(validation), None)}"
    history = [[entry["step"], _short(entry.get("loss")), _short(entry.get(main))] for entry in entries]
    return {"history": history, "selected": None if math.isnan(selected) else selected}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _embeddings(folder: StudyFolder, name: str, cell: Description, watch: Watcher | None) -> Result:
    from inlay.studies.baseline import fit

    settings, prepared = _rows_for(folder, name, cell)
    found = fit(settings.host, prepared, cell["more"]["C"], settings.max_length)
    return _of_fitted(settings, prepared, found) | {
        "point": {"C": found.C},
        "stored_bytes": 4 * found.trained_parameters,
    }


def _setfit(folder: StudyFolder, name: str, cell: Description, watch: Watcher | None) -> Result:
    from importlib.metadata import version

    from inlay.studies.contrastive import fit

    settings, prepared = _rows_for(folder, name, cell)
    found = fit(settings.host, prepared, settings.max_length, settings.seed, cell["more"])
    result = _of_fitted(settings, prepared, found)
    return result | {
        "stored_bytes": 4 * found.trained_parameters,
        "versions": result["versions"] | {"setfit": version("setfit")},
    }


def _rows_for(folder: StudyFolder, name: str, cell: Description) -> tuple[Settings, Prepared]:
    """Settings and rows of a cell that does not train as `inlay train` does."""
    from inlay.data import prepare
    from inlay.runs.ready import few_to_validate
    from inlay.runs.settings import Settings
    from inlay.training.threads import use_threads

    settings = Settings(**dict(cell["settings"]) | {"out": folder.cell(name)})
    use_threads(1)
    prepared = few_to_validate(prepare(settings), settings.eval_rows)
    check_apart(prepared)
    return settings, prepared


def _of_fitted(settings: Settings, prepared: Prepared, found: Fitted) -> Result:
    from inlay.data.metrics import score
    from inlay.runs.facts import peak_megabytes
    from inlay.runs.folder import versions
    from inlay.studies.answers import judged_facts

    task, examples = prepared.task, prepared.split(prepared.judge)
    scores = score(task, [e.target for e in examples], found.said, [e.group for e in examples])
    return judged_facts(task, examples, found.said) | {
        "task": _task_facts(task),
        "rows": {split: len(getattr(prepared, split)) for split in ("train", "validation", "test")},
        "judged": prepared.judge,
        "scores": scores,
        "validation": found.validation,
        "selected": settings.selected(found.validation)[1] if found.validation else None,
        "trained_parameters": found.trained_parameters,
        "host_parameters": found.host_parameters,
        "seconds": found.seconds,
        "peak_megabytes": peak_megabytes(),
        "notes": list(prepared.notes),
        "versions": versions(),
    }


def _route(folder: StudyFolder, name: str, cell: Description, watch: Watcher | None) -> Result:
    """Ask a mixture by others of its modules than their mean. Nothing is trained."""
    import torch

    from inlay.runs.facts import peak_megabytes
    from inlay.runs.folder import versions
    from inlay.runs.use import open_for_use
    from inlay.studies.answers import judged_facts
    from inlay.training.evaluate import Route
    from inlay.training.threads import use_threads

    use_threads(1)
    began, said = time.monotonic(), cell["settings"]
    opened = open_for_use(folder.cell(cell["of"]), said["host"])
    torch.manual_seed(int(said["seed"]))
    judged, examples = opened.rows(None, None, Path(said["data_dir"]) if said.get("data_dir") else None)
    encoded = opened.codec.encode(examples)
    how = cell["more"]
    answers = opened.answers(encoded, watch, Route(routing=how["routing"], passes=how["passes"]))
    of = folder.result(cell["of"])
    assert of is not None, "what is asked is done before"
    kept = ("rows", "validation", "selected", "trained_parameters", "host_parameters", "stored_bytes", "notes")
    facts = judged_facts(opened.codec.task, examples, [answer.prediction for answer in answers])
    return (
        facts
        | {name: of[name] for name in kept}
        | {
            "task": _task_facts(opened.codec.task),
            "judged": judged,
            "scores": opened.codec.measure(encoded, answers),
            "loss": _loss(examples, answers),
            "seconds": round(time.monotonic() - began, 3),
            "peak_megabytes": peak_megabytes(),
            "versions": versions(),
        }
    )


WORK: dict[str, Callable[[StudyFolder, str, Description, Watcher | None], Result]] = {
    "train": _train,
    "joint": _joint,
    "part": _part,
    "embeddings": _embeddings,
    "setfit": _setfit,
    "route": _route,
}


# their parts


def check_apart(prepared: Prepared) -> None:
    """Refuse rows that judge what they, or their copies, have chosen or taught."""
    if prepared.judge == "validation":
        raise ConfigError(
            f"{prepared.task.name} has no test rows, so that its validation rows would choose and judge at once. "
            f"Use splits: held_out, or give a test_file."
        )
    judged = {_as_written(example) for example in prepared.test}
    for split in ("validation", "train"):
        shared = len(judged & {_as_written(example) for example in getattr(prepared, split)})
        if shared > LEAK * len(judged):
            raise ConfigError(
                f"{prepared.task.name}: {shared:,} of the {len(judged):,} judged texts are {split} rows as well, so "
                f"that the score would not be one of unseen rows. Give others as test rows."
            )


def _as_written(example: Example) -> tuple[str, ...]:
    """An example's texts, as they are in any file: another file of the same rows may differ in spaces and case."""
    return tuple(" ".join((text or "").casefold().split()) for pair in example.texts for text in pair)


def _task_facts(task: Task) -> dict[str, Any]:
    positive = task.labels.index(task.positive) if task.positive in task.labels else len(task.labels) - 1
    facts = {"name": task.name, "kind": task.kind, "metrics": list(task.metrics), "labels": len(task.labels)}
    return facts | ({"positive_index": positive} if task.kind == "classification" else {})


def _loss(examples: Sequence[Example], answers: Sequence[Answer]) -> float | None:
    """The mean of −log p of the right label; None where there are no probabilities of labels."""
    likely = []
    for example, answer in zip(examples, answers, strict=True):
        right, shares = example.target, answer.probabilities or ()
        if not isinstance(right, int) or not 0 <= right < len(shares):
            return None
        likely.append(shares[right])
    return round(sum(-math.log(max(p, 1e-12)) for p in likely) / len(likely), 5)


def _forget_peak() -> None:
    """A worker runs many cells; the peak of each counts from its own beginning (Linux).

    What earlier cells have left free goes back to the system first, or it would be counted again.
    """
    if sys.platform != "linux":  # Windows cannot even be asked for the process's own library
        return
    gc.collect()
    with suppress(OSError, AttributeError):  # not every C library can trim
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
