"""Tables in every format, and figures."""

import csv
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from inlay import InlayError
from inlay.cli import main
from inlay.studies.figures import FIGURES, draw
from inlay.studies.formats import FORMATS, as_facts, tex
from inlay.studies.page import study_page
from inlay.studies.plan import View
from inlay.studies.tables import GLUE, Asked, _groups, tables
from tests.studies.tiny import study_in


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


def test_names_cannot_act_in_the_page(here, finished, tmp_path):
    import shutil

    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    from tests.studies.tiny import FILE, run_here

    ways = {"single": FILE["ways"]["single"] | {"title": "<script>alert(1)</script>"}}
    view, _ = run_here(study_in(here, ways=ways, about="<b>x</b>"), out)
    page = study_page(view)
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_figures_are_svg(finished, name):
    _, view, _ = finished
    asked = Asked()
    if name in ("rows", "convergence"):  # one number of rows, one evaluation: nothing to draw
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
        ["study", "figure", str(out), "attention", "--out", str(tmp_path / "figures")],
        ["study", "report", str(out)],
    ):
        main(words)
    assert (tmp_path / "figure.svg").is_file()
    assert len(list((tmp_path / "figures").iterdir())) == 2
    assert (out / "report.html").is_file()
    assert "single" not in capsys.readouterr().out.split("report:")[0].splitlines()[4]
