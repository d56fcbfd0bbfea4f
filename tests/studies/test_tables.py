"""Tables in every format, and figures."""

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from inlay import InlayError
from inlay.cli import main
from inlay.studies.figures import FIGURES, draw
from inlay.studies.formats import FORMATS, as_facts, as_text, caption, tex
from inlay.studies.page import study_page
from inlay.studies.plan import View
from inlay.studies.tables import GLUE, Asked, Entry, _groups, difference, tables
from tests.studies.tiny import FILE, run_here, study_in


def test_the_tables_numbers_are_the_cells(finished):
    _, view, _ = finished
    (table,) = tables(view)
    for line in table.lines:
        for task, entry in line.entries.items():
            for seed, score in entry.scores.items():
                slot = next(s for s in view.filled if (s.way, s.task, s.seed) == (line.way, task, seed))
                assert score == 100 * view.results[view.filled[slot].name]["scores"]["accuracy"]
            assert entry.spread.n == 2
    assert [line.way for line in table.lines] == ["logreg", "single", "fused"]
    assert table.judged == {"b": 40, "c": 40}


def test_a_way_with_fewer_seeds_or_tasks_is_said_below_the_table(finished):
    _, view, _ = finished
    (table,) = tables(view)
    assert table.ranked == table.tasks
    assert not any(line.startswith(("Rank", "Fewer")) for line in caption(table))
    first, *others = table.lines
    less = replace(first, entries={"b": replace(first.entries["b"], wanted=first.entries["b"].wanted[:1])})
    told = caption(replace(table, lines=(less, *others)))
    assert f"Fewer seeds: {first.title} 1." in told
    assert "Rank: over b, which all ways have." in told


def test_only_a_table_with_unfinished_seeds_explains_how_they_are_marked(finished):
    (table,) = tables(finished[1])
    assert "k/n" not in " ".join(caption(table))
    first, *others = table.lines
    task, entry = next(iter(first.entries.items()))
    some = replace(entry, scores=dict(list(entry.scores.items())[:1]))
    unfinished = replace(table, lines=(replace(first, entries={**first.entries, task: some}), *others))
    assert "(k/n): k of n are done." in caption(unfinished)[0]
    assert f"({len(some.scores)}/{len(some.wanted)})" in as_text([unfinished], finished[1])


def test_what_stands_below_a_text_table_is_as_wide_as_the_table(finished):
    found = tables(finished[1])
    _, rule, *lines = as_text(found, finished[1]).splitlines()
    assert max(len(line) for line in lines) <= max(80, len(rule))
    assert " ".join(caption(found[0])) in " ".join(lines), "nothing is lost where lines are broken"


def test_a_task_with_fewer_rows_than_the_table_is_said_below_it(finished, monkeypatch):
    _, view, _ = finished
    for result in view.results.values():
        if result["task"]["name"] == "c":
            monkeypatch.setitem(result, "rows", result["rows"] | {"train": 20})
    (table,) = tables(view)
    assert table.fewer_rows == {"c": 20}
    assert "Fewer training rows: c 20." in caption(table)


def test_arrows_and_wins_follow_the_tests(finished):
    _, view, _ = finished
    (table,) = tables(view)
    for line in table.lines:
        if line.way == "single":
            assert line.wins is None
            continue
        assert sum(line.wins) == 2
        for entry in line.entries.values():
            points = 100 * entry.against.difference
            assert entry.arrow == ("↗" if points >= 0.3 else "↘" if points <= -0.3 else "→")
            assert entry.significant == (entry.against.p < 0.05)


def test_what_has_no_such_score_is_not_compared_by_it(finished, monkeypatch):
    """A task of another kind has not the metric that is asked for: nothing of it is a tie."""
    _, view, _ = finished
    for result in view.results.values():
        if result["task"]["name"] == "c":
            scores = {name: value for name, value in result["scores"].items() if name != "macro_f1"}
            monkeypatch.setitem(result, "scores", scores)
    (table,) = tables(view, Asked(score="macro_f1"))
    for line in table.lines:
        assert line.entries["c"].spread is None
        assert line.entries["c"].against is None
        assert line.entries["c"].state == "done"
        assert line.wins is None or sum(line.wins) == 1
    rows = [row for row in csv.DictReader(io.StringIO(FORMATS["csv"]([table], view))) if row["task"] == "c"]
    assert {(row["state"], row["score"]) for row in rows} == {("done", "")}, "its cells are not waited for"


def test_a_study_that_has_not_run_shows_what_is_missing(here, tmp_path):
    from inlay.studies.cells import StudyFolder
    from inlay.studies.plan import Plan

    view = View(Plan.of(study_in(here)), StudyFolder(tmp_path)).look()
    (table,) = tables(view)
    text = FORMATS["text"]([table], view)
    assert text.count("·") >= 6
    assert all(value is None for line in table.lines for value in line.averages.values())


def test_csv_has_a_line_for_every_seed(finished):
    _, view, _ = finished
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](tables(view), view))))
    assert len(rows) == 3 * 2 * 2
    assert {row["state"] for row in rows} == {"done"}
    assert {row["seed"] for row in rows} == {"0", "1"}
    assert all(re.fullmatch("[0-9a-f]{20}", row["cell"]) for row in rows)
    assert {row["chosen"] for row in rows if row["way"] == "single"} <= {"lr=0.02", "lr=0.05"}


def test_markdown_renders_as_one_table(finished):
    _, view, _ = finished
    made = MarkdownIt("commonmark").enable("table").render(FORMATS["markdown"](tables(view), view))
    assert made.count("<table>") == 1
    assert made.count("<tr>") == 4
    assert "<strong>" in made


def test_latex_is_a_table_that_tex_can_read(finished):
    _, view, _ = finished
    text = FORMATS["latex"](tables(view), view)
    assert text.count(r"\begin{") == text.count(r"\end{")
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert text.count(rule) == 1
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", text)[1]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 3
    assert all(line.count(" & ") == len(columns) - 1 for line in lines)
    without = re.sub(r"\\[a-zA-Z]+|\\[%&_#${}\\]", "", text[text.index(r"\begin") :])
    assert without.count("{") == without.count("}")
    assert without.count("$") % 2 == 0
    assert not set("↗↘→±·") & set(text)


def test_latex_is_read_by_a_parser(finished):
    from pylatexenc.latexwalker import LatexEnvironmentNode, LatexWalker

    _, view, _ = finished
    nodes, _, _ = LatexWalker(FORMATS["latex"](tables(view), view), tolerant_parsing=False).get_latex_nodes()
    assert [node.environmentname for node in nodes if node.isNodeType(LatexEnvironmentNode)] == ["table"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here; Debian: texlive-latex-recommended")
def test_latex_compiles(finished, curves, tmp_path, monkeypatch):
    made = [FORMATS["latex"](tables(view), view) for view in (finished[1], curves)]
    made.append(FORMATS["latex"](tables(curves, Asked(score="loss")), curves))
    for name, title in (("single", "[CLS]"), ("fused", "*ours*")):
        way = curves.plan.study.ways[name].model_copy(update={"title": title})
        monkeypatch.setitem(curves.plan.study.ways, name, way)
    made.append(FORMATS["latex"](tables(curves), curves))
    text = "\n".join(
        [r"\documentclass{article}", r"\usepackage{booktabs,graphicx}", r"\begin{document}", *made, r"\end{document}"]
    )
    (tmp_path / "table.tex").write_text(text)
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout
    assert (tmp_path / "table.pdf").stat().st_size > 1000


def test_latex_has_no_line_that_the_one_before_would_read(curves, monkeypatch):
    """After an end of line, [ begins its length and * is its star; a minus sign of a text has no letter in TeX."""
    way = curves.plan.study.ways["single"].model_copy(update={"title": "[CLS]"})
    monkeypatch.setitem(curves.plan.study.ways, "single", way)
    text = FORMATS["latex"](tables(curves, Asked(score="loss")), curves)
    assert "\n{}[CLS] & " in text
    assert "mean of $-$log p of the right labels, $\\times$ 100" in text


def test_what_tex_reads_as_a_command_is_written_as_a_letter():
    assert tex("a_b & 50% #1 {x} \\y ~^$") == (
        r"a\_b \& 50\% \#1 \{x\} \textbackslash{}y \textasciitilde{}\textasciicircum{}\$"
    )


class Reader(HTMLParser):
    """Counts elements; every one that opens must close."""

    VOID = ("meta", "br", "path", "use", "image")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(finished):
    out, view, _ = finished
    page = study_page(view)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    links = [attrs["href"] for tag, attrs in reader.seen if tag == "a" and attrs.get("href", "").startswith("cells/")]
    assert links
    assert all((out / link).is_file() for link in links)
    loaded = [
        attrs
        for tag, attrs in reader.seen
        if tag in ("script", "link", "img", "iframe") and (attrs.get("src") or attrs.get("href"))
    ]
    assert loaded == []
    assert "default-src 'none'" in page
    assert 'name="viewport"' in page
    assert "<svg" in page


def test_the_column_of_ways_leaves_room_on_a_narrow_screen(finished):
    """It stays at the left while the others move under it: as wide as the screen, it would hide them all."""
    (rule,) = re.findall(r"tbody th \{([^}]*)\}", study_page(finished[1]))
    assert {"position: sticky", "white-space: normal"} <= {part.strip() for part in rule.split(";")}
    assert re.search(r"max-width: min\([^)]*vw\)", rule)


def test_names_cannot_act_in_the_page(here, finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    ways = {"single": FILE["ways"]["single"] | {"title": "<script>alert(1)</script>"}}
    view, _ = run_here(study_in(here, ways=ways, about="<b>x</b>"), out)
    page = study_page(view)
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page


@pytest.fixture
def drawn(monkeypatch):
    """The matplotlib figures behind the pictures, and what fusions' pictures were made of."""
    from inlay.studies import figures

    made = []
    whole = figures.as_svg
    monkeypatch.setattr(figures, "as_svg", lambda figure: made.append(figure) or whole(figure))
    fusions = figures.fusions_svg
    monkeypatch.setattr(figures, "fusions_svg", lambda seen, *how: made.append((seen, how)) or fusions(seen, *how))
    return made


@pytest.fixture(scope="module")
def curves(here, tmp_path_factory):
    """Two numbers of rows, several evaluations, a full fine-tuning to compare with."""
    ways = {
        "full": {"kind": "full", "lr": 0.001},
        "single": {"options": {"size": 4}},
        "fused": {
            "kind": "fusion",
            "rows": [32],
            "members": [{"way": "single", "tasks": "targets"}, {"way": "single"}],
        },
    }
    settings = {"batch_size": 16, "epochs": 2, "lr": 0.02, "patience": 0}
    study = study_in(here, ways=ways, settings=settings, rows=[32, 64], against="full")
    view, _ = run_here(study, tmp_path_factory.mktemp("curves") / "out")
    assert not view.failures, next(iter(view.failures.values())).error
    return view


def mean_of(view, way, task, rows):
    found = [
        view.results[cell.name]["scores"]["accuracy"]
        for slot, cell in view.filled.items()
        if (slot.way, slot.task, slot.rows) == (way, task, rows)
    ]
    return 100 * sum(found) / len(found)


def test_a_table_of_some_seeds_is_that_of_a_study_with_no_others(curves):
    few, *_ = tables(curves, Asked(seeds=(1,)))
    every, *_ = tables(curves)
    assert (few.seeds, every.seeds) == ((1,), (0, 1))
    for one, whole in zip(few.lines, every.lines, strict=True):
        for task, entry in one.entries.items():
            assert entry.scores == {1: whole.entries[task].scores[1]}
            assert entry.state == "done", "what was not asked for is not missing"
    with pytest.raises(InlayError, match="no seed 7; there are 0, 1"):
        tables(curves, Asked(seeds=(0, 7)))


def test_tables_of_some_numbers_of_rows(curves):
    assert [table.rows for table in tables(curves)] == [32, 64]
    assert tables(curves, Asked(rows=(64,))) == tables(curves)[1:]
    with pytest.raises(InlayError, match="no number of rows 50; there are 32, 64"):
        tables(curves, Asked(rows=(50,)))
    with pytest.raises(InlayError, match="no number of rows all"):
        tables(curves, Asked(rows=(None,)))
    with pytest.raises(InlayError, match="no number of rows 64; there are 32"):
        tables(curves, Asked(rows=(64,), ways=("fused",)))


def test_what_no_cell_has_together_is_said(finished):
    """A source has its rows and the targets theirs; both are there, but not of one way."""
    _, view, _ = finished
    with pytest.raises(InlayError, match="no cell has"):
        tables(view, Asked(ways=("source", "single"), rows=(None,), seeds=(1,)))
    (every,) = tables(view, Asked(ways=("source",), rows=(None,)))
    assert every.rows is None


def test_a_table_of_the_command_line_has_the_rows_and_seeds_that_were_asked_for(curves, capsys):
    main(["study", "table", str(curves.folder.folder), "--rows", "64", "--seeds", "1", "--format", "csv"])
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {(line["rows"], line["seed"]) for line in found} == {("64", "1")}
    with pytest.raises(SystemExit) as left:
        main(["study", "table", str(curves.folder.folder), "--rows", "few"])
    assert left.value.code == 2
    assert "--rows takes numbers" in capsys.readouterr().err


def test_differences_are_those_of_the_means(curves, drawn):
    """AdapterFusion's figure 3."""
    made = draw(curves, "differences", Asked())
    assert list(made) == ["bert, 32 training rows", "bert, 64 training rows"]
    (axes,) = drawn[0].axes
    bars = {bar.get_label(): [one.get_height() for one in bar] for bar in axes.containers}
    assert list(bars) == ["single", "fused"]
    for way, heights in bars.items():
        wanted = [mean_of(curves, way, task, 32) - mean_of(curves, "full", task, 32) for task in "bc"]
        assert heights == pytest.approx(wanted)


def test_differences_leave_no_room_for_what_has_none(curves, drawn, monkeypatch):
    """Where the reference has not learned a task, or a way has nothing to show, there is nothing to compare."""
    for slot in list(curves.filled):
        if (slot.way, slot.task) == ("full", "c") or slot.way == "fused":
            monkeypatch.delitem(curves.filled, slot)
    draw(curves, "differences", Asked())
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["b"]
    assert [bar.get_label() for bar in axes.containers] == ["single"]


def test_a_long_title_leaves_room_for_the_picture(curves, drawn, monkeypatch):
    long = curves.plan.study.ways["single"].model_copy(
        update={"title": "The inlay of a paper, as long as its title is"}
    )
    monkeypatch.setitem(curves.plan.study.ways, "single", long)
    for name in ("differences", "parameters", "rows", "convergence"):
        draw(curves, name, Asked())
    for figure in drawn:
        (axes,) = figure.axes
        assert axes.get_position().width > 0.4
        assert max(len(line) for text in axes.get_legend().get_texts() for line in text.get_text().split("\n")) <= 28


def test_numbers_of_rows_do_not_stand_in_each_other():
    from inlay.studies.figures import _apart

    assert _apart([100, 500, 1000, 2000]) == ["100", "500", "1,000", "2,000"]
    assert _apart([100, 1900, 2000]) == ["100", "", "2,000"]
    assert _apart([100]) == ["100"]


def test_attention_is_the_mean_over_seeds(curves, drawn):
    """AdapterFusion's figures 4 and 6: targets × members, in the mean and in each layer."""
    draw(curves, "attention", Asked())
    seen, how = drawn[0]
    assert how == ()
    assert drawn[1][1] == ("all",)
    assert list(seen) == ["b", "c"]
    cells = [cell for slot, cell in curves.filled.items() if (slot.way, slot.task, slot.rows) == ("fused", "b", 32)]
    each = [curves.results[cell.name]["attention"] for cell in cells]
    assert len(each) == 2
    for place, mean in seen["b"].mean.items():
        wanted = [sum(pair) / 2 for pair in zip(*(one["places"][place] for one in each), strict=True)]
        assert mean.tolist() == pytest.approx(wanted)
        assert float(mean.sum()) == pytest.approx(1, abs=1e-3)
    assert seen["b"].members == ("c", "own")


def test_a_difference_is_of_the_seeds_that_both_have():
    one, two, three = (Entry(scores, (0, 1), "partly") for scores in ({0: 80.0}, {0: 70.0, 1: 10.0}, {1: 70.0}))
    assert difference(one, two) == pytest.approx(10)
    assert difference(one, three) is None


def test_a_members_name_that_begins_like_the_targets_is_not_its_own(curves, drawn, monkeypatch):
    for result in curves.results.values():
        if "attention" in result:
            others = ["b-long" if name == "c" else name for name in result["attention"]["members"]]
            monkeypatch.setitem(result["attention"], "members", others)
    draw(curves, "attention", Asked(tasks=("b",)))
    assert drawn[0][0]["b"].members == ("b-long", "own")


def test_scores_stand_over_trained_parameters_and_over_rows(curves, drawn):
    """Compacter's figure 1 and its low-resource figure."""
    draw(curves, "parameters", Asked())
    (axes,) = drawn[0].axes
    at = {points.get_label(): points.get_offsets().tolist()[0] for points in axes.collections}
    table = tables(curves)[0]
    assert at == {line.title: pytest.approx([line.trained, line.averages["average"]]) for line in table.lines}
    assert axes.get_xscale() == "log"
    drawn.clear()
    assert list(draw(curves, "rows", Asked(ways=("single", "full")))) == ["b, bert", "c, bert"]
    (axes,) = drawn[0].axes
    single = next(bars for bars in axes.containers if bars.get_label() == "single").lines[0]
    assert single.get_xdata().tolist() == [32, 64]
    assert single.get_ydata().tolist() == pytest.approx([mean_of(curves, "single", "b", rows) for rows in (32, 64)])


def test_convergence_is_what_the_runs_logged(curves, drawn, monkeypatch):
    """AdaMix's figure 7."""
    draw(curves, "convergence", Asked(tasks=("c",)))
    (axes,) = drawn[0].axes
    slot = next(s for s in curves.filled if (s.way, s.task, s.rows, s.seed) == ("single", "c", 32, 0))
    history = curves.results[curves.filled[slot].name]["history"]
    line = next(line for line in axes.lines if line.get_label() == "single")
    assert len(history) >= 2
    assert line.get_xdata().tolist() == [entry[0] for entry in history]
    assert line.get_ydata().tolist() == pytest.approx([100 * entry[2] for entry in history])
    draw(curves, "convergence", Asked(score="loss"))
    assert drawn[-1].axes[0].get_ylabel() == "validation accuracy", "whatever the tables show"
    for result in curves.results.values():
        if "history" in result:
            monkeypatch.setitem(result, "history", [[step, loss, None] for step, loss, _ in result["history"]])
    with pytest.raises(InlayError, match="nothing to draw"):
        draw(curves, "convergence", Asked())


def test_costs_are_compacters_protocol(curves):
    """% trained, seconds per epoch, peak memory, largest batch, operations, bytes stored against full copies."""
    from inlay.studies.page import COST_COLUMNS, costs

    lines = {line[0]: dict(zip(COST_COLUMNS, line, strict=True)) for line in costs(curves, tables(curves)[0])}
    full, single = lines["full"], lines["single"]
    assert full["% trained"] > 90
    assert full["full copies : this"] == pytest.approx(1, abs=0.2)  # a tiny file has a header, too
    stored = next(
        curves.results[cell.name] for slot, cell in curves.filled.items() if (slot.way, slot.rows) == ("single", 32)
    )
    assert single["full copies : this"] == pytest.approx(
        4 * stored["host_parameters"] / stored["stored_bytes"], rel=0.05
    )
    assert single["largest batch in 16 GB"] > full["largest batch in 16 GB"] > 0
    assert full["GFLOPs per row and step"] > single["GFLOPs per row and step"] > 0
    assert all(line["seconds per epoch"] > 0 and line["peak MB"] > 0 for line in lines.values())


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_figures_are_svg(finished, name):
    _, view, _ = finished
    asked = Asked()
    if name == "rows":  # one number of rows: nothing to draw
        with pytest.raises(InlayError, match="nothing to draw"):
            draw(view, name, asked)
        return
    for picture in draw(view, name, asked).values():
        assert ElementTree.fromstring(str(picture)).tag.endswith("svg")  # noqa: S314 (our own)


def test_averages_of_glue_stand_beside_the_others():
    assert _groups(GLUE) == {"average": GLUE}
    assert list(_groups(("sst2", "rte", "mrpc", "sick"))) == ["average", "GLUE (3)"]
    assert _groups(("sick",)) == {}


def test_facts_for_programs(finished):
    _, view, _ = finished
    (facts,) = as_facts(tables(view), view)
    entry = facts["lines"][1]["entries"]["b"]
    assert entry["mean"] == pytest.approx(sum(entry["scores"].values()) / 2)


def test_by_command(finished, tmp_path, capsys):
    out, _, _ = finished
    for words in (
        ["study", "table", str(out), "--against", "logreg", "--ways", "logreg,fused", "--tasks", "b"],
        ["study", "figure", str(out), "differences", "--out", str(tmp_path / "figure.svg")],
        ["study", "figure", str(out), "attention", "--out", str(tmp_path / "figures-1.2")],
        ["study", "report", str(out)],
    ):
        main(words)
    assert (tmp_path / "figure.svg").is_file()
    assert len(list((tmp_path / "figures-1.2").iterdir())) == 2
    assert (out / "report.html").is_file()
    assert "single" not in capsys.readouterr().out.split("report:")[0].splitlines()[4]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["table", "--ways", "fused", "--against", "single"],
            "no way 'single' to compare with: name it in --ways, too",
        ),
        (["table", "--against", "source"], "no way 'source' to compare with"),
        (["figure", "differences", "--ways", "fused", "--against", "single", "--out", "x"], "name it in --ways, too"),
        (["figure", "attention", "--ways", "fusde", "--out", "x"], "no way 'fusde'. Did you mean 'fused'?"),
        (["figure", "attention", "--out", "x.png"], "--out is x.png, but figures are SVG"),
    ],
)
def test_what_a_table_or_a_figure_cannot_show(finished, words, told, capsys):
    with pytest.raises(SystemExit) as left:
        main(["study", words[0], str(finished[0]), *words[1:]])
    assert left.value.code == 2
    assert told in capsys.readouterr().err


def test_titles_that_differ_by_a_mark_are_two_files(finished, tmp_path, monkeypatch, capsys):
    from inlay.studies import figures

    monkeypatch.setattr(figures, "draw", lambda *_: {"a.b": "<svg>1</svg>", "a-b": "<svg>2</svg>"})
    main(["study", "figure", str(finished[0]), "rows", "--out", str(tmp_path / "figures")])
    assert len({file.read_text() for file in (tmp_path / "figures").iterdir()}) == 2
