"""What Leviathan et al. 2023 (arXiv 2211.17192) report, as they print it: Tables 2, 3 and 4. Only numbers.

Their c of T5-large, 0.11, stands in the appendix; the text says that c was always below 0.05.
"""

from dataclasses import dataclass

TITLE = "Leviathan et al. 2023"


@dataclass(frozen=True, slots=True)
class Alpha:
    """Table 3: acceptance by target and draft, at temperature 0 and 1; 10,000 tokens each."""

    target: str
    draft: str
    greedy: float
    drawn: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Tables 2 and 4: T5 1.1 XXL (11 B) on one TPU v4, batch 1."""

    task: str
    draft: str
    temperature: float
    num_drafted: int
    alpha: float
    c: float
    predicted: float
    measured: float


_ENDE, _NEWS = "T5-XXL 11B, English to German", "T5-XXL 11B, summaries"
_GPT, _LAMDA = "GPT-like 97M, plain text", "LaMDA 137B, dialogue (top 40)"

ALPHAS = (
    Alpha(_GPT, "unigram", 0.03, 0.03),
    Alpha(_GPT, "bigram", 0.05, 0.05),
    Alpha(_GPT, "GPT-like 6M", 0.88, 0.89),
    Alpha(_ENDE, "unigram", 0.08, 0.07),
    Alpha(_ENDE, "bigram", 0.20, 0.19),
    Alpha(_ENDE, "T5-small 77M", 0.75, 0.62),
    Alpha(_ENDE, "T5-base 250M", 0.80, 0.68),
    Alpha(_ENDE, "T5-large 800M", 0.82, 0.71),
    Alpha(_NEWS, "unigram", 0.13, 0.08),
    Alpha(_NEWS, "bigram", 0.23, 0.16),
    Alpha(_NEWS, "T5-small 77M", 0.65, 0.53),
    Alpha(_NEWS, "T5-base 250M", 0.73, 0.55),
    Alpha(_NEWS, "T5-large 800M", 0.74, 0.56),
    Alpha(_LAMDA, "LaMDA 100M", 0.61, 0.57),
    Alpha(_LAMDA, "LaMDA 2B", 0.71, 0.71),
    Alpha(_LAMDA, "LaMDA 8B", 0.75, 0.74),
)

SPEEDS = (
    Speed("English to German", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Speed("English to German", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Speed("English to German", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Speed("English to German", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Speed("English to German", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Speed("English to German", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Speed("summaries", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Speed("summaries", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Speed("summaries", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Speed("summaries", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Speed("summaries", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Speed("summaries", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)
