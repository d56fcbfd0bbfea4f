"""What studies cost beside the training itself.

    python -m benchmarks.study [--cells 2000] [--epochs 30] [--seeds 4] [--skip-speedup]

    show, table     CPU seconds of `inlay study show` and `table` on a study whose cells are all done; nothing is
                    trained, the cells are written here, each with its answers to 1,000 rows. Target: under 2 s.
    scheduling      CPU milliseconds a cell that a runner takes to look at the folder, to choose the next cell and to
                    learn what cells cost, in a study of 440 cells of which none is trained. Target: at most 10.
    two processes   the same study with one process and with two, wall-clock, one after the other. Target: 1.7 times as
                    fast. It needs two idle cores.
    engine          the share of a short cell's CPU time that is not its training: names, leases, looking, answers, the
                    measured step. Target: at most 5 %.

The host is a BERT of two layers with random weights; rows are words drawn by chance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

WORDS = tuple(f"w{i}" for i in range(40))
COMMAND = [sys.executable, "-c", "from inlay.cli import main; main()", "study"]


def save_host(folder: Path, width: int = 128) -> None:
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(names), hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=64,
    )  # fmt: skip
    hf.BertModel(config).save_pretrained(folder)


def save_rows(folder: Path, tasks: int) -> None:
    for task in range(tasks):
        for split, count in (("train", 600), ("test", 200)):
            chance = random.Random(f"{task} {split}")  # noqa: S311 (rows)
            file = folder / f"t{task}" / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = []
            for i in range(count):
                words = [chance.choice(WORDS) for _ in range(24)]
                rows.append(json.dumps({"text": " ".join(words), "label": ("no", "yes")[i % 2]}))
            file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def write_study(folder: Path, name: str, **said: Any) -> Path:
    file = folder / f"{name}.yaml"
    whole = {"hosts": {"bert": str(folder / "host")}, "data_dir": str(folder / "rows")} | said
    file.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
    return file


def finished(folder: Path, cells: int) -> tuple[Path, int]:
    """A study of ten tasks and ten ways whose cells are all done; nothing is trained."""
    from inlay.studies.cells import StudyFolder
    from inlay.studies.file import read_study
    from inlay.studies.plan import Plan, View

    seeds = max(1, cells // 100)
    ways = {f"way{i}": {"options": {"size": i + 1}} for i in range(10)}
    tasks = [f"t{i}" for i in range(10)]
    file = write_study(folder, "large", tasks=tasks, seeds=list(range(seeds)), against="way0", ways=ways)
    plan, out = Plan.of(read_study(file)), folder / "large"
    there = StudyFolder(out)
    there.claim(plan.facts())
    names, chance = View(plan, there).look().names(), random.Random(0)  # noqa: S311
    right = "".join(chance.choice("01") for _ in range(1000))
    for name, cell in names.items():
        said = "".join(label if chance.random() < 0.8 else "10"[int(label)] for label in right)
        there.write_result(name, result(cell.identity, cell.slot.task, right, said))
    return out, len(names)


def result(identity: Mapping[str, Any], task: str, right: str, said: str) -> dict[str, Any]:
    """What a cell that was trained would say."""
    score = sum(a == b for a, b in zip(right, said, strict=True)) / len(right)
    return {
        "identity": dict(identity), "work": "train", "judged_sha256": "same", "right": right, "said": said,
        "task": {"name": task, "kind": "classification", "metrics": ["accuracy"], "labels": 2, "positive_index": 1},
        "rows": {"train": 600, "validation": 60, "test": len(right)}, "judged": "test", "scores": {"accuracy": score},
        "validation": {"accuracy": score}, "selected": score, "trained_parameters": 1000,
        "host_parameters": 10**6, "stored_bytes": 4000, "steps": 100, "best_step": 100, "seconds": 1.0,
        "whole_seconds": 1.5, "peak_megabytes": 500.0,
        "history": [[i, 0.5, score] for i in range(10)], "notes": [], "versions": {},
    }  # fmt: skip


def scheduling(folder: Path) -> tuple[float, int]:
    """CPU seconds of running a study whose cells take no time at all, without writing their results; and its cells."""
    from inlay.studies.cells import StudyFolder
    from inlay.studies.engines.base import Ended, Moved
    from inlay.studies.file import read_study
    from inlay.studies.plan import Plan, View
    from inlay.studies.schedule import Schedule

    ways = {f"way{i}": {"options": {"size": i + 1}} for i in range(11)}
    tasks = [f"t{i}" for i in range(10)]
    plan = Plan.of(read_study(write_study(folder, "scheduled", tasks=tasks, seeds=[0, 1, 2, 3], ways=ways)))
    there = StudyFolder(folder / "scheduled")
    there.claim(plan.facts())
    writing = 0.0

    class AtOnce:
        def __init__(self) -> None:
            self.events: list[Ended | Moved] = []

        def room(self, megabytes: float) -> bool:
            return not self.events

        def start(self, cell: str, description: Any, megabytes: float) -> None:
            nonlocal writing
            began = time.process_time()
            there.write_result(cell, result(description["identity"], description["settings"]["task"], "01", "01"))
            self.events.append(Ended(cell, "finished", ""))
            writing += time.process_time() - began

        def wait(self, seconds: float) -> list[Ended | Moved]:
            found, self.events = self.events, []
            return found

        def stop(self) -> None: ...

    began = time.process_time()
    view = Schedule(View(plan, there), AtOnce()).run()
    return time.process_time() - began - writing, len(view.results)


def cpu_seconds(words: list[str]) -> float:
    """Of a process, its threads and its children."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} left with code {process.returncode}")
    return used.ru_utime + used.ru_stime


def speedup(folder: Path, epochs: int, seeds: int) -> tuple[float, float]:
    """Wall-clock seconds with one process and with two."""
    ways = {"single": {"options": {"size": 16}}}
    settings = {"epochs": epochs, "batch_size": 32, "patience": 0}
    file = write_study(folder, "short", tasks=["t0", "t1"], seeds=list(range(seeds)), settings=settings, ways=ways)
    took = []
    for count in (1, 2):
        began = time.monotonic()
        words = [
            *COMMAND,
            "run",
            str(file),
            "--out",
            str(folder / f"with-{count}"),
            "--processes",
            str(count),
            "--quiet",
        ]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        took.append(time.monotonic() - began)
    return took[0], took[1]


def engine_share(folder: Path, epochs: int) -> tuple[float, float]:
    """CPU seconds of a study of short cells in this process, and those outside of training."""
    import inlay.runs.train as train
    from inlay.studies.cells import StudyFolder
    from inlay.studies.engines.base import Ended, Moved
    from inlay.studies.file import read_study
    from inlay.studies.plan import Plan, View
    from inlay.studies.schedule import Schedule
    from inlay.studies.worker import run_cell

    inside = {"training": 0.0, "finishing": 0.0}
    usual = train.train_run

    def timed(settings: Any, *, finishing: Any, **more: Any) -> Any:
        def finish(*words: Any) -> None:
            began = time.process_time()
            finishing(*words)
            inside["finishing"] += time.process_time() - began

        began = time.process_time()
        try:
            return usual(settings, finishing=finish, **more)
        finally:
            inside["training"] += time.process_time() - began

    class Here:
        def __init__(self) -> None:
            self.events: list[Ended | Moved] = []

        def room(self, megabytes: float) -> bool:
            return not self.events

        def start(self, cell: str, description: Any, megabytes: float) -> None:
            self.events.append(Ended(cell, *run_cell(description)))

        def wait(self, seconds: float) -> list[Ended | Moved]:
            found, self.events = self.events, []
            return found

        def stop(self) -> None: ...

    settings = {"epochs": epochs, "batch_size": 32, "patience": 0}
    ways = {"single": {"options": {"size": 16}}}
    file = write_study(folder, "engine", tasks=["t0", "t1"], seeds=[0, 1], settings=settings, ways=ways)
    for turn in ("warm", "measured"):  # the first one imports
        there = StudyFolder(folder / turn)
        inside.update(training=0.0, finishing=0.0)
        train.train_run = timed  # type: ignore[assignment]
        began = time.process_time()
        plan = Plan.of(read_study(file))
        there.claim(plan.facts())
        Schedule(View(plan, there), Here()).run()
        whole = time.process_time() - began
        train.train_run = usual
    return whole, whole - inside["training"] + inside["finishing"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--skip-speedup", action="store_true", help="Without the two runs on the clock.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_host(folder / "host")
        save_rows(folder / "rows", 10)
        out, count = finished(folder, asked.cells)
        for verb in ("show", "table"):
            seconds = min(cpu_seconds([*COMMAND, verb, str(out)]) for _ in range(3))
            print(
                f"{verb:<6} of {count:,} finished cells   {seconds:5.2f} s CPU   target < 2   {_told(seconds < 2)}",
                flush=True,
            )
        seconds, count = scheduling(folder)
        each = 1000 * seconds / count
        print(
            f"scheduling of {count} cells   {each:5.2f} ms CPU a cell   target ≤ 10   {_told(each <= 10)}", flush=True
        )
        whole, engine = engine_share(folder, asked.epochs)
        share = 100 * engine / whole
        cell = whole / 4
        print(
            f"engine's share of a cell of {cell:.1f} s   {share:5.2f} %   target ≤ 5   {_told(share <= 5)}", flush=True
        )
        if not asked.skip_speedup:
            one, two = speedup(folder, asked.epochs, asked.seeds)
            ratio = one / two
            print(f"one process {one:.1f} s, two {two:.1f} s   {ratio:5.2f} ×   target ≥ 1.7   {_told(ratio >= 1.7)}")


def _told(good: bool) -> str:
    return "ok" if good else "FAIL"


if __name__ == "__main__":
    main()
