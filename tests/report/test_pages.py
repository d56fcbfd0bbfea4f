"""Pages: every value is escaped, pictures stand in them as they are, and nothing is fetched."""

import torch

from inlay.compose.activations import FusionActivations
from inlay.report.pages import page
from inlay.report.plots import confusion, curve, fusion_svg, plot_fusion

ODD = "<script>alert('x')</script> & $x_$"


def seen(members=("a", "b")):
    mean = {f"encoder.{layer}.ffn": torch.tensor([0.25, 0.75]) for layer in range(2)}
    return FusionActivations("fused", tuple(members), mean, dict.fromkeys(mean, 3))


def run(**more):
    given = {
        "title": ODD, "facts": [("task", ODD)], "scores": [("accuracy", 0.5, float("nan"))], "splits": ["validation", "test"],
        "curve": None, "confusion": None, "attention": None, "config": ODD, "versions": [(ODD, "1")],
    }  # fmt: skip
    return page("run", **given | more)


def test_every_value_is_escaped():
    made = run()
    assert "<script" not in made
    assert made.count("&lt;script&gt;") == 5, "twice the title, a fact, the config, a version"
    assert made.startswith("<!doctype html>")


def test_numbers_are_written_alike():
    made = run(facts=[("rows", 1234567), ("share", 0.5), ("yes", True)])
    assert '<td class="number">1,234,567</td>' in made
    assert '<td class="number">0.5000</td>' in made
    assert "<td>True</td>" in made
    assert '<td class="number">nan</td>' in made


def test_pictures_stand_in_the_page_and_their_words_are_escaped():
    history = [{"step": 1, "loss": 0.7, "validation_f1": None}, {"step": 2, "loss": None, "validation_f1": 0.5}]
    made = run(
        curve=curve(history, "f1"),
        confusion=confusion([ODD, "日本語"], [0, 1, 1], [0, 1, -1]),
        attention=fusion_svg(seen((ODD, "b"))),
    )
    assert made.count("<svg") == 3
    assert "<script" not in made
    assert "日本語" in made
    for words in ("Curve", "Confusion matrix", "What the fusion listens to"):
        assert f"<h2>{words}</h2>" in made


def test_one_fusion_or_several_are_drawn_into_files(tmp_path):
    for name, what in (("one", seen()), ("several", {"x": seen(), "y": seen(("b", "c"))})):
        files = plot_fusion(what, tmp_path / "new" / name)
        assert [file.name for file in files] == [f"{name}.png", f"{name}.svg"]
        assert all(file.stat().st_size > 1000 for file in files)


def test_a_picture_made_again_is_the_same():
    """So that it changes in a repository only where what it shows has changed."""
    assert fusion_svg(seen()) == fusion_svg(seen())
    assert "<dc:date>" not in fusion_svg(seen())
