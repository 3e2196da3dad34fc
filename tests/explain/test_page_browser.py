"""The story's page in a real browser: by keyboard, on a telephone, in both themes, with text that looks like markup.

Skipped where there is no Chromium (Debian: the package chromium) or no Playwright.
"""

import pytest

from pilotfish import SamplingParams
from tests.explain.test_run import MARKUP, an_llm, told

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
browsers = pytest.importorskip("tests.server.test_page_browser")
pytestmark = browsers.pytestmark
browser = browsers.browser


def test_the_page_is_read_by_keyboard_on_a_telephone(browser, tmp_path):
    path = tmp_path / "story.html"
    records, _ = told(an_llm(), SamplingParams(max_tokens=40, temperature=0.8), html=str(path))
    for theme, dark in (("light", False), ("dark", True)):
        context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme=theme)
        page, complaints = context.new_page(), []
        page.on("pageerror", lambda error, found=complaints: found.append(str(error)))
        page.on("console", lambda message, found=complaints: found.append(message.text))
        page.on(
            "request", lambda request, found=complaints: request.url.startswith("file:") or found.append(request.url)
        )
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.locator("u, #k").count() == 0 and MARKUP in page.locator("#text").text_content()
        focused = "document.activeElement.id"
        for key, number in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 1)):
            page.keyboard.press(key)
            assert page.evaluate(focused) == f"pass-{number}"
        page.locator("#text a").last.focus()
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == f"pass-{len(records)}"
        top = page.locator(f"#pass-{len(records)}").bounding_box()["y"]
        assert 0 <= top < 700
        is_dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 100"
        assert page.evaluate(is_dark) == dark
        page.locator("#theme").click()
        assert page.evaluate(is_dark) != dark
        page.get_by_text("The target's laws on the way").nth(1).click()
        assert page.locator("details[open] .bars").count() >= 1
        assert complaints == []
        context.close()
