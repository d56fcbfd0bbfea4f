"""Tables as text, Markdown, LaTeX (booktabs), CSV, HTML and JSON."""

from __future__ import annotations

import csv
import html
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from inlay.studies.plan import View
from inlay.studies.tables import SIGNIFICANT, Entry, Line, Table
from inlay.training.recipe import LOSS

MISSING, FAILED = "·", "failed"
NARROW, WIDE = 80, 120
"""Characters: what stands below a table is as wide as the table, within these."""


def caption(table: Table) -> list[str]:
    """What a reader has to know: seeds, rows, what marks mean."""
    seeds = ", ".join(map(str, table.seeds))
    some = any(0 < len(entry.scores) < len(entry.wanted) for line in table.lines for entry in line.entries.values())
    told = [f"Mean ± standard deviation over {len(table.seeds)} seeds ({seeds}){'; (k/n): k of n are done' * some}."]
    if len(table.seeds) == 1:
        told = [f"One seed ({seeds}): no standard deviation."]
    if table.fewer_seeds:
        told.append(f"Fewer seeds: {', '.join(f'{title} {seeds}' for title, seeds in table.fewer_seeds.items())}.")
    if 0 < len(table.ranked) < len(table.tasks):
        told.append(f"Rank: over {', '.join(table.ranked)}, which all ways have.")
    judged = ", ".join(f"{task} {rows:,} ({table.metrics[task]})" for task, rows in table.judged.items())
    if judged:
        told.append(f"Judged rows: {judged}.")
    if table.fewer_rows:
        told.append(f"Fewer training rows: {', '.join(f'{task} {rows:,}' for task, rows in table.fewer_rows.items())}.")
    seen = [
        f"{task} {rows:,} ({other}'s)" for task, others in table.seen_before.items() for other, rows in others.items()
    ]
    if seen:
        told.append(
            f"Judged rows that are also training or validation rows of what a way is built on: {', '.join(seen)}."
        )
    if LOSS in table.metrics.values():
        told.append("Loss: the mean of −log p of the right labels, × 100; less is better.")
    if table.reference is not None:
        tests = {"mcnemar": "McNemar's exact test", "bootstrap": "paired bootstrap over rows"}
        how = " and ".join(tests[name] for name in table.tests) or "no test yet"
        told.append(
            f"Against {table.reference}: ↗ better by at least 0.3 points, ↘ worse, → between; * p < {SIGNIFICANT} "
            f"({how}, Holm's correction over the table). W/T/L: tasks significantly better, without a significant "
            f"difference, significantly worse."
        )
    return told


def header(table: Table) -> list[str]:
    """The columns' names."""
    more = ["W/T/L"] if table.reference is not None else []
    return ["way", *table.tasks, *table.averages, "rank", *more, "% trained", "seconds", "MB"]


def cells(table: Table, line: Line, entry_text: Callable[[Entry | None, bool], str]) -> list[str]:
    """One line's cells; an entry is written as `entry_text` does."""
    found = [line.title]
    for task in table.tasks:
        entry = line.entries.get(task)
        best = entry is not None and entry.spread is not None and round(entry.spread.mean, 1) == table.best(task)
        found.append(entry_text(entry, best))
    found += [_one(line.averages[name]) for name in table.averages]
    found.append(_one(line.rank))
    if table.reference is not None:
        found.append("/".join(map(str, line.wins)) if line.wins is not None else "")
    return [
        *found,
        _share(line.trained),
        _one(line.seconds),
        "" if line.megabytes is None else f"{line.megabytes:,.0f}",
    ]


def _one(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.1f}"


def _share(percent: float | None) -> str:
    return MISSING if percent is None else f"{percent:.3g}" if percent < 100 else f"{percent:.0f}"


def plain_entry(entry: Entry | None, best: bool = False) -> str:
    """84.3 ±1.2↗*; a missing or failed cell says so."""
    if entry is None:
        return ""
    if entry.spread is None:
        return FAILED if entry.state == "failed" else MISSING
    found = entry.spread
    sd = f" ±{found.sd:.1f}" if found.sd is not None else ""
    some = "" if len(entry.scores) == len(entry.wanted) else f" ({len(entry.scores)}/{len(entry.wanted)})"
    failed = " failed" if entry.failed else ""
    return f"{found.mean:.1f}{sd}{entry.arrow}{'*' if entry.significant else ''}{some}{failed}"


def as_text(found: Sequence[Table], view: View) -> str:
    parts = []
    for table in found:
        rows = [header(table), *(cells(table, line, plain_entry) for line in table.lines)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        wide = len(lines[0])
        rule = "─" * min(wide, 200)
        below = [part for said in caption(table) for part in textwrap.wrap(said, min(max(wide, NARROW), WIDE))]
        parts.append(
            "\n".join(
                [
                    table.title,
                    rule,
                    lines[0].rstrip(),
                    rule,
                    *(line.rstrip() for line in lines[1:]),
                    rule,
                    *below,
                ]
            )
        )
    return "\n\n".join(parts)


def as_markdown(found: Sequence[Table], view: View) -> str:
    def entry(one: Entry | None, best: bool) -> str:
        text = plain_entry(one)
        return f"**{text}**" if best else text

    parts = []
    for table in found:
        rows = [[_in_markdown(cell) for cell in cells(table, line, entry)] for line in table.lines]
        names = [_in_markdown(name) for name in header(table)]
        marks = ["---", *(["---:"] * (len(names) - 1))]
        lines = ["| " + " | ".join(row) + " |" for row in (names, marks, *rows)]
        parts.append(
            "\n".join([f"### {_in_markdown(table.title)}", "", *lines, "", _in_markdown(" ".join(caption(table)))])
        )
    return "\n\n".join(parts)


def _in_markdown(text: str) -> str:
    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    inner = text[2:-2] if bold else text
    for mark in "\\|*_<>[]`":
        inner = inner.replace(mark, f"\\{mark}")
    return f"**{inner}**" if bold else inner


TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "↗": r"$\nearrow$", "↘": r"$\searrow$",
    "→": r"$\rightarrow$", "·": r"$\cdot$", "<": r"$<$", ">": r"$>$",
    "−": "$-$", "×": r"$\times$",
}  # fmt: skip


def tex(text: str) -> str:
    return "".join(TEX.get(char, char) for char in text)


def as_latex(found: Sequence[Table], view: View) -> str:
    """One floating table each; needs \\usepackage{booktabs} and graphicx."""

    def entry(one: Entry | None, best: bool) -> str:
        text = tex(plain_entry(one))
        return rf"\textbf{{{text}}}" if best else text

    parts = ["% \\usepackage{booktabs,graphicx}"]
    for table in found:
        rows = []
        for line in table.lines:
            way, *rest = cells(table, line, entry)
            apart = "{}" if way.startswith(("[", "*")) else ""  # or the line before it would end with that
            rows.append([apart + tex(way), *rest[: len(table.tasks)], *map(tex, rest[len(table.tasks) :])])
        names = list(map(tex, header(table)))
        lines = [" & ".join(row) + r" \\" for row in rows]
        parts.append(
            "\n".join(
                [
                    r"\begin{table}[t]", r"\centering", r"\resizebox{\linewidth}{!}{%",
                    rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}", r"\toprule", " & ".join(names) + r" \\",
                    r"\midrule", *lines, r"\bottomrule", r"\end{tabular}}",
                    rf"\caption{{{tex(table.title)}. {tex(' '.join(caption(table)))}}}", r"\end{table}",
                ]
            )
        )  # fmt: skip
    return "\n\n".join(parts)


def as_csv(found: Sequence[Table], view: View) -> str:
    """One line for each seed of each entry, with all that is known of it; for programs and spreadsheets."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["host", "rows", "task", "way", "seed", "state", "metric", "score", "validation", "chosen", "p", "difference",
         "trained_parameters", "host_parameters", "seconds", "peak_megabytes", "cell"]
    )  # fmt: skip
    for table in found:
        for line in table.lines:
            for task, entry in line.entries.items():
                for seed in entry.wanted:
                    writer.writerow(_long(view, table, line, task, entry, seed))
    return stream.getvalue().rstrip("\n")


def _long(view: View, table: Table, line: Line, task: str, entry: Entry, seed: int) -> list[Any]:
    name = entry.cells.get(seed)
    result = view.results[name] if name is not None else None
    state = "done" if result is not None else "failed" if seed in entry.failed else "waiting"
    chosen = ";".join(f"{key}={value}" for key, value in entry.points.get(seed, {}).items())
    against = (entry.against.p, entry.against.difference * 100) if entry.against is not None else ("", "")
    row: list[Any] = [table.host, table.rows or "all", task, line.way, seed, state, entry.metric]
    if result is None:
        return [*row, "", "", chosen, *against, "", "", "", "", ""]
    validation = next(iter(result["validation"].values()), None)
    scores = [f"{entry.scores[seed]:.4f}" if seed in entry.scores else ""]
    scores += ["" if validation is None else f"{100 * validation:.4f}"]
    return [
        *row, *scores, chosen, *against, result["trained_parameters"], result["host_parameters"], result["seconds"],
        result.get("peak_megabytes"), name,
    ]  # fmt: skip


def as_html(found: Sequence[Table], view: View) -> str:
    """The tables alone; `report` makes a whole page of them."""
    return "\n".join(html_table(table) for table in found)


def html_table(table: Table, link: Callable[[str], str | None] = lambda cell: None) -> str:
    """A table with each entry's seeds as its title; `link` says where a cell's page is."""
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in header(table))
    body = []
    for line in table.lines:
        plain = cells(table, line, plain_entry)
        row = [f"<th scope=row>{html.escape(plain[0])}</th>"]
        for task, text in zip(table.tasks, plain[1:], strict=False):
            row.append(_html_entry(line.entries.get(task), text, table.best(task), link))
        row += [f"<td>{html.escape(text)}</td>" for text in plain[1 + len(table.tasks) :]]
        body.append(f"<tr>{''.join(row)}</tr>")
    told = "<br>".join(map(html.escape, caption(table)))
    return (
        f"<figure><table class=study><caption>{html.escape(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table><figcaption>{told}</figcaption></figure>"
    )


def _html_entry(entry: Entry | None, text: str, best: float | None, link: Callable[[str], str | None]) -> str:
    if entry is None:
        return "<td></td>"
    mean = entry.spread.mean if entry.spread is not None else None
    shown = html.escape(text)
    if mean is not None and round(mean, 1) == best:
        shown = f"<b>{shown}</b>"
    seeds = []
    for seed, score in entry.scores.items():
        where = link(entry.cells[seed])
        one = f"{score:.1f}"
        seeds.append(f'<a href="{html.escape(where)}">{one}</a>' if where else one)
    each = f"<small>{' '.join(seeds)}</small>" if seeds else ""
    value = f' data-value="{mean:.4f}"' if mean is not None else ""
    kind = ' class="failed"' if entry.failed else ""
    return f"<td{value}{kind}>{shown}{each}</td>"


def as_facts(found: Sequence[Table], view: View) -> list[dict[str, Any]]:
    """For --json."""
    made = []
    for table in found:
        facts = asdict(table)
        for line, of in zip(facts["lines"], table.lines, strict=True):
            for task, entry in line["entries"].items():
                spread = of.entries[task].spread
                entry |= {"mean": spread.mean, "sd": spread.sd, "n": spread.n} if spread is not None else {}
        made.append(facts)
    return made


FORMATS: dict[str, Callable[[Sequence[Table], View], str]] = {
    "text": as_text, "markdown": as_markdown, "latex": as_latex, "csv": as_csv, "html": as_html,
}  # fmt: skip
