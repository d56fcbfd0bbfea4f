"""One training job from its settings to a finished run folder: what `inlay train` and `inlay fuse` do."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import safetensors
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from inlay.checkpoints.fitting import host_fingerprint
from inlay.checkpoints.manifest import read_manifest
from inlay.checkpoints.ours import save
from inlay.data import Example, Prepared, Task, prepare
from inlay.errors import CheckpointError, ConfigError, InlayError
from inlay.host.verbs import inlays_of, summary
from inlay.methods import Method
from inlay.runs.folder import Run, inlay_in, versions
from inlay.runs.report import write_report
from inlay.runs.settings import FEW, FEW_LABELS, PATHS, Settings, as_few, unused, unused_here
from inlay.runs.start import begun_from_a_run, method_of, norms_of, start_from
from inlay.storage.files import digest
from inlay.storage.folders import replacing
from inlay.storage.plain_json import as_json
from inlay.training.batching import evenly
from inlay.training.codec import Answer, Codec, EncodedSplit, answer_form, asking, is_decoder
from inlay.training.evaluate import ask
from inlay.training.generation import NEW_TOKENS, longest_answer
from inlay.training.interrupt import Interrupted
from inlay.training.joined import JoinedFeatures, check_packing
from inlay.training.loop import Diverged, Outcome, TrainingLoop, accelerator_for, check_batch
from inlay.training.objectives import objective_for
from inlay.training.progress import Silent, Watcher, counter
from inlay.training.recipe import filled
from inlay.training.threads import use_threads
from inlay.training.workbench import Workbench, open_config

T = TypeVar("T")
Finishing = Callable[["Job", EncodedSplit, list[Answer]], None]
"""Is given the job with its best state, the judged rows and the answers to them, before the run counts as finished."""


@dataclass(frozen=True)
class Job:
    """Everything that is ready before the first step."""

    settings: Settings
    prepared: Prepared
    host: PreTrainedModel
    codec: Codec
    name: str | None
    """The inlay's name; None where the host alone trains."""

    def split(self, name: str) -> EncodedSplit:
        return self.codec.encode(self.prepared.split(name))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth saying before the first step."""
        return self.prepared.notes

    def facts(self) -> dict[str, Any]:
        """What the record says of it before the first step."""
        return _facts(self)

    def check_same(self, begun: dict[str, Any], facts: dict[str, Any], allowed: Allowed) -> None:
        """Refuse to go on with a run that began with something else."""
        check_same(begun, facts, allowed)

    def learn(
        self,
        run: Run,
        accelerator: Accelerator,
        watch: Watcher,
        finish: bool = False,
        finishing: Finishing | None = None,
    ) -> None:
        """Train, and write the result."""
        _train(self, run, accelerator, watch, finish, finishing)


class Work(Protocol):
    """A job of one task or of several, ready before its first step."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def facts(self) -> dict[str, Any]: ...

    def check_same(self, begun: dict[str, Any], facts: dict[str, Any], allowed: Allowed) -> None: ...

    def learn(
        self,
        run: Run,
        accelerator: Accelerator,
        watch: Watcher,
        finish: bool = False,
        finishing: Finishing | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class Allowed:
    """What a user has to say each time, because no file may say it for them."""

    any_host: bool = False
    """Go on with a host of the same form whose weights are others."""
    trust_remote_code: bool = False
    """Let the host's own Python code run."""


def get_ready(settings: Settings, allowed: Allowed = Allowed(), *, resume: bool = False) -> Job:  # noqa: B008 (frozen)
    """Read the rows, open the host, set in what trains. Nothing is written.

    resume: the settings are a run's own, of which an earlier version may have left some unused.
    """
    use_threads(settings.threads)
    settings = begun_from_a_run(settings)
    found = _checked(settings, allowed, resume)
    torch.manual_seed(settings.seed)
    said = settings
    if not resume or _began_as_few(settings.out):
        settings, found = _as_few(settings, found)
    settings = _as_one_batch(settings, said, len(found.prepared.train))
    check_batch(len(found.prepared.train), settings)
    trust = allowed.trust_remote_code
    bench = Workbench.open(settings.host, found.prepared.task, found.config, trust_remote_code=trust)
    head = None if bench.form != "labels" else bench.head(settings.head_layers, settings.head_dropout, settings.pooling)
    if head is not None and found.prepared.task.kind == "choice":
        head = head.model_copy(update={"choices": _choices_of_all(found.prepared.train)})
    name = bench.set_up(
        settings.name or _usual_name(settings.out),
        settings.mode,
        method=found.method,
        members=found.members,
        head=head,
        norms=norms_of(settings),
        fusion=settings.fusion_options(),
        any_host=allowed.any_host,
    )
    if settings.start is not None and name is not None:
        start_from(bench.host, name, inlay_in(settings.start))
    kind = found.method if found.method is not None else settings.mode
    whole = filled(settings, kind, text=bench.form == "text", fixed=not settings.validation)
    resolved = whole.model_dump(include={"lr", "epochs"})
    if found.method is not None:
        resolved["method"] = found.method.kind
    settings = settings.model_copy(update=resolved | {"name": name})
    codec = codec_for(bench, settings, found.prepared)
    if bench.form == "text":
        settings, codec = with_room(bench.host, settings, codec, found.prepared)
    return Job(settings, found.prepared, bench.host, codec, name)


def _as_few(settings: Settings, found: _Found) -> tuple[Settings, _Found]:
    """The settings as they are where training rows are few: those of the recipe for it, where none is named.

    What the user said stays. Hosts that answer in text have no new head to begin with; an inlay that goes on has one.
    """
    task, rows = found.prepared.task, len(found.prepared.train)
    if settings.recipe is not None or settings.start is not None or rows > FEW:
        return settings, found
    if answer_form(task, found.config) != "labels":
        return settings, found
    note = f"{rows:,} training rows are few: recipe {FEW_LABELS} is used (the usual one: default)"
    return as_few(settings), replace(found, prepared=replace(found.prepared, notes=(*found.prepared.notes, note)))


def _began_as_few(out: Path) -> bool:
    """Whether a run that goes on took the recipe for few rows when it began; one of an earlier version did not."""
    record = Run(out).record()
    return not record or (record.get("settings") or {}).get("recipe") == FEW_LABELS


def _as_one_batch(settings: Settings, said: Settings, rows: int) -> Settings:
    """Fewer rows than a batch are one, where neither its size nor a recipe was said; also of a run that goes on."""
    if said.recipe is not None or said.start is not None or "batch_size" in said.model_fields_set:
        return settings
    return settings.model_copy(update={"batch_size": max(1, min(rows, settings.batch_size))})


def with_room(host: PreTrainedModel, settings: Settings, codec: Codec, prepared: Prepared) -> tuple[Settings, Codec]:
    """How long an answer may be, where it was not said: as the longest to train on and a little more, from now on."""
    train = codec.encode(prepared.train)
    if isinstance(train.features, JoinedFeatures) and codec.packing:
        check_packing(host, train.features)
    most = settings.max_new_tokens or longest_answer(train) + NEW_TOKENS
    settings = settings.model_copy(update={"max_new_tokens": most})
    return settings, replace(codec, generation=settings.generation())


def codec_for(bench: Workbench, settings: Settings, prepared: Prepared) -> Codec:
    """The workbench's codec with the settings of the loss and of answering in text."""
    return replace(
        asking(bench.codec(settings.max_length), settings),
        label_smoothing=settings.label_smoothing,
        class_weights=_class_weights(settings, prepared),
    )


def _class_weights(settings: Settings, prepared: Prepared) -> tuple[float, ...] | None:
    """One number per label; balanced: rows / (labels · rows of the label), which is 1 in the mean over the rows."""
    labels = prepared.task.labels
    if settings.class_weights == "balanced":
        counts = Counter(int(example.target) for example in prepared.train)  # type: ignore[arg-type]
        rows = len(prepared.train)
        return tuple(rows / (len(labels) * max(1, counts[i])) for i in range(len(labels)))
    if settings.class_weights is not None and len(settings.class_weights) != len(labels):
        raise ConfigError(
            f"`class_weights` has {len(settings.class_weights)} numbers, but there are {len(labels)} labels: "
            f"{', '.join(labels)}. Give one for each, in this order."
        )
    return settings.class_weights


def _choices_of_all(examples: Sequence[Example]) -> int | None:
    """How many choices every row has, if all have as many."""
    counts = {len(example.texts) for example in examples}
    return counts.pop() if len(counts) == 1 else None


def _usual_name(out: Path) -> str:
    """An inlay is called like its run's folder, with what a name may hold."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(out).absolute().name).strip("._-")[:64] or "own"


@dataclass(frozen=True)
class _Found:
    """What the settings name, looked up."""

    method: Method | None
    prepared: Prepared
    members: list[Path]
    config: PretrainedConfig


def _checked(settings: Settings, allowed: Allowed, resume: bool) -> _Found:
    """Method, rows, members and the host's config; whatever is wrong with any of them is said at once."""
    problems: list[str] = []

    def look(up: Callable[[], T]) -> T:
        try:
            return up()
        except InlayError as error:
            problems.append(str(error))
            return cast(T, None)

    found = _Found(
        look(lambda: method_of(settings)),
        look(lambda: few_to_validate(prepare(settings), settings.eval_rows)),
        look(lambda: [inlay_in(member) for member in settings.members if read_manifest(inlay_in(member))]),
        look(lambda: open_config(settings.host, trust_remote_code=allowed.trust_remote_code)),
    )
    if not resume:
        problems += unused(settings)
        if found.config is not None and found.prepared is not None:
            task = found.prepared.task
            form = look(lambda: answer_form(task, found.config))
            problems += unused_here(settings, task.kind, form, is_decoder(found.config)) if form else []
            look(lambda: settings.selected(dict.fromkeys(task.metrics, 0.0)))
    look(lambda: check_trackers(settings.trackers))
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def few_to_validate(prepared: Prepared, most: int | None) -> Prepared:
    """Only some of the rows that choose the best state, evenly from all of them."""
    if most is None or most >= len(prepared.validation):
        return prepared
    kept = [prepared.validation[row] for row in evenly(len(prepared.validation), most)]
    note = f"{most} of {len(prepared.validation)} validation rows are asked"
    return replace(prepared, validation=kept, notes=(*prepared.notes, note))


def check_trackers(trackers: tuple[str, ...]) -> None:
    """A tracker that accelerate does not find would be left out silently."""
    there = {str(found.value) for found in get_available_trackers()}
    missing = [name for name in trackers if name not in there]
    if missing:
        raise ConfigError(
            f"`trackers`: {', '.join(missing)} is not installed. Install it with: pip install {' '.join(missing)}; "
            f"or leave it out."
        )


def train_run(
    settings: Settings,
    *,
    resume: bool = False,
    finish: bool = False,
    watch: Watcher | None = None,
    allowed: Allowed = Allowed(),  # noqa: B008 (it is frozen)
    finishing: Finishing | None = None,
) -> Run:
    """Train as the settings say, into `settings.out`. An interrupt saves the run and raises `Interrupted`.

    resume: go on from the run's checkpoint, with settings that may be others where `inlay train --resume` allows it.
    finish: train no further, and write the best state so far as the result.
    finishing: is called with the result before the run is noted as finished.
    """
    return carry_out(
        settings, get_ready, resume=resume, finish=finish, watch=watch, allowed=allowed, finishing=finishing
    )


S = TypeVar("S", bound=Settings)


def carry_out(
    settings: S,
    ready: Callable[..., Work],
    *,
    resume: bool,
    finish: bool,
    watch: Watcher | None,
    allowed: Allowed,
    finishing: Finishing | None = None,
) -> Run:
    """A job from its settings to its run folder: locked, noted as it goes, and whole or to be resumed at any moment."""
    watch = watch or Silent()
    run = Run(settings.out)
    check_trackers(settings.trackers)
    accelerator = accelerator_for(settings, settings.trackers, settings.out)
    if not accelerator.is_main_process:
        ready(settings, allowed, resume=resume).learn(run, accelerator, Silent(), finish)
        return run
    with run.locked(fresh=not resume):
        if finish and not run.checkpoint.exists():
            raise ConfigError(f"{run.folder} has no checkpoint yet, so there is nothing to finish with.")
        if resume and run.record().get("status") == "finished":
            raise ConfigError(f"{run.folder} is finished. Look at it with: inlay inspect {run.folder}")
        job = ready(settings, allowed, resume=resume)
        facts = job.facts() | {"processes": accelerator.num_processes}
        if resume:
            job.check_same(run.record(), facts, allowed)
        run.note(status="running", **facts)
        run.write_config(facts["settings"])
        for note in job.notes:
            watch.say(note)
        try:
            job.learn(run, accelerator, watch, finish, finishing)
        except Interrupted:
            run.note(status="interrupted")
            raise
        except Diverged as error:
            run.note(status="diverged")
            if error.best_step is None or not run.checkpoint.exists():
                raise
            raise Diverged.told(f"{error}\nTo take that state as the result: inlay finish {run.folder}") from None
    return run


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


def lasting(settings: Settings) -> dict[str, Any]:
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


def _train(
    job: Job,
    run: Run,
    accelerator: Accelerator,
    watch: Watcher,
    finish: bool = False,
    finishing: Finishing | None = None,
) -> None:
    if job.settings.trackers:
        accelerator.init_trackers("inlay", config={"task": job.prepared.task.name, "seed": job.settings.seed})
    if accelerator.is_main_process:
        _keep_members(job, run)
    loop = TrainingLoop(
        job.host,
        job.codec,
        job.split("train"),
        job.split("validation") if job.settings.validation else None,
        job.settings,
        objective=objective_for(job.host, job.name, job.settings),
        accelerator=accelerator,
        checkpoint=run.checkpoint,
        log=run.log,
        rewind=run.forget_after,
        watch=watch,
        title=job.name or "host",
        finish_now=finish,
    )
    outcome = loop.run()
    judged, answers = judge(job, outcome.answers, accelerator, watch)
    if accelerator.is_main_process:
        _finish(job, run, outcome, judged, answers, finishing)
    accelerator.end_training()


def judge(
    job: Job, known: list[Answer] | None, accelerator: Accelerator, watch: Watcher
) -> tuple[EncodedSplit, list[Answer]]:
    """The rows that give the final score, and the answers to them; `known`: those to the validation rows."""
    name = job.prepared.judge
    judged = job.split(name)
    if name == "validation" and known is not None:  # the same rows are asked once
        return judged, known
    watch.start(f"{name} rows", 0, len(judged.examples))
    try:
        count = counter(watch, len(judged.examples))
        return judged, ask(job.host, job.codec, judged, accelerator=accelerator, watch=count)
    finally:
        watch.stop()


def _keep_members(job: Job, run: Run) -> None:
    """Copies of what is fused, as it is when the run begins: it may be trained anew in its own place meanwhile."""
    for name, member in _members(job).items():
        if not (run.members / name).exists():
            run.keep_member(inlay_in(member), name)


def _members(job: Job) -> dict[str, Path]:
    """What is fused, by its names on the host."""
    if job.settings.mode != "fusion" or job.name is None:
        return {}
    return dict(zip(inlays_of(job.host)[job.name].method.needs, job.settings.members, strict=True))


def _finish(
    job: Job,
    run: Run,
    outcome: Outcome,
    judged: EncodedSplit,
    answers: list[Answer],
    finishing: Finishing | None = None,
) -> None:
    """Write the result; the checkpoint goes last, when nothing depends on it any more."""
    scores = job.codec.measure(judged, answers)
    if job.name is not None:
        data = noted(job.codec)
        save(job.host, job.name, run.inlay, task=job.prepared.task.name, metrics=scores, data=data)
        run.note(inlay_sha256=read_manifest(run.inlay).sha256)
    if job.settings.mode == "full":
        save_host(job.host, job.codec.tokenizer, run)
        run.note(files=files_of(run))
    run.note(judged=job.prepared.judge, scores=scores, validation=outcome.scores, **how_it_went(outcome))
    write_report(run, job.host, job.prepared.task, judged, answers)
    if finishing is not None:
        finishing(job, judged, answers)
    run.note(status="finished")
    run.checkpoint.unlink(missing_ok=True)


def how_it_went(outcome: Outcome) -> dict[str, Any]:
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


def save_host(host: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, run: Run) -> None:
    """The host after it was trained, and its tokenizer; whole or not there."""
    own = {name: tensor for name, tensor in host.state_dict().items() if not name.startswith("inlays.")}
    if broken := [name for name, tensor in own.items() if tensor.is_floating_point() and not tensor.isfinite().all()]:
        raise CheckpointError(f"the host's weights are not finite ({', '.join(broken[:4])}) and are not saved.")
    with replacing(run.host, ("config.json",), holds=None) as folder:
        try:
            host.save_pretrained(folder, state_dict=own)
            tokenizer.save_pretrained(folder)
        except safetensors.SafetensorError as error:  # how it tells of a full disk
            full = "os error 28" in str(error) or "No space" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(run.host)) from None


def noted(codec: Codec) -> dict[str, Any]:
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


def _rows_digest(rows: Sequence[Example]) -> str:
    found = hashlib.sha256()
    for row in rows:
        answers = (row.answers, row.before, row.after) if isinstance(row.target, str) else ()
        found.update(repr((row.texts, row.target, row.group, *answers)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _facts(job: Job) -> dict[str, Any]:
    settings = job.settings
    own = {"mode": settings.mode, "settings": lasting(settings)}
    if members := _members(job):
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
        "host": lasting(settings)["host"],
        "host_weights": host_fingerprint(host),
        "trained_parameters": sum(p.numel() for p in host.parameters() if p.requires_grad),
        "host_parameters": summary(host).host_parameters,
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "versions": versions(),
    }
