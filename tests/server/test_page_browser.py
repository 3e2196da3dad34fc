"""The page in a real browser: asked, looked at and stopped by keyboard, on a phone, in both themes, with hostile text.

Skipped where there is no Chromium (Debian: the package chromium) or no Playwright.
"""

import os
import re
import shutil

import pytest

from tests.server import fakes
from tests.server.fakes import PHRASE, a_server, listening, singer
from tests.server.fakes import wait_until as until

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
QUIET = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
MARKUP = "<u id=k>"  # says each byte once, so that a table can say it; 2 of these would be an element
WAIT = 10_000  # milliseconds


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def model():
    return singer(context=512)


@pytest.fixture(scope="module")
def address(model):
    llm = {"method": "first_of", "num_speculative_tokens": 6}
    with listening(a_server(model, llm=llm, max_completion_tokens=400)) as address:
        yield address


@pytest.fixture
def opened(browser):
    """Opens addresses; complaints of a page (console, exceptions, broken rules) fail the test."""
    contexts, complaints = [], []

    def open_page(address, **context):
        contexts.append(browser.new_context(**({"viewport": {"width": 1200, "height": 800}} | context)))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("request", lambda request: request.url.startswith((address, "data:")) or complaints.append(request.url))
        page.complaints = complaints
        page.goto(address)
        until(lambda: page.evaluate("model.textContent || !document.forms.key.hidden"))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def ask(page, question, *, most=60):
    page.evaluate(f"document.getElementById('max-tokens').value = {most}")
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    until(lambda: page.evaluate("/tokens/.test(told.textContent) || !wrong.hidden"))


def spans(page):
    """(text, class, pass) of the tokens of the last answer."""
    js = "all => [...all.at(-1).querySelectorAll('.token')].map(t => [t.textContent, t.className, +t.dataset.pass])"
    return page.locator("article.answer").evaluate_all(js)


def test_each_token_shows_where_it_came_from(opened, address):
    page = opened(address)
    ask(page, "hi")
    text = page.locator("article.answer").text_content()
    assert text.startswith(PHRASE * 3) and "\ufffd" not in text[:-1]
    tokens = spans(page)
    assert "".join(token for token, _, _ in tokens) == text
    drafted = [kind for _, kind, _ in tokens if kind != "token"]
    assert 0 < len(drafted) < len(tokens) and set(drafted) <= {"token d0", "token d1"}
    rows = page.locator("#origins li").evaluate_all(
        "rows => rows.map(row => [...row.children].map(one => one.textContent))"
    )
    counts = {name: int(count) for name, count, _ in rows}
    assert sum(counts.values()) == 60 and counts["the target's own"] < 30
    assert set(counts) - {"the target's own"} <= {"drafted by suffix", "drafted by ngram"}
    assert float(page.locator("#speed").text_content()) > 0
    assert page.locator("#plain").text_content() == "–" or "measured" in page.locator("#plain-name").text_content()
    num_passes = max(number for _, _, number in tokens) + 1
    assert page.locator("#passes g").count() == num_passes
    assert page.locator("#passes").get_attribute("aria-label").startswith(f"{num_passes} passes")
    assert page.locator("#positions g").count() == 6
    assert re.match(r"Accepted: position 1 \d+ %", page.locator("#positions").get_attribute("aria-label"))
    assert "60 tokens" in page.locator("#told").text_content()


def test_a_pass_can_be_looked_at(opened, address):
    """By mouse on its token, by arrow keys on the slider; the tree has the draft, and the token after it."""
    page = opened(address)
    ask(page, "hi")
    token = page.locator(".token.d0, .token.d1").last
    number = int(token.get_attribute("data-pass"))
    token.click()
    assert page.locator("#pass-number").text_content().startswith(f"{number + 1} of")
    picked = page.locator(".token.picked").evaluate_all("all => all.map(t => +t.dataset.pass)")
    assert picked and set(picked) == {number}
    accepted = page.locator("#tree .node.d0, #tree .node.d1").count()
    assert re.search(rf": {accepted} of \d+ accepted", page.locator("#pass-words").text_content())
    slider = page.get_by_role("slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#pass-number").text_content().startswith(f"{number} of")
    page.keyboard.press("Home")
    first, *_, last = page.locator("#tree .node").all_text_contents()
    assert first == "start (the token before)" and last.endswith(" (the target's own)")
    page.keyboard.press("End")
    assert page.locator("#tree-name").text_content() == "The last draft"
    assert "pass" in slider.get_attribute("aria-valuetext")


def test_a_conversation_goes_on_and_can_begin_anew(opened, address):
    page = opened(address)
    bodies = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    ask(page, "one", most=8)
    page.get_by_label("Question", exact=True).fill("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    until(lambda: page.evaluate("document.querySelectorAll('article').length === 4 && !send.hidden"))
    turns = [(turn["role"], turn["content"]) for turn in bodies[-1]["messages"]]
    answer = page.locator("article.answer").first.text_content()
    assert turns == [("user", "one"), ("assistant", answer), ("user", "two\nlines")]
    assert bodies[-1]["pilotfish"] == {"trace": True}
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0 and page.locator("#passes g").count() == 0
    ask(page, "three", most=8)
    assert [turn["content"] for turn in bodies[-1]["messages"]] == ["three"]


def test_escape_stops_an_answer(opened, address, model):
    page = opened(address)
    page.get_by_label("Question", exact=True).fill("for ever")
    model.gate.clear()
    try:
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").wait_for()
        assert page.locator("#told").text_content() == "Answering"
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Send").wait_for()
    finally:
        model.gate.set()
    assert page.locator("article").count() == 0
    assert page.get_by_label("Question", exact=True).input_value() == "for ever"
    assert page.locator("#wrong").is_hidden()


def test_everything_can_be_reached_by_keyboard(opened, address):
    page = opened(address)
    ask(page, "hi", most=12)
    page.locator("#theme").focus()
    page.keyboard.press("Shift+Tab")
    reached = []
    for _ in range(9):
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert reached == ["A", "theme", "fresh", "log", "question", "send", "SUMMARY", "pass", "tree"]
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_what_the_server_refuses_is_said(opened, address):
    page = opened(address)
    ask(page, "hi", most=500)
    page.complaints.clear()  # browsers write a refusal to the console
    assert page.get_by_role("alert").text_content() == "max_tokens 500: this server gives at most 400"
    assert page.get_by_label("Question", exact=True).input_value() == "hi"
    ask(page, "hi", most=5)
    assert page.get_by_role("alert").count() == 0


def test_text_is_never_markup(opened, monkeypatch):
    """Neither the question's nor the model's. And if something got in as markup, it could do nothing."""
    monkeypatch.setattr(fakes, "PHRASE", MARKUP)
    with listening(a_server(singer())) as address:
        page = opened(address)
        question = "<img src=x onerror='window.harm=1'><script>window.harm=1</script>"
        ask(page, question)
        assert page.locator("article.question").text_content() == question
        assert page.locator("article.answer").text_content().startswith(MARKUP * 2)
        assert page.locator("article img, article script, article u, #k, #tree u").count() == 0
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<b id=bait onclick=\"window.harm=1\">x</b>')")
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.harm=1'}))")
        page.locator("#bait").dispatch_event("click")
        assert page.evaluate("window.harm") is None
        assert [text for text in page.complaints if "Content Security Policy" in text]
        page.complaints.clear()


def test_the_key_is_asked_for_and_forgotten_with_the_tab(opened):
    with listening(a_server(singer(), api_key="sesame")) as address:
        page = opened(address)
        field = page.get_by_label("API key")
        assert page.evaluate("document.activeElement.id") == "key-text"
        field.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("does not know this key").wait_for()
        field.fill("sesame")
        page.keyboard.press("Enter")
        field.wait_for(state="hidden")
        ask(page, "hi", most=8)
        assert page.locator("article.answer").text_content()
        page.reload()
        until(lambda: page.evaluate("document.getElementById('model').textContent"))
        assert page.evaluate("[sessionStorage.length, sessionStorage['pilotfish-key']]") == [1, "sesame"]
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        page.complaints.clear()  # 401, twice


def test_it_fits_a_phone(opened, address):
    page = opened(address, viewport={"width": 390, "height": 700}, color_scheme="dark")
    ask(page, "a question that is rather longer than the narrow screen of a telephone is wide")
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#tree").bounding_box()["width"] > width * 0.8


def test_both_themes_and_the_switch(opened, address):
    page = opened(address, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.get_by_label("Theme").select_option("light")
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light
    page.emulate_media(color_scheme="light")
    page.get_by_label("Theme").select_option("dark")
    assert page.evaluate(ground) == dark
