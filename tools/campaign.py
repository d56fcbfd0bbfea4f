"""A saboteur's night: kills, flipped bits and hostile files against the command line. Bounded, and the same for a seed.

    python tools/campaign.py             the whole campaign: 100 kills, 1,000 flips, 300 hostile files
    python tools/campaign.py --short     a tenth of it or less, as the tests run it

Each trial runs a verb in a process of its own, forked from one that has imported everything. It counts

    tracebacks    a verb left with an exit code that is neither 0 nor 2 nor that of a signal it handles
    changed       a verb succeeded and said something else than before the damage
    lost          a folder that was there is gone or cannot be used, or a killed run cannot be taken up again
    endless       a verb took longer than the limit

and leaves with exit code 1 unless all of them are 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
LIMIT = 120.0
"""Seconds that a verb may take; a hundred times what it does take."""
WARM = (
    "matplotlib.backends.backend_svg", "sklearn.metrics", "transformers.models.bert.modeling_bert",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers", "inlay.runs.estimate", "inlay.runs.prune", "inlay.runs.use",
)  # fmt: skip
ROWS = ("--train-file", "train.jsonl", "--validation-file", "validation.jsonl", "--batch-size", "16", "--threads", "1")
FAST = ("--epochs", "1", "--lr", "0.01", "--save-every", "1", "--quiet")
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**9, 10**30, 1e308, float("nan"), float("inf"), "", "x", "no", "{", "\0", "\ud800", "[/b]", "[red]x",
    "\x1b[31m", "../../etc", "/dev/null", "a" * 10_000, "🙂", "1" * 5000, [], [[]], {}, {"kind": "mixture"}, [None], ["a", "a"],
    {"a": {"b": {"c": []}}}, "<script>alert(1)</script>", "${HOME}", "*x", "&x", "!!python/object:os.system", "1e-3", "0x10", "~",
)  # fmt: skip


@dataclass
class Tally:
    """What was tried and what came of it."""

    tried: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def found(self, what: str, trial: str, told: str = "") -> None:
        self.wrong[what] += 1
        print(f"{what}: {trial}\n{told[-1500:]}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Said:
    """How a verb ended."""

    code: int
    out: str
    err: str


class Place:
    """The folder of the campaign: a tiny host, rows, and runs of every mode that nobody touches."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance, self.tally = folder, random.Random(seed), Tally()  # noqa: S311 (not for secrets)
        os.environ |= {"INLAY_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.chdir(folder)

    def build(self) -> None:
        from tests.training.small import rows, save_bert, write_rows

        self.apart(lambda: save_bert(self.folder / "bert"))
        write_rows(self.folder / "train.jsonl", rows(48))
        write_rows(self.folder / "validation.jsonl", rows(16, seed=1))
        host = ("train", "--host", "bert", *ROWS, *FAST)
        self.must(*host, "--out", "good/a")
        self.must(*host, "--out", "good/b", "--options", "reduction=4")
        self.must(*host, "--out", "good/full", "--mode", "full")
        self.must(
            *host, "--out", "good/mixture", "--method", "mixture", "--options", "method={kind: pfeiffer, size: 4}"
        )
        self.must("fuse", "good/a", "good/b", *ROWS, *FAST, "--out", "good/fused")
        self.interrupted(*host, "--out", "good/cut")

    def warm_up(self) -> None:
        """Import what verbs import as they go, once for all processes that are forked. No thread may run here then."""
        for name in WARM:
            import_module(name)
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
        threads = [name for name in names if name != "jemalloc_bg_thd"]  # pyarrow's, which no verb waits for
        assert len(threads) < 2, f"a forked process may wait for ever for one of these threads: {threads}"

    def interrupted(self, *words: str) -> None:
        """A run that was asked to stop after its first step."""
        from inlay.training.loop import TrainingLoop

        step = TrainingLoop._train_step

        def stop_after(loop: Any, rows: list[int]) -> None:
            step(loop, rows)
            os.kill(os.getpid(), signal.SIGTERM)

        TrainingLoop._train_step = stop_after  # type: ignore[method-assign]
        try:
            assert self.run(*words).code == 128 + signal.SIGTERM
        finally:
            TrainingLoop._train_step = step  # type: ignore[method-assign]

    def apart(self, work: Callable[[], object]) -> None:
        """Do something in a process of its own, where the threads that it starts do no harm."""
        child = os.fork()
        if not child:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                work()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def start(self, *words: str) -> int:
        """A verb in a process of its own; what it says is in out.txt and err.txt."""
        child = os.fork()
        if child:
            return child
        for number, name in ((1, "out.txt"), (2, "err.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = 1
        try:
            from inlay.cli import main

            sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 (the process ends with it)
            main(list(words))
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def run(self, *words: str) -> Said:
        """A verb to its end, or to the limit."""
        child, began = self.start(*words), time.monotonic()
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() - began > LIMIT:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self.tally.found("endless", " ".join(words)[:300])
                return Said(2, "", "")
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(status)
        out, err = (Path(name).read_text(encoding="utf-8", errors="replace") for name in ("out.txt", "err.txt"))
        return Said(code, out, err)

    def must(self, *words: str) -> str:
        said = self.run(*words)
        assert said.code == 0, f"{words}\n{said.err}"
        return said.out

    def try_(self, trial: str, *words: str) -> Said:
        """A verb that may refuse, in words."""
        said = self.run(*words)
        if said.code not in (0, 2) or "Traceback (most recent" in said.err:
            self.tally.found("tracebacks", f"{trial}: {' '.join(words)[:300]}", said.err)
        return said


def contents(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def weights(run: Path) -> bytes:
    return (run / "inlay" / "weights.safetensors").read_bytes()


# kills


def kills(place: Place, count: int) -> None:
    """Verbs that are killed at a random moment; what they leave is whole, or can be taken up again."""
    trials = (_train, _fuse, _merge, _prune, _save)
    for number in range(count):
        before = contents(place.folder / "good")
        trials[number % len(trials)](place)
        place.tally.tried["kills"] += 1
        if contents(place.folder / "good") != before:
            place.tally.found("lost", f"kill {number} changed what it only read")


def _killed(place: Place, *words: str) -> None:
    """Start a verb and kill it somewhere within the time that it takes."""
    key = words[0] + str("--overwrite" in words)
    if key not in _TIMES:
        began = time.monotonic()
        place.must(*words)
        _TIMES[key] = time.monotonic() - began
        return
    child = place.start(*words)
    time.sleep(place.chance.uniform(0, _TIMES[key]))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


_TIMES: dict[str, float] = {}


def _taken_up(place: Place, words: tuple[str, ...], out: str, wanted: bytes) -> None:
    """A killed training goes on, or starts anew in the same folder, and ends bit-equal."""
    record = Path(out, "run.json")
    finished = record.is_file() and json.loads(record.read_text())["status"] == "finished"
    if not finished:
        again = ("train", "--resume", out, "--quiet") if record.is_file() else words
        said = place.try_("after a kill", *again)
        if said.code:
            place.tally.found("lost", f"{words[0]} killed, and cannot be taken up", said.err)
            shutil.rmtree(out)
            return
    if weights(Path(out)) != wanted:
        place.tally.found("changed", f"{words[0]} killed and taken up")
    shutil.rmtree(out)


def _train(place: Place) -> None:
    words = ("train", "--host", "bert", *ROWS, *FAST, "--name", "a", "--out", "killed")
    _killed(place, *words)
    _taken_up(place, words, "killed", weights(Path("good/a")))


def _fuse(place: Place) -> None:
    words = ("fuse", "good/a", "good/b", *ROWS, *FAST, "--name", "fused", "--out", "killed")
    _killed(place, *words)
    _taken_up(place, words, "killed", weights(Path("good/fused")))


def _merge(place: Place) -> None:
    if not Path("merged").exists():
        place.must("merge", "good/mixture", "--out", "merged")
    wanted = Path("merged/weights.safetensors").read_bytes()
    _killed(place, "merge", "good/mixture", "--out", "merged", "--overwrite")
    _whole(place, "merge", Path("merged"), wanted)


def _prune(place: Place) -> None:
    _killed(place, "prune", "good/fused", "--keep", "1", "--out", "pruned", "--threads", "1")
    if Path("pruned").exists():
        if place.try_("after a kill", "eval", "pruned", "--threads", "1", "--quiet").code:
            place.tally.found("lost", "prune killed: a folder that is neither new nor finished")
        shutil.rmtree("pruned")
    elif place.try_("again", "prune", "good/fused", "--keep", "1", "--out", "pruned", "--threads", "1").code:
        place.tally.found("lost", "prune killed, and cannot be done again")
    shutil.rmtree("pruned", ignore_errors=True)


def _save(place: Place) -> None:
    """An inlay that is saved over and over."""
    if not Path("saved").exists():
        shutil.copytree("good/a/inlay", "saved")
    wanted = Path("saved/weights.safetensors").read_bytes()
    child = os.fork()
    if not child:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            from inlay.checkpoints.ours import save
            from inlay.runs.use import open_for_use

            opened = open_for_use(Path("good/a"))
            while True:
                save(opened.host, "a", "saved")
        finally:
            os._exit(1)
    time.sleep(place.chance.uniform(0.2, 1.0))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _whole(place, "save", Path("saved"), wanted)


def _whole(place: Place, verb: str, folder: Path, wanted: bytes) -> None:
    from inlay.checkpoints.ours import read
    from inlay.storage.folders import reading

    try:
        with reading(folder) as there:
            read(there)
            same = (there / "weights.safetensors").read_bytes() == wanted
    except Exception as error:
        place.tally.found("lost", f"{verb} killed", str(error))
        return
    if not same:
        place.tally.found("changed", f"{verb} killed")


# flips


def flips(place: Place, count: int) -> None:
    """One bit of one file of a run, of an interrupted run, or of the token cache; then the run is used."""
    runs = ("a", "full", "mixture", "fused", "cut")
    asked = {run: _asked(place, Path("good", run)) for run in runs}
    cached = sorted((place.folder / "cache" / "tokens").iterdir())
    for number in range(count):
        run = runs[number % len(runs)]
        copy = place.folder / "flipped"
        shutil.copytree(place.folder / "good" / run, copy)
        files = [file for file in sorted(copy.rglob("*")) if file.is_file() and file.stat().st_size]
        file = place.chance.choice(cached if number % 11 == 10 else files)
        kept = file.read_bytes()
        data, at = bytearray(kept), place.chance.randrange(len(kept))
        data[at] ^= 1 << place.chance.randrange(8)
        file.write_bytes(bytes(data))
        said = _asked(place, copy, f"bit of byte {at} of {run}/{file.name}")
        if said is not None and said != asked[run]:
            place.tally.found("changed", f"bit of byte {at} of {run}/{file.name}", f"{said[:300]!r}")
        place.tally.tried["flips"] += 1
        shutil.rmtree(copy)
        if file in cached:
            file.write_bytes(kept)


def _asked(place: Place, run: Path, trial: str = "whole") -> str | None:
    """What a run says about rows; of an interrupted one: what it learns. None: it refuses."""
    if (run / "checkpoint.safetensors").exists():
        copy = run if trial != "whole" else Path(shutil.copytree(run, place.folder / "whole"))
        said = place.try_(trial, "train", "--resume", str(copy), "--quiet")
        found = None if said.code else hashlib.sha256(weights(copy)).hexdigest()
        shutil.rmtree(place.folder / "whole", ignore_errors=True)
        return found
    said = place.try_(trial, "predict", str(run), "--file", "validation.jsonl", "--threads", "1", "--quiet")
    return None if said.code else said.out


# hostile files


def hostile(place: Place, count: int) -> None:
    """Settings, records, manifests and rows that somebody made up."""
    makers = (_settings, _record, _manifest, _rows)
    for number in range(count):
        makers[number % len(makers)](place)
        place.tally.tried["hostile"] += 1


def _spoilt(place: Place, value: Any) -> Any:
    """A copy with one field, at any depth, replaced, gone, or new."""
    value = json.loads(json.dumps(value))
    fields = list(_fields(value))
    within, key = place.chance.choice(fields)
    what = place.chance.randrange(8)
    if what == 0:
        del within[key]
    elif what == 1 and isinstance(within, dict):
        within["evil"] = place.chance.choice(HOSTILE)
    else:
        within[key] = place.chance.choice(HOSTILE)
    return value


def _fields(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _fields(inner)


YAML = (
    "a: &a [x]\nb: [*a, *a]\n", "lr: 1\nlr: 2\n", "lr: .inf\n", "labels: [no, yes]\n", "[" * 2000, "a: " * 50, "seed: " + "9" * 5000,
    "epochs: 0x" + "f" * 3000, "text: '{'\n", "? [a]\n: b\n", "date: 2020-99-99\n", "\ufeff", "%YAML 9.9\n---\n", "x: !!binary '?'\n",
)  # fmt: skip


def _settings(place: Place) -> None:
    good = json.loads(Path("good/a/run.json").read_text())["settings"]
    text = place.chance.choice(YAML) if place.chance.random() < 0.2 else json.dumps(_spoilt(place, good))
    Path("job.yaml").write_text(text, encoding="utf-8")
    place.try_("settings", "validate", "--config", "job.yaml", "--threads", "1")


def _record(place: Place) -> None:
    from inlay.storage.plain_json import digest_of

    run = Path(shutil.copytree("good/a", "spoilt/a"))
    record = _spoilt(place, json.loads((run / "run.json").read_text()))
    if place.chance.random() < 0.8:  # as somebody with intent would
        record["sha256"] = digest_of(record)
    (run / "run.json").write_text(json.dumps(record))
    verb = place.chance.choice(
        (("eval", "spoilt/a", "--threads", "1"), ("inspect", "spoilt/a"), ("ls", "runs", "--in", "spoilt"))
    )
    said = place.try_("record", *verb)
    if verb[0] == "ls" and said.code:
        place.tally.found("tracebacks", "a record that is not ours makes `ls` fail", said.err)
    shutil.rmtree("spoilt")


def _manifest(place: Place) -> None:
    from inlay.storage.plain_json import digest_of

    folder = Path(shutil.copytree("good/a/inlay", "spoilt/inlay"))
    manifest = _spoilt(place, json.loads((folder / "inlay.json").read_text()))
    manifest["sha256"] = digest_of(manifest)
    (folder / "inlay.json").write_text(json.dumps(manifest))
    place.try_("manifest", "eval", str(folder), "--file", "validation.jsonl", "--threads", "1")
    shutil.rmtree("spoilt")


LINES = (
    '{"text": "a", "text": "b", "label": "x"}', '{"text": "\\ud800", "label": "positive"}', "[]", "{", '{"text": NaN}', "\0", '"x"', "{}",
    '{"text": ["a"], "label": ["b"]}', '{"text": {}, "label": {}}', '{"text": 1e999, "label": 1e300}', "[" * 5000, '{"text": ""}',
)  # fmt: skip


def _rows(place: Place) -> None:
    lines = Path("train.jsonl").read_text().splitlines()
    at = place.chance.randrange(len(lines))
    lines[at] = (
        place.chance.choice(LINES) if place.chance.random() < 0.5 else json.dumps(_spoilt(place, json.loads(lines[at])))
    )
    Path("rows.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    if place.chance.random() < 0.5:
        place.try_("rows", "predict", "good/a", "--file", "rows.jsonl", "--threads", "1", "--quiet")
    else:
        kind = place.chance.choice(("classification", "regression"))
        words = ("--host", "bert", "--kind", kind, "--batch-size", "8", "--threads", "1")
        place.try_("rows", "validate", "--train-file", "rows.jsonl", *words)


def campaign(folder: Path, seed: int, counts: tuple[int, int, int], say: Callable[[str], None] = print) -> Tally:
    """All three parts, in a folder of their own."""
    place, began = Place(folder, seed), time.monotonic()
    place.warm_up()
    place.build()
    say(f"built in {time.monotonic() - began:.0f} s")
    for part, count in zip((kills, flips, hostile), counts, strict=True):
        part(place, count)
        say(f"{part.__name__}: {place.tally.tried[part.__name__]:,} in {time.monotonic() - began:.0f} s altogether")
    return place.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a small part of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--counts", type=int, nargs=3, metavar=("KILLS", "FLIPS", "HOSTILE"))
    given = parser.parse_args()
    counts = tuple(given.counts or ((5, 12, 16) if given.short else (100, 1000, 300)))
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="inlay-campaign-") as folder:
        tally = campaign(Path(folder), given.seed, counts)
        os.chdir("/")
    wrong = {name: tally.wrong[name] for name in ("tracebacks", "changed", "lost", "endless")}
    print(json.dumps({"seed": given.seed, **tally.tried, **wrong}))
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
