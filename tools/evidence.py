"""Tables of docs/evidence/ and of the README from the records under evidence/: no number of a table is typed by hand.

    python tools/evidence.py                             # write them anew
    python tools/evidence.py --check                     # exit with 1 where a page says something else
    python tools/evidence.py below evidence/few-labels logreg    # every run against another way with the same rows
    python tools/evidence.py far evidence/few-labels logreg full,single    # its runs that are far below, one by one
    python tools/evidence.py spent evidence/few-labels   # how long its runs took
    python tools/evidence.py told evidence/demo 0,1,2    # what the demo says below its table, of these seeds
    python tools/evidence.py step evidence/compacter-efficiency-small full    # what a training step costs, as counted
    python tools/evidence.py tried evidence/compacter-small # what each search had to choose from, and what it chose
    python tools/evidence.py unmoved evidence/few-labels # how many runs ended with the head that was fitted first
    python tools/evidence.py metrics evidence/adamix-nlg-small    # every metric, not the main one alone
    python tools/evidence.py stars evidence/demo evidence/few-labels    # how many stars hold from seed to seed, too

A page shows the command and what it printed, in one block:

    ```
    $ inlay study table evidence/few-labels
    …
    ```
"""

from __future__ import annotations

import csv
import re
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from inlay.storage.plain_json import read_json

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "evidence").glob("*.md"))]
BLOCK = re.compile(
    r"^```\n\$ ((?:inlay study table|python tools/evidence\.py \w+) evidence/[^\n]+)\n.*?^```\n", re.M | re.S
)
FAR = 2.0
"""Points below that count."""


def printed(command: str) -> str:
    """What a command of a page prints, run in the project's folder."""
    words = [str(ROOT / word) if word.startswith("evidence/") else word for word in shlex.split(command)]
    return VERBS[words[2]](*words[3:]) if words[0] == "python" else _inlay(*words[1:])


def _inlay(*arguments: str) -> str:
    from inlay.cli import main

    with redirect_stdout(StringIO()) as told:
        main(list(arguments))
    return told.getvalue().strip("\n")


def _width(names: Iterable[str]) -> int:
    """Of a column with these names; there may be none yet."""
    return max((12, *map(len, names)))


def _runs(folder: str) -> list[dict[str, str]]:
    """Every run that has a score."""
    every = csv.DictReader(_inlay("study", "table", folder, "--format", "csv").splitlines())
    return [row for row in every if row["score"]]


def _of(row: dict[str, str]) -> tuple[str, ...]:
    """What a run of another way has to be of, too, to be compared."""
    return row["rows"], row["host"], row["task"], row["seed"]


def below(folder: str, against: str) -> str:
    """Of each way and number of rows: how every run compares with the other way's of the same task, rows and seed."""
    scores: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for row in _runs(folder):
        scores[row["way"]][_of(row)] = float(row["score"])
    base = scores.pop(against)
    wide = _width(scores)
    lines = [f"{'way':{wide}}  rows  runs   mean  lowest  highest  more than {FAR:.0f} points below {against}"]
    for way, found in scores.items():
        for rows in sorted({key[0] for key in found}, key=lambda text: (len(text), text)):
            gains = [score - base[key] for key, score in found.items() if key[0] == rows and key in base]
            if gains:
                spread = f"{statistics.mean(gains):+5.1f}  {min(gains):+6.1f}  {max(gains):+7.1f}"
                lines.append(f"{way:{wide}}  {rows:4}  {len(gains):4}  {spread}  {sum(gain < -FAR for gain in gains)}")
    return "\n".join(lines)


def far(folder: str, against: str, ways: str) -> str:
    """Each run of these ways that is far below the other's: by how much, also on validation rows, and its best step."""
    runs = _runs(folder)
    base = {_of(row): row for row in runs if row["way"] == against}
    wide = _width(ways.split(","))
    lines = [f"{'way':{wide}}  rows  {'task':{wide}}  seed  judged  validation  best step"]
    for row in (row for row in runs if row["way"] in ways.split(",") and _of(row) in base):
        judged, chosen = (float(row[of]) - float(base[_of(row)][of]) for of in ("score", "validation"))
        if judged < -FAR:
            best = read_json(Path(folder) / "records" / f"{row['cell']}.json")["best_step"]
            lines.append(
                f"{row['way']:{wide}}  {row['rows']:4}  {row['task']:{wide}}  {row['seed']:4}  {judged:+6.1f}  "
                f"{chosen:+10.1f}  {best:9}"
            )
    return "\n".join(lines)


def spent(folder: str) -> str:
    """The time of all runs, one after the other, as each of them measured it."""
    from inlay.studies.plan import view_of

    results = view_of(Path(folder)).results.values()
    minutes = sum(result.get("whole_seconds") or 0.0 for result in results) / 60
    least = "at least " if any(result.get("resumed") for result in results) else ""  # what was before a break is lost
    return f"{len(results)} runs, {least}{minutes:.0f} minutes of one core"


def step(folder: str, against: str) -> str:
    """What a training step costs in each way: counted operations and bytes, the means over tasks and seeds."""
    from inlay.studies.plan import view_of

    view = view_of(Path(folder))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for slot, cell in view.filled.items():
        if costs := view.results[cell.name].get("costs"):
            found[slot.way].append(costs | {"seconds": view.results[cell.name]["seconds"]})
    means = {
        way: {name: statistics.mean(each[name] for each in all_of) for name in all_of[0]}
        for way, all_of in found.items()
    }
    base, wide = means[against], _width(means)
    lines = [f"{'way':{wide}}  GFLOP a row     MB a row  MB of weights, gradients and averages  seconds"]
    for way, mean in means.items():
        flops, row, fixed, seconds = (mean[n] for n in ("flops_per_row", "bytes_per_row", "fixed_bytes", "seconds"))
        share = f"({flops / base['flops_per_row']:.2f})", f"({row / base['bytes_per_row']:.2f})"
        whole = f"({fixed / base['fixed_bytes']:.2f})"
        lines.append(
            f"{way:{wide}}  {flops / 1e9:4.1f} {share[0]}  {row / 2**20:5.1f} {share[1]}  {fixed / 2**20:31.0f} {whole}"
            f"  {seconds:7.1f}"
        )
    return "\n".join(lines)


def unmoved(folder: str) -> str:
    """How many runs of each way and number of rows ended as they began: no later step was better on validation rows."""
    from inlay.studies.plan import view_of

    view = view_of(Path(folder))
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for slot, cell in view.filled.items():
        result = view.results[cell.name]
        if view.plan.study.ways[slot.way].show and result.get("best_step") is not None and slot.task != "(joint)":
            found[slot.way, str(slot.rows or "all")].append(result["best_step"] == 0)
    wide = _width(way for way, _ in found)
    lines = [f"{'way':{wide}}  rows  runs  of them as they began"]
    lines += [f"{way:{wide}}  {rows:>4}  {len(each):4}  {sum(each)}" for (way, rows), each in found.items()]
    return "\n".join(lines)


def metrics(folder: str) -> str:
    """Of each task and way: the mean of every metric over the seeds, as the metrics' own scripts say it."""
    from inlay.studies.plan import view_of

    view = view_of(Path(folder))
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for slot, cell in view.filled.items():
        if view.plan.study.ways[slot.way].show:
            found[slot.task, slot.way].append(view.results[cell.name]["scores"])
    wide, lines = _width(way for _, way in found), []
    for task in dict.fromkeys(task for task, _ in found):
        names = list(next(each for (of, _), each in found.items() if of == task)[0])
        lines.append(f"{task:{wide}}  runs  " + "  ".join(f"{name:>7}" for name in names))
        for (of, way), each in found.items():
            if of == task:
                means = [statistics.mean(scores[name] for scores in each) for name in names]
                lines.append(
                    f"{way:{wide}}  {len(each):4}  "
                    + "  ".join(f"{m:{max(7, len(n))}.3f}" for n, m in zip(names, means, strict=True))
                )
    return "\n".join(lines)


def stars(*folders: str) -> str:
    """Of each study's significant differences of several seeds: how many hold from seed to seed, too.

    The tables' test is over judged rows, and takes the seeds as they are. The t-test is over seeds, uncorrected.
    """
    from scipy.stats import ttest_1samp

    from inlay.studies.plan import view_of
    from inlay.studies.tables import tables

    wide, whole = _width(Path(folder).name for folder in folders), [0] * 4
    head = "tests  stars  of them the same way with every seed  with p < 0.05 in a t-test over seeds"
    lines = [f"{'study':{wide}}  {head}"]

    def line(name: str, counts: list[int]) -> str:
        return f"{name:{wide}}  {counts[0]:5}  {counts[1]:5}  {counts[2]:35}  {counts[3]:38}"

    for folder in folders:
        found = [0] * 4
        for table in tables(view_of(Path(folder))):
            base = next((one.entries for one in table.lines if one.way == table.reference), {})
            for one in table.lines:
                for task, entry in one.entries.items():
                    if entry.against is None or entry.against.seeds < 2:
                        continue
                    seeds = sorted(entry.scores.keys() & base[task].scores.keys())
                    gains = [entry.scores[seed] - base[task].scores[seed] for seed in seeds]
                    same = all(gain * entry.against.difference > 0 for gain in gains)
                    star = entry.significant
                    over_seeds = len(set(gains)) > 1 and float(ttest_1samp(gains, 0).pvalue) < 0.05
                    found = [n + m for n, m in zip(found, (1, star, star and same, star and over_seeds), strict=True)]
        whole = [n + m for n, m in zip(whole, found, strict=True)]
        lines.append(line(Path(folder).name, found))
    return "\n".join([*lines, line("all", whole)])


def told(folder: str, seeds: str = "", ways: str = "") -> str:
    """What the demo says below its table; of these seeds and ways alone, if there are some."""
    from inlay.demo import conclusions
    from inlay.studies.plan import view_of
    from inlay.studies.tables import Asked, tables

    numbers = tuple(int(seed) for seed in seeds.split(",") if seed)
    view, asked = view_of(Path(folder)), Asked(seeds=numbers, ways=tuple(way for way in ways.split(",") if way))
    tables(view, asked)  # which refuses what is not there
    view.filled = {slot: cell for slot, cell in view.filled.items() if asked.wants(slot)}
    return "\n".join(conclusions(view))


def tried(folder: str, task: str = "") -> str:
    """What each way's search had to choose from: means over tasks, or one task's; rows that judge chose nothing."""
    from inlay.studies.plan import view_of
    from inlay.studies.tables import score_of

    view = view_of(Path(folder))
    found: dict[tuple[str, str], list[tuple[float, float, bool]]] = defaultdict(list)
    for slot, cells in view.cells.items():
        if len(cells) > 1 and slot in view.filled and slot.task in (task or slot.task, "(joint)"):
            for cell in cells:
                point = ", ".join(f"{name}={value}" for name, value in cell.draft.point.items())
                result = view.results[cell.name]
                judged = score_of(result, view.plan.study.score)[1]
                found[slot.way, point].append((result["selected"], judged, cell == view.filled[slot]))
    wide = _width(way for way, _ in found)
    lines = [f"{'way':{wide}}  {'tried':{wide}}  runs  validation  judged  chosen"]
    for (way, point), each in found.items():
        validation, judged, chosen = zip(*each, strict=True)
        lines.append(
            f"{way:{wide}}  {point:{wide}}  {len(each):4}  {100 * statistics.mean(validation):10.1f}  "
            f"{100 * statistics.mean(judged):6.1f}  {sum(chosen):6}"
        )
    return "\n".join(lines)


VERBS: dict[str, Callable[..., str]] = {
    "below": below, "far": far, "metrics": metrics, "spent": spent, "stars": stars, "step": step, "told": told,
    "tried": tried, "unmoved": unmoved,
}  # fmt: skip


def renewed(page: str, say: Callable[[str], str] = printed) -> str:
    """A page with every block as its command prints it."""
    return BLOCK.sub(lambda found: f"```\n$ {found[1]}\n{say(found[1])}\n```\n", page)


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in VERBS:
        print(VERBS[arguments[0]](*arguments[1:]))
        return 0
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            stale.append(page.name)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'none'}")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
