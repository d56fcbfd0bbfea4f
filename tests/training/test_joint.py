"""Several tasks in one training: what a step learns, what it leaves alone, and that nothing depends on being killed."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import pytest
import torch

import inlay
from inlay.data import Data, Example, Task, prepare
from inlay.data.mixing import Sampling
from inlay.host.verbs import inlays_of
from inlay.training.head_first import last_layer, reaching
from inlay.training.interrupt import Interrupted
from inlay.training.joint import JointLoop
from inlay.training.lesson import Lesson
from inlay.training.loop import TrainingLoop
from inlay.training.objectives import objective_for
from inlay.training.optimizer import rate_at
from inlay.training.pairs import pair_loss
from inlay.training.recipe import Recipe
from inlay.training.workbench import Workbench
from tests.training.ready import state
from tests.training.small import KINDS, rows, rows_of, save_bert, write_rows

RECIPE = Recipe(
    lr=1e-2, epochs=4, max_steps=24, batch_size=8, accumulate=2, eval_every=7, save_every=5, patience=0, seed=3
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A host without dropout, and toy rows of every kind."""
    folder = tmp_path_factory.mktemp("joint")
    save_bert(folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    save_bert(folder / "shaky")
    for kind in KINDS:
        write_rows(folder / kind / "train.jsonl", rows_of(kind, 40))
        write_rows(folder / kind / "validation.jsonl", rows_of(kind, 20, seed=1))
    for name, count, seed in (("a", 64, 0), ("b", 24, 5)):
        write_rows(folder / name / "train.jsonl", rows(count, seed=seed))
        write_rows(folder / name / "validation.jsonl", rows(20, seed=seed + 1))
    return folder


def joint(
    place, names=("a", "b"), *, host="bert", method=None, shared=True, seed=0, recipe=RECIPE, together=True, **more
):
    """A loop over tasks of these names, just before its first step."""
    columns = {"tags": {"text": "tokens", "label": "tags"}, "multilabel": {"label": "labels"}}
    prepared = {
        name: prepare(
            Data(
                task=f"task-{name}", kind=name if name in KINDS else None, **columns.get(name, {}),
                train_file=place / name / "train.jsonl", validation_file=place / name / "validation.jsonl",
            )
        )
        for name in names
    }  # fmt: skip
    torch.manual_seed(seed)
    bench = Workbench.open(str(place / host), prepared[names[0]].task)
    lessons = []
    for name in names:
        mine = bench.for_task(prepared[name].task)
        mine.set_up(name, "inlay", method=method or inlay.Pfeiffer(reduction=2), head=mine.head(dropout=0.0))
        codec = mine.codec(64)
        objective = objective_for(bench.host, name, recipe)
        lessons.append(
            Lesson(
                name, codec, codec.encode(prepared[name].train), codec.encode(prepared[name].validation), recipe,
                objective=objective, setup=name,
            )
        )  # fmt: skip
    inlay.train(bench.host, inlay.Rows(*names) if together else names[0], host_too=shared)
    inlays_of(bench.host).all.requires_grad_(True)
    return JointLoop(bench.host, lessons, recipe, **more)


def by_hand(loop, batch, shares):
    """Σ over a batch's rows, each run alone by the host with its own inlay; returns the gradients."""
    host = loop.host
    host.zero_grad(set_to_none=True)
    for task, row in batch:
        lesson = loop.lessons[task]
        inlay.activate(host, lesson.name)
        one = lesson.train.features.collate([row])
        labels, there = one.pop("labels"), one.pop("has_choice", None)
        logits = host(**one).logits
        if there is not None:
            logits = logits.flatten().unsqueeze(0)
        (lesson.codec.loss(logits, labels) * shares[task]).backward()
    return {name: p.grad.clone() for name, p in host.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("names", [("a", "b"), KINDS], ids=["alike", "every kind"])
def test_the_gradient_of_a_step_is_the_sum_over_its_rows(place, mixed, names):
    loop = joint(place, names, mixed=mixed, recipe=RECIPE.model_copy(update={"clip": 0.0, "accumulate": 1}))
    loop.host.train()
    batch = max(loop.batches.epoch(0), key=lambda batch: len({task for task, _ in batch}))
    assert len({task for task, _ in batch}) > (1 if mixed else 0)
    found = {}
    loop.optimizer.step = lambda: found.update(
        {name: p.grad.clone() for name, p in loop.host.named_parameters() if p.grad is not None}
    )
    loop.position.step = 1
    loop._train_step(batch)
    counts = {task: sum(1 for t, _ in batch if t == task) for task, _ in batch}
    mine = {task: [row for t, row in batch if t == task] for task in counts}
    weigh = {task: loop.lessons[task].train.features.weights(mine[task]) for task in counts}
    wanted = by_hand(loop, batch, {task: counts[task] / len(batch) / weigh[task] for task in counts})
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("shared", [True, False])
def test_a_task_that_is_not_drawn_keeps_its_inlay_and_its_optimiser_state(place, shared):
    loop = joint(place, shared=shared)
    loop.host.train()
    first = next(batch for batch in loop.batches.epoch(0) if batch[0][0] == 1)
    loop.position.step = 1
    loop._train_step(first)  # so that b has a state
    own = dict(inlays_of(loop.host)["b"].named_parameters())
    optimizer = loop.optimizer.optimizer
    weights = {name: p.detach().clone() for name, p in own.items()}
    states = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in own.items()}
    assert any(states.values())
    other = {name: p.detach().clone() for name, p in loop.learned.now.items() if name not in own}
    for batch in [batch for batch in loop.batches.epoch(1) if batch[0][0] == 0][:3]:
        loop._train_step(batch)
    for name, p in own.items():
        assert torch.equal(p, weights[name]), name
        assert all(torch.equal(v, states[name][k]) for k, v in optimizer.state[p].items()), name
    changed = [name for name, p in loop.learned.now.items() if name in other and not torch.equal(p, other[name])]
    assert any(".all.a." in name for name in changed)
    assert any(not name.startswith("inlays.") for name in changed) == shared


@pytest.mark.parametrize("pairs", [0.0, 2.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_side_by_side_is_each_alone_with_the_same_batches(place, mixed, pairs):
    """Θ frozen: one step after the other by torch itself, for each task alone, with the rows and rates that it had."""
    recipe = RECIPE.model_copy(update={"accumulate": 1, "clip": 0.05, "max_steps": 12, "pairs": pairs})
    loop = joint(place, shared=False, mixed=mixed, recipe=recipe, host="bert")
    seen = []
    original = loop._train_step
    loop._train_step = lambda batch: (seen.append((loop.position.step, batch)), original(batch))
    start = state(loop.host)
    loop.learned.restore = lambda: None  # the last state, not the best one
    loop.run()
    for task, lesson in enumerate(loop.lessons):
        host = loop.host
        now = state(host)
        host.load_state_dict(start)
        inlay.train(host, lesson.name)
        decay = [p for p in host.parameters() if p.requires_grad and p.dim() > 1]
        free = [p for p in host.parameters() if p.requires_grad and p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": free, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=recipe.lr)
        for step, batch in seen:
            mine = [row for t, row in batch if t == task]
            if mine:
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(step - 1, loop.total_steps, recipe)
                one = lesson.train.features.collate(mine)
                labels = one.pop("labels")
                with reaching(last_layer(host)) as reached:
                    loss = torch.nn.functional.cross_entropy(host(**one).logits, labels, reduction="sum")
                (loss * (1 / len(mine)) + pairs * pair_loss(reached[0], labels)).backward()
                torch.nn.utils.clip_grad_norm_([p for p in host.parameters() if p.requires_grad], recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
        for name, tensor in state(host).items():
            if f".all.{lesson.name}." in name:
                torch.testing.assert_close(now[name], tensor, atol=3e-6 if mixed else 0, rtol=1e-4 if mixed else 0)
        host.load_state_dict(now)


WAYS = {
    "one task per step": {},
    "mixed": {"mixed": True},
    "frozen": {"shared": False, "mixed": True},
    "of its own weight": {"sampling": Sampling(weights={"a": 1, "b": 3}), "steps_per_epoch": 5},
    "mixtures": {"method": inlay.Mixture(inlay.Pfeiffer(reduction=2), modules=2), "mixed": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_cut_goes_on_bit_for_bit(place, way, tmp_path, monkeypatch):
    whole = joint(place, host="shaky", checkpoint=tmp_path / "whole", **WAYS[way])
    outcome = whole.run()
    log: list[dict] = []
    for cut in (5, 13):  # within an epoch, and after the next one has begun
        with monkeypatch.context() as patch:
            patch.setattr("inlay.training.joint.JointLoop._leave_if_asked", _leave_at(cut))
            with pytest.raises(Interrupted):
                joint(place, host="shaky", checkpoint=tmp_path / "cut", log=log.append, **WAYS[way]).run()
    torch.manual_seed(12345)
    resumed = joint(place, host="shaky", seed=1, checkpoint=tmp_path / "cut", log=log.append, **WAYS[way])
    again = resumed.run()
    assert log == outcome.history
    assert again.scores == outcome.scores
    for name, tensor in state(whole.host).items():
        if name in whole.learned.now:
            assert torch.equal(tensor, state(resumed.host)[name]), name


def _leave_at(step):
    def leave(self, interrupts):
        if self.position.step == step:
            self._save()
            raise Interrupted(signal.SIGTERM)

    return leave


def test_the_draws_follow_the_shares_of_their_epoch_and_every_row_is_read_in_turn(place):
    loop = joint(place, sampling=Sampling(alpha=0), steps_per_epoch=40)
    read: dict[int, list[int]] = {0: [], 1: []}
    for epoch in range(4):
        batches = loop.batches.epoch(epoch)
        assert len(batches) == 40
        for batch in batches:
            assert len({task for task, _ in batch}) == 1
            read[batch[0][0]] += [row for _, row in batch]
    for task, count in ((0, 64), (1, 24)):
        passes = len(read[task]) // count
        assert passes > 3
        for i in range(passes):
            assert sorted(read[task][i * count : (i + 1) * count]) == list(range(count)), "each row once in a pass"


def test_accumulation_and_checkpointing_change_nothing(place):
    plain = RECIPE.model_copy(update={"accumulate": 1, "max_steps": 6, "eval_every": None})
    for mixed in (False, True):
        first = joint(place, recipe=plain, mixed=mixed)
        first.run()
        for more in ({"accumulate": 3}, {"gradient_checkpointing": True}):
            other = joint(place, recipe=plain.model_copy(update=more), mixed=mixed)
            other.run()
            for name, tensor in first.learned.now.items():
                torch.testing.assert_close(tensor, other.learned.now[name], atol=2e-5, rtol=1e-3, msg=name)
    assert any(getattr(module, "gradient_checkpointing", False) for module in other.host.modules())


def test_bfloat16_trains(place):
    outcome = joint(place, mixed=True, recipe=RECIPE.model_copy(update={"precision": "bf16", "max_steps": 3})).run()
    assert math.isfinite(outcome.history[0]["loss"])


def test_what_cannot_share_a_pass_is_run_task_by_task(place):
    said = joint(place, method=inlay.SAID(d=8), mixed=True, shared=False, together=False)
    assert not said._all_together()
    assert math.isfinite(said.run().history[0]["loss"])
    loop = joint(place, mixed=True)
    assert loop._all_together()
    batch = max(loop.batches.epoch(0), key=lambda batch: len({task for task, _ in batch}))
    found = {}
    for together in (False, True):
        loop.together = together
        loop.host.zero_grad(set_to_none=True)
        for rows_of_tasks, weights in loop._portions(batch):
            assert (len(rows_of_tasks) == 1) or together
            loop.loss_of(rows_of_tasks, weights, 1.0).backward()
        found[together] = {n: p.grad.clone() for n, p in loop.host.named_parameters() if p.grad is not None}
    for name, gradient in found[True].items():
        torch.testing.assert_close(gradient, found[False][name], atol=2e-6, rtol=1e-4)


def test_the_best_state_is_that_of_the_mean_or_of_one_task(place):
    for stop_on in ("mean", "b"):
        loop = joint(place, stop_on=stop_on)
        outcome = loop.run()
        main = [[e["a/validation_accuracy"], e["b/validation_accuracy"]] for e in outcome.history]
        values = [sum(pair) / 2 if stop_on == "mean" else pair[1] for pair in main]
        best = outcome.history[values.index(max(values))]
        assert outcome.best_step == best["step"]
        assert outcome.scores["a/accuracy"] == best["a/validation_accuracy"]
    with pytest.raises(inlay.ConfigError, match="`stop_on` is 'c'"):
        joint(place, stop_on="c")


def test_tasks_that_share_nothing_have_each_its_best_state(place):
    loop = joint(place, shared=False, host="shaky")
    outcome = loop.run()
    for name in ("a", "b"):
        curve = [entry[f"{name}/validation_accuracy"] for entry in outcome.history]
        assert outcome.scores[f"{name}/accuracy"] == max(curve)
        assert outcome.best_steps[name] == outcome.history[curve.index(max(curve))]["step"]


def test_tasks_that_share_nothing_may_choose_by_their_losses(place):
    """No metric is asked, so that each task's loss decides, and not the first evaluation."""
    outcome = joint(place, shared=False, recipe=RECIPE.model_copy(update={"select": "loss"})).run()
    for name in ("a", "b"):
        curve = [entry[f"{name}/validation_loss"] for entry in outcome.history]
        assert outcome.best_steps[name] == outcome.history[curve.index(min(curve))]["step"]
    assert max(outcome.best_steps.values()) > outcome.history[0]["step"]


def test_tasks_that_share_nothing_wait_for_each_other(place, monkeypatch):
    """One task falls while the other rises: the run goes on for the one that rises."""
    curves = {"a": iter([0.9, 0.1, 0.1, 0.1, 0.1]), "b": iter([0.1, 0.2, 0.3, 0.4, 0.5])}
    loop = joint(place, shared=False, recipe=RECIPE.model_copy(update={"patience": 1, "eval_every": 5}))
    for lesson in loop.lessons:
        monkeypatch.setattr(type(lesson.codec), "measure", _measured(curves), raising=True)
    outcome = loop.run()
    assert outcome.steps == 24
    assert outcome.best_steps == {"a": 5, "b": 24}


def _measured(curves):
    def measure(codec, split, answers):
        return {"accuracy": next(curves[codec.task.name.removeprefix("task-")])}

    return measure


def test_a_metric_that_says_nothing_does_not_choose_for_the_others(place, monkeypatch):
    """A correlation of equal answers is not defined; the mean is that of the rest, and not undefined for ever."""
    curves = {"a": iter([math.nan] * 5), "b": iter([0.1, 0.2, 0.3, 0.4, 0.5])}
    loop = joint(place, recipe=RECIPE.model_copy(update={"eval_every": 5}))
    monkeypatch.setattr(type(loop.lessons[0].codec), "measure", _measured(curves))
    outcome = loop.run()
    assert outcome.best_step == 24
    assert outcome.scores["b/accuracy"] == 0.5
    assert [entry["validation_mean"] for entry in outcome.history] == [0.05, 0.1, 0.15, 0.2, 0.25]


def test_a_loss_and_a_metric_have_no_mean(place):
    loop = joint(place)
    loss = [replace(loop.tasks[0], recipe=RECIPE.model_copy(update={"select": "loss"})), loop.tasks[1]]
    with pytest.raises(inlay.ConfigError, match="these have no mean"):
        JointLoop(loop.host, loss, RECIPE)
    outcome = JointLoop(loop.host, loss, RECIPE, stop_on="a").run()
    curve = [entry["a/validation_loss"] for entry in outcome.history]
    assert outcome.best_step == outcome.history[curve.index(min(curve))]["step"]


def test_the_host_has_a_learning_rate_of_its_own(place):
    loop = joint(place, host_lr=1e-3)
    loop.position.step = 10
    loop._train_step(loop.batches.epoch(0)[0])
    named = {p: name for name, p in loop.learned.now.items()}
    now = loop._lr()
    for group in loop.optimizer.param_groups:
        ours = {named[p].startswith("inlays.") for p in group["params"]}
        assert ours in ({True}, {False})
        assert group["lr"] == pytest.approx(now if ours == {True} else now / 10)


def test_contradicting_tasks_fail_on_a_shared_host_and_are_solved_by_inlays(place):
    """The same texts with opposite labels: one function cannot say both, one function and Φ_n can."""
    texts = [row["text"] for row in rows(64)]
    said = [int(row["label"] == "positive") for row in rows(64)]
    found = {}
    for way in ("shared", "inlays"):
        torch.manual_seed(0)
        task = Task(name="yes", labels=("no", "yes"))
        bench = Workbench.open(str(place / "bert"), task)
        codec = bench.codec(64)
        recipe = Recipe(lr=2e-2, epochs=14, batch_size=16, patience=0, seed=0)
        lessons = []
        for name, flip in (("yes", 0), ("no", 1)):
            if way == "inlays":
                inlay.add(bench.host, name, inlay.Pfeiffer(reduction=2), head=bench.head())
            split = codec.encode([Example(((t, None),), s ^ flip) for t, s in zip(texts, said, strict=True)])
            lessons.append(Lesson(name, codec, split, split, recipe, setup=name if way == "inlays" else None))
        if way == "inlays":
            inlay.train(bench.host, inlay.Rows("yes", "no"), host_too=True)
        else:
            bench.host.requires_grad_(True)
        found[way] = JointLoop(bench.host, lessons, recipe, sampling=Sampling(alpha=0), host_lr=2e-3).run()
    shared, own = ([o.scores[f"{n}/accuracy"] for n in ("yes", "no")] for o in found.values())
    assert sum(shared) == pytest.approx(1.0), "what is right for the one is wrong for the other"
    assert min(own) > 0.9


def test_one_task_alone_is_a_single_training(place):
    """With one task and as many steps a joint run does what the single loop does."""
    recipe = RECIPE.model_copy(update={"max_steps": 8, "eval_every": None})
    loop = joint(place, ("a",), recipe=recipe, shared=False)
    loop.run()
    other = joint(place, ("a",), recipe=recipe, shared=False)
    lesson = other.lessons[0]
    inlay.train(other.host, "a")
    single = TrainingLoop(other.host, lesson.codec, lesson.train, lesson.validation, recipe)
    single.run()
    for name, tensor in loop.learned.now.items():
        assert torch.equal(tensor, single.learned.now[name]), name
