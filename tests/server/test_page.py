"""The page's files, read as text: what they may load, whether neither mouse nor eyes are needed, and contrast."""

import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest

import pilotfish
from pilotfish.server import page
from tests.server.fakes import MESSAGES, a_server, serving

STATIC = Path(pilotfish.__file__).parent / "server" / "static"
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(STATIC.iterdir())}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
DANGEROUS = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|\.on[a-z]+ ?="


class Tags(HTMLParser):
    """Every tag of the page: (name, attributes)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(FILES["index.html"])

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


TAGS = Tags().found
IDS = [attributes["id"] for _, attributes in TAGS if "id" in attributes]


@pytest.fixture(scope="module")
def client():
    with serving(a_server(api_key="secret")) as client:
        yield client


@pytest.mark.parametrize("path", page.PATHS)
def test_each_file_is_served_to_everybody_and_forbids_all_else(client, path):
    response = client.get(path)
    name = path.removeprefix("/page/").removeprefix("/") or "index.html"
    assert response.status_code == 200 and response.text == FILES[name]
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    assert response.headers["content-type"] == f"{kinds[name.rpartition('.')[2]]}; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert rules.pop("default-src") == rules.pop("form-action") == rules.pop("frame-ancestors") == "'none'"
    assert rules == dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'") | {
        "img-src": "data:",
        "base-uri": "'none'",
    }
    assert response.headers["x-content-type-options"] == "nosniff"
    assert client.post("/v1/chat/completions", json={"messages": MESSAGES}).status_code == 401


def test_nothing_else_is_served(client):
    for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/page.py", "/static/"):
        assert client.get(path).status_code in (401, 404)
    assert len(page.PATHS) == len(FILES) == 6


def test_every_file_is_in_the_package():
    project = tomllib.loads((STATIC.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["pilotfish"]
    for name in FILES:
        assert any(fnmatch(f"server/static/{name}", pattern) for pattern in patterns), name


def test_nothing_comes_from_elsewhere():
    """But the name of SVG's vocabulary, which is no address."""
    for name, text in FILES.items():
        assert re.findall(r"(?:https?:)?//[\w-]+\.[\w./-]+", text.replace("http://www.w3.org/2000/svg", "")) == [], name
    loaded = [a[key] for _, a in TAGS for key in ("src", "href") if key in a and not a[key].startswith("#")]
    assert sorted(loaded) == ["data:,", "page/chat.js", "page/page.css"]
    for text in SCRIPTS.values():
        assert {name.removeprefix("./") for name in re.findall(r'from "([^"]+)"', text)} <= set(SCRIPTS)


def test_markup_has_no_code_and_code_writes_no_markup():
    names = {name for _, attributes in TAGS for name in attributes}
    assert not {name for name in names if name.startswith("on")} | (names & {"style"})
    assert [attributes for tag, attributes in TAGS if tag == "script"] == [{"type": "module", "src": "page/chat.js"}]
    assert not [tag for tag, _ in TAGS if tag in ("style", "iframe", "object", "base")]
    for name, text in SCRIPTS.items():
        assert re.search(DANGEROUS, text) is None, name
    for bad in ("a.innerHTML = x", "b.onclick = f", "eval(x)", "document.write(x)"):  # negative control
        assert re.search(DANGEROUS, bad)


def test_the_key_is_kept_for_the_tab_only():
    stored = re.findall(r"(\w+Storage)\.(\w+)\((\w+)", "".join(SCRIPTS.values()))
    assert {(place, name) for place, _, name in stored} == {("sessionStorage", "KEY"), ("localStorage", "THEME")}
    assert "cookie" not in "".join(SCRIPTS.values())


def test_ids_are_there_once_and_used():
    assert len(IDS) == len(set(IDS))
    text = FILES["chat.js"]
    wanted = set(re.findall(r'\$\("([\w-]+)"\)', text)) | {"max-tokens", "temperature", "seed"}
    assert wanted <= set(IDS)
    pointed = {a[key] for _, a in TAGS for key in ("for", "aria-labelledby") if key in a}
    assert pointed <= set(IDS)


def test_every_control_has_a_name_and_every_region_too():
    """A control's name is its label: around it, or pointing to it."""
    html = FILES["index.html"]
    around = re.findall(r"<label[ >].*?</label>", html, re.S)
    for tag, attributes in TAGS:
        if tag in ("input", "select", "textarea"):
            inside = any(f'id="{attributes["id"]}"' in label for label in around)
            assert inside or f'for="{attributes["id"]}"' in html, attributes
        if tag in ("main", "aside") or attributes.get("role") in ("log", "img", "region"):
            assert tag == "main" or "aria-label" in attributes or "aria-labelledby" in attributes, attributes
        if tag == "button":
            assert re.search(rf"<button[^>]*{attributes.get('id', '')}[^>]*>\w+", html)
    roles = {attributes.get("role") for _, attributes in TAGS}
    assert {"log", "alert", "status"} <= roles
    assert ("html", {"lang": "en"}) in TAGS
    assert not [attributes for _, attributes in TAGS if (attributes.get("tabindex") or "0") not in ("0", "-1")]


# -- contrast --------------------------------------------------------------------------------------------------------


def colours(theme):
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", FILES["page.css"])
    return {name: (light, dark)[theme == "dark"] for name, light, dark in pairs}


def contrast(one, other):
    """WCAG 2.2's, from 1 to 21."""
    shades = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        shades.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(shades) / min(shades)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_enough(theme):
    """AA: 4.5 for text, 3 for what else has to be seen."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    known = colours(theme)
    grounds = ["paper", "panel"]
    text = [(ink, ground) for ground in grounds for ink in ("ink", "soft", "wrong")]
    text += [("ink", f"d{i}") for i in range(4)] + [("on-accent", "accent")]
    for ink, ground in text:
        assert contrast(known[ink], known[ground]) >= 4.5, (ink, ground)
    for mark in ("accent", "line", "drafted", *(f"d{i}-line" for i in range(4))):
        for ground in grounds:
            assert contrast(known[mark], known[ground]) >= 3, (mark, ground)


def test_motion_only_where_it_is_welcome():
    css = FILES["page.css"]
    calm = re.sub(r"@media \(prefers-reduced-motion: no-preference\) \{.*?\n\}", "", css, flags=re.S)
    assert "transition" in css
    assert not re.search("transition|animation|scroll-behavior: smooth", calm)
    assert "behavior:" not in "".join(SCRIPTS.values())
