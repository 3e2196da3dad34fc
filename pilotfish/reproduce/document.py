"""A document of headings, paragraphs, tables and a picture, as HTML and as Markdown. It does not know what it says."""

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    file: str
    about: str


@dataclass(frozen=True, slots=True)
class Table:
    """The first column is words, and so is the last if ``told``; the others are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    told: bool = False


Block = Heading | Paragraph | Picture | Table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
td { font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.told th:last-child, table.told td:last-child { text-align: left; white-space: normal; min-width: 24rem; }
img { max-width: 100%; height: auto; background: white; }
"""


def as_html(title: str, blocks: Sequence[Block]) -> str:
    """One page; pictures are beside it."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n'
        f"<h1>{html.escape(title)}</h1>\n{body}\n</html>\n"
    )


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The same for readers of the repository."""
    return "\n\n".join([f"# {title}", *(_markdown(block) for block in blocks)]) + "\n"


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Picture(file, about):
            return f'<p><img src="{html.escape(file)}" alt="{html.escape(about)}"></p>'
        case Table(header, rows, told):
            lines = [_html_row("th", header), *(_html_row("td", row) for row in rows)]
            kind = ' class="told"' if told else ""
            return f"<table{kind}>\n" + "\n".join(lines) + "\n</table>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Paragraph(text):
            return text
        case Picture(file, about):
            return f"![{about}]({file})"
        case Table(header, rows, told):
            last = len(header) - 1
            marks = ["---" if i == 0 or (told and i == last) else "---:" for i in range(len(header))]
            lines = [header, marks, *rows]
            return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
