"""The page in a real browser: type, read, look inside, compare, reload from the address."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
SHOTS = os.environ.get("INLAY_SCREENSHOTS")
"""A folder: then every test leaves a picture there."""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, url, request):
    """The page, and nothing on its console; nothing is asked of another host."""
    context = browser.new_context(viewport={"width": 1200, "height": 1000}, accept_downloads=True)
    page = context.new_page()
    complaints: list[str] = []
    page.expected = None  # what the browser may say of an answer that a test provokes
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda asked: complaints.append(asked.url) if not asked.url.startswith((url, "blob:", "data:")) else None,
    )
    page.goto(url)
    page.wait_for_selector("#a-model")
    yield page
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{request.node.name}.png"), full_page=True)
    context.close()
    assert [said for said in complaints if not (page.expected and page.expected in said)] == []


def choose(page, model: str, text: str, side: str = "a") -> None:
    page.select_option(f"#{side}-model", model)
    page.fill(f"#{side}-text", text)


def best(page, side: int = 0) -> tuple[str, str]:
    """The first bar of a panel: its label and its score."""
    row = page.locator(".panel").nth(side).locator("table.bars tr").first
    row.wait_for()
    return row.locator("th").inner_text(), row.locator("td.score").inner_text()


def test_type_and_read_the_label(page, engine):
    choose(page, "classification-0", "good w1")
    wanted = engine.classify("classification-0", ["good w1"])[0][0]
    page.wait_for_selector("table.bars")
    label, score = best(page)
    assert label == wanted["label"]
    assert score.startswith(f"{100 * wanted['score']:.1f}")
    page.fill("#a-text", "good w1\nbad w2\nw3")
    playwright.expect(page.locator(".answer")).to_have_count(3)


@pytest.mark.parametrize(
    ("model", "more", "shows"),
    [
        ("regression-0", {}, ".big"), ("tags-0", {}, ".tags li"), ("multilabel-0", {}, "table.bars"),
        ("choice-0", {"choices": "good\nbad"}, "table.bars"), ("spans-0", {"pair": "w1 good w2"}, ".big"), ("nli-0", {"pair": "w1"}, "table.bars"),
    ],
)  # fmt: skip
def test_every_kind_has_a_form(page, model, more, shows):
    choose(page, model, "good w1")
    for field, value in more.items():
        page.fill(f"#a-{field}", value)
    page.wait_for_selector(f".answers {shows}")
    for field in ("pair", "choices"):
        assert page.is_visible(f"#a-{field}") == (field in more)


def test_look_inside_a_fusion(page, engine):
    choose(page, "fused-classification", "good w1 bad")
    page.wait_for_selector("table.heat tbody tr")
    said = engine.explain("fused-classification", "good w1 bad")
    assert page.locator("table.heat").first.locator("tbody tr").count() == 5

    def shown() -> list[list[str]]:
        return [row.locator("td").all_inner_texts() for row in page.locator(".inside > .scroll tbody tr").all()]

    assert shown() == [[f"{weight:.2f}" for weight in token] for token in said["weights"][0][0]]
    page.focus("#a-place")
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("output").first).to_contain_text(said["places"][1])
    assert shown() == [[f"{weight:.2f}" for weight in token] for token in said["weights"][0][1]]
    page.get_by_role("button", name="token 2: good").click()
    rows = page.locator(".token tbody tr")
    assert rows.count() == len(said["places"])
    assert rows.first.locator("td").all_inner_texts() == [f"{weight:.2f}" for weight in said["weights"][0][0][1]]


def test_switch_members_off_and_pin_them(page, engine):
    choose(page, "fused-classification", "good w1 bad")
    page.wait_for_selector("table.heat tbody tr")
    row = page.get_by_role("group", name="a", exact=True)
    row.get_by_label("off").check()
    page.wait_for_selector(".moved")
    changed = engine.explain("fused-classification", "good w1 bad", off=["a"])["changed"]
    assert best(page)[1].startswith(f"{100 * changed['answer'][0]['score']:.1f}")
    assert page.locator(".inside > .scroll tbody tr").first.locator("td").all_inner_texts() == ["0.00", "1.00"]
    row.get_by_label("pinned").check()
    row.get_by_role("spinbutton").fill("0.25")
    playwright.expect(page.locator(".inside > .scroll tbody td").first).to_have_text("0.25")
    row.get_by_label("free").check()
    page.wait_for_selector(".moved", state="detached")


def test_compare_and_reload_from_the_address(page, url, browser):
    choose(page, "fused-classification", "good w1 bad")
    page.wait_for_selector("table.heat tbody tr")
    page.get_by_role("group", name="b", exact=True).get_by_label("off").check()
    page.get_by_role("button", name="token 3: w1").click()
    page.check("#compare")
    page.wait_for_selector("#b-text")
    page.select_option("#b-model", "classification-1")
    with page.expect_response(lambda answer: "bad w2" in (answer.request.post_data or "")):
        page.fill("#b-text", "bad w2")
    page.wait_for_timeout(100)
    page.locator(".panel").nth(1).locator("table.bars").wait_for()
    page.wait_for_selector(".token h4")
    before = [best(page, 0), best(page, 1)]
    assert "a.off=b" in page.url
    again = browser.new_page()
    again.goto(page.url)
    again.locator(".panel").nth(1).locator("table.bars").wait_for()
    again.wait_for_selector(".moved")
    assert [best(again, 0), best(again, 1)] == before
    assert again.input_value("#b-text") == "bad w2"
    assert "w1" in again.locator(".token h4").first.inner_text()
    again.close()
    page.uncheck("#compare")
    assert page.locator(".panel").count() == 1


def test_an_answer_that_breaks_off_is_none(page):
    """A new question may come while the last answer's body arrives; that was drawn as an answer without results."""
    told = page.evaluate("""async () => {
      const { classify } = await import("/page/api.js");
      const after = async (error) => {
        window.fetch = async () => ({ ok: true, status: 200, headers: new Headers(), json: () => Promise.reject(error) });
        return classify("a", ["b"]).then(() => "an answer", (problem) => `${problem.name}: ${problem.message}`);
      };
      return [await after(new DOMException("gone", "AbortError")), await after(new SyntaxError("no JSON"))];
    }""")
    assert told == ["AbortError: gone", "Error: The server answered 200."]


def test_a_saved_page_stands_alone(page, browser, tmp_path):
    choose(page, "fused-classification", "good <b>w1</b> & bad")
    page.wait_for_selector("table.heat tbody tr")
    label = best(page)
    with page.expect_download() as download:
        page.click("#save")
    file = tmp_path / "saved.html"
    download.value.save_as(file)
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|https?:", text)
    saved = browser.new_page()
    asked: list[str] = []
    saved.on("request", lambda request: asked.append(request.url))
    saved.goto(file.as_uri())
    assert best(saved) == label
    assert saved.locator(".field p").all_inner_texts()[:2] == ["fused-classification", "good <b>w1</b> & bad"]
    assert saved.locator("input[value=free][checked]").count() == 2
    assert saved.locator("b").count() == 0
    assert saved.locator("table.heat tbody tr").count() > 3
    assert asked == [file.as_uri()]
    if SHOTS:
        saved.screenshot(path=str(Path(SHOTS) / "saved.png"), full_page=True)
    saved.close()


def test_a_mistake_is_shown_in_the_servers_words(page):
    choose(page, "choice-0", "good")
    page.fill("#a-choices", "one\ntwo")
    page.wait_for_selector("table.bars")
    choose(page, "a", "w1 " * 400_000)
    page.wait_for_selector(".problem:not(:empty)")
    assert "this server takes" in page.inner_text(".problem")
    page.expected = "413"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page, scheme):
    Axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed").Axe
    page.emulate_media(color_scheme=scheme)
    page.check("#compare")
    choose(page, "fused-classification", "good w1 bad")
    choose(page, "tags-0", "good w1 bad", "b")
    page.wait_for_selector("table.heat tbody tr")
    page.wait_for_selector(".tags li")
    page.get_by_role("button", name="token 2: good").click()
    found = Axe().run(page)
    bad = [f"{v['id']}: {v['help']} {v['nodes'][0]['html'][:100]}" for v in found.response["violations"]]
    assert not bad


def test_it_fits_a_phone(page):
    page.set_viewport_size({"width": 360, "height": 740})
    page.check("#compare")
    choose(page, "fused-tags", "good w1 bad")
    page.wait_for_selector("table.heat tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_everything_can_be_reached_by_keyboard(page):
    choose(page, "fused-classification", "good w1")
    page.wait_for_selector("table.heat tbody tr")
    page.focus("#compare")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.dataset.token || document.activeElement.type || ''"
            )
        )
    assert {"save", "a-model", "a-text", "a-place", "radio", "0", "1"} <= seen
