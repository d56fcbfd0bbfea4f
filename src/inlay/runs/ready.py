"""From settings to a job that is ready: rows read, host open, what trains set in. Nothing is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate.tracking import get_available_trackers
from transformers import PreTrainedConfig, PreTrainedModel

from inlay.checkpoints.manifest import read_manifest
from inlay.data import Example, Prepared, Task, prepare
from inlay.errors import ConfigError, Problems
from inlay.methods import Method
from inlay.runs.allowed import Allowed
from inlay.runs.folder import Run, inlay_in, usual_name
from inlay.runs.job import Job
from inlay.runs.settings import FEW, FEW_LABELS, Settings, as_few, unused, unused_here
from inlay.runs.start import begun_from_a_run, method_of, norms_of, start_from
from inlay.training.batching import evenly
from inlay.training.codec import Codec, answer_form, asking, is_decoder
from inlay.training.generation import NEW_TOKENS, longest_answer
from inlay.training.joined import JoinedFeatures, check_packing
from inlay.training.loop import check_batch
from inlay.training.recipe import filled
from inlay.training.threads import use_threads
from inlay.training.workbench import Workbench, open_config


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
        settings.name or usual_name(settings.out),
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
    return Job(settings, with_unwritable(codec, found.prepared), bench.host, codec, name)


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


def with_unwritable(codec: Codec, prepared: Prepared) -> Prepared:
    """With a note of the labels that the host cannot write: it would never be right about them."""
    if not (labels := codec.unwritable()):
        return prepared
    note = (
        f"the host cannot write {', '.join(map(repr, labels))}, so that no answer to such rows is right: use "
        f"`answers` index, `answering` ranking, or other labels"
    )
    return replace(prepared, notes=(*prepared.notes, note))


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


@dataclass(frozen=True)
class _Found:
    """What the settings name, looked up."""

    method: Method | None
    prepared: Prepared
    members: list[Path]
    config: PreTrainedConfig


def _checked(settings: Settings, allowed: Allowed, resume: bool) -> _Found:
    """Method, rows, members and the host's config; whatever is wrong with any of them is said at once."""
    problems = Problems()
    method = problems.attempt(lambda: method_of(settings))
    prepared = problems.attempt(lambda: few_to_validate(prepare(settings), settings.eval_rows))
    members = problems.attempt(
        lambda: [inlay_in(member) for member in settings.members if read_manifest(inlay_in(member))]
    )
    config = problems.attempt(lambda: open_config(settings.host, trust_remote_code=allowed.trust_remote_code))
    if not resume:
        problems.add(unused(settings))
        if config is not None and prepared is not None:
            _check_fit(problems, settings, prepared.task, config)
    problems.attempt(lambda: check_trackers(settings.trackers))
    problems.refuse()
    assert prepared is not None
    assert members is not None
    assert config is not None
    return _Found(method, prepared, members, config)


def _check_fit(problems: Problems, settings: Settings, task: Task, config: PreTrainedConfig) -> None:
    """Settings that this task on this host does not use, and a metric to choose by that it does not have."""
    form = problems.attempt(lambda: answer_form(task, config))
    problems.add(unused_here(settings, task.kind, form, is_decoder(config)) if form else [])
    problems.attempt(lambda: settings.selected(dict.fromkeys(task.metrics, 0.0)))


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
