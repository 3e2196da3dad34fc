"""`run_verify`: the whole proof, in order: texts, a draft equal to the target, laws, a control that must fail, pages.

It does not know how a check is made. The one trick is the control: a drafter that lies about its law must be found
out by the same test with the same number of draws; a test that cannot see a lie proves nothing.

Thresholds. Exact checks allow nothing but near-ties (`rounding`). A chi-square fails below p = FAMILY / number of
chi-square tests (Bonferroni), so a correct system fails about once in 1 / FAMILY runs; with the same seed and models
a run repeats exactly.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ..bench.prompts import read_prompts
from ..decoding.paths import join
from ..decoding.verify import Rule
from ..drafters import registry
from ..drafters.base import Drafter, Setting
from ..drafters.draft_model import DraftModelDrafter, DraftModelOptions, load_draft
from ..errors import OptionError
from ..models.base import CausalLM, ModelInfo
from ..models.load import Loaded
from .actors import AskewLM, Liar
from .ground import Build, Ground, Meter, measure_pass
from .identity import (
    EVERYTHING,
    PENALTIES,
    SHAPED_TEMPERATURE,
    Outcome,
    compare,
    draft_with_itself,
    draft_with_itself_unseeded,
    same_in_any_shape,
)
from .laws import ExactLaws, Experiment, Tallies, draw, uncertain_prefixes
from .memo import MemoLM
from .options import VerifyOptions
from .passes import draw_texts
from .report import Check, Report
from .statistics import Fit, Tally

FAMILY = 1e-4
NUM_PREFIXES = 2
NUM_PROBES = 64  # prefixes tried until one is found after which the method drafts anything
SECONDS_A_DRAW = 1e-3
SELF_PASSES = 60  # what a run with the target as its own draft costs, about
TREE_NODES = 6  # of a draft in the chi-square tests, where the method drafts trees
# The tests of whole texts: drafts as long as the method's own, every row warped, few candidates, for there are many
# texts of this length and each must be expected often enough.
MOST_DRAFTED, TEXT_LENGTH = 4, 4
TEXT_TOP_K, TEXT_TEMPERATURE, TEXT_TOP_P = 4, 1.3, 0.9
_MEMO_ROWS = 4096
_RULES: tuple[Rule, ...] = ("rejection", "block", "coupled")

_WRONG_LAW = "emitted tokens do not follow the target's law"
_LEAK = "what one pass drew comes back in a later one, so tokens depend on each other"
_CLASSES = {  # by field of Tallies: what is tested, and what it means if it fails
    "first": ("first token", _WRONG_LAW),
    "pair": ("first two tokens", _WRONG_LAW + ", or depend on each other in another way than the target says"),
    "text": (f"first {TEXT_LENGTH} tokens", _WRONG_LAW + ", deep in a draft or with temperature and top_p"),
    "accepted": ("accepted tokens", "tokens are not accepted with probability min(1, p / q)"),
    "residual": ("residual tokens", "what replaces a rejected token does not follow norm(max(p - q, 0))"),
    "bonus": ("bonus tokens", "the token after a fully accepted draft does not follow the target's law"),
}


def run_verify(options: VerifyOptions, target: Loaded, speculation: registry.Speculation) -> Report:
    """Prove, or fail to prove, that this method is lossless on this target; a progress bar goes to stderr.

    Raises PromptError and OptionError for prompts and options that cannot be used, DraftError for a draft that does
    not fit. What is wrong with the decoding itself is not raised but reported.
    """
    started = time.perf_counter()
    info = target.model.info
    prompts = [
        list(join(*info.opening(prompt.ids(target.tokenizer))))
        for prompt in read_prompts(options.prompts, options.limit)
    ]
    num_drafted = 0 if speculation.method == "none" else speculation.common.num_speculative_tokens
    ground = Ground(
        model=target.model,
        tokenizer=target.tokenizer,
        build=speculation.build,
        rule=speculation.common.rule,
        num_drafted=num_drafted,
        prompts=prompts,
        options=options,
        meter=Meter(),
    )
    speculation, draft = _with_loaded_draft(ground, speculation)
    ground.build = speculation.build
    memo = MemoLM(ground.model, _memo_rows(ground))
    own, others = list[Experiment](), list[Experiment]()
    if not options.texts_only:
        own, others = _own_experiments(ground, speculation, draft), _our_experiments(ground, memo, speculation, draft)
    results: list[tuple[Experiment, Tallies]] = []
    with ground.meter.running():
        _plan(ground, len(own) + len(others))
        outcomes = _prove_texts(ground)
        checks = [outcome.check for outcome in outcomes]
        checks.append(same_in_any_shape(ground))
        if not options.texts_only:
            results = _draw_all(ground, memo, own, others, outcomes)
            passes = {rule: draw_texts(rule, options.draws, options.seed).fit() for rule in _RULES[:2]}
            checks += _judge(results, passes)
    by_method: list[Outcome | Tallies] = [*outcomes, *(tallies for _, tallies in results[: len(own)])]
    checks += _about_the_runs(ground)
    return Report(
        target=_describe_target(target.model.info),
        method=_describe(speculation, draft),
        checks=tuple(checks),
        num_near_ties=sum(outcome.num_near_ties for outcome in outcomes),
        seconds=time.perf_counter() - started,
        texts_only=options.texts_only,
        num_drafted=sum(one.num_drafted for one in by_method),
        num_accepted=sum(one.num_accepted for one in by_method),
    )


def _plan(ground: Ground, num_experiments: int) -> None:
    """Tell the progress bar how much there is to do."""
    ground.pass_seconds = measure_pass(ground)
    texts = (2 + len(ground.options.temperature)) * _text_seconds(ground) + 3 * SELF_PASSES * ground.pass_seconds
    ground.meter.plan(texts + num_experiments * _draw_seconds(ground))


def _prove_texts(ground: Ground) -> list[Outcome]:
    """With drafting and without, at each temperature; then the target as its own draft."""
    meter, outcomes = ground.meter, []
    num_tokens = 3 * len(ground.prompts) * ground.options.max_tokens
    for temperature in ground.options.temperature:
        with meter.stage(f"texts at temperature {temperature:g}", _text_seconds(ground), num_tokens):
            outcomes.append(compare(ground, temperature))
    for temperature, shape in ((0.0, PENALTIES), (SHAPED_TEMPERATURE, EVERYTHING)):
        with meter.stage(f"texts {shape.name}", _text_seconds(ground), num_tokens):
            outcomes.append(compare(ground, temperature, shape))
    proofs: list[Callable[[], Outcome]] = [
        lambda: draft_with_itself(ground, 0.0),
        lambda: draft_with_itself(ground, 1.0),
        lambda: draft_with_itself_unseeded(ground),
    ]
    for prove in proofs:
        with meter.stage("the target as its own draft", SELF_PASSES * ground.pass_seconds, 1):
            outcomes.append(prove())
    return outcomes


def _draw_all(
    ground: Ground,
    memo: MemoLM,
    own: Sequence[Experiment],
    others: Sequence[Experiment],
    outcomes: Sequence[Outcome],
) -> list[tuple[Experiment, Tallies]]:
    """For the chi-square tests: of the method itself where it drafts, of the others where the law is widest."""
    laws = ExactLaws(memo, ground.options.candidates)
    text_laws = ExactLaws(memo, TEXT_TOP_K, TEXT_TEMPERATURE, TEXT_TOP_P)
    texts = [pair for outcome in outcomes if outcome.texts for pair in zip(ground.prompts, outcome.texts, strict=True)]
    prefixes = uncertain_prefixes(laws, texts)
    results: list[tuple[Experiment, Tallies]] = []
    for experiment in (*own, *others):
        with ground.meter.stage(f"laws: {experiment.name}", _draw_seconds(ground), ground.options.draws):
            chosen = laws if experiment.length == 2 else text_laws
            places = _places(ground, chosen, prefixes, experiment) if experiment in own else prefixes[:NUM_PREFIXES]
            # A draw of a whole text costs about twice as much, so half as many.
            num_draws = ground.options.draws if experiment.length == 2 else -(-ground.options.draws // 2)
            results.append((experiment, _draw(ground, chosen, places, experiment, num_draws)))
    return results


def _judge(results: Sequence[tuple[Experiment, Tallies]], passes: Mapping[Rule, Fit]) -> list[Check]:
    """Chi-square checks, all but the last experiment's, which is the control's. passes: of `draw_texts`, by rule."""
    *honest, (_, lies) = results
    tested = [
        (experiment, name, tallies)
        for experiment, tallies in honest
        for name in _CLASSES
        if name == ("pair" if experiment.length == 2 else "text") or _tally(tallies, name).fit().num_degrees
    ]
    threshold = FAMILY / (len(tested) + len(passes) + 1)
    return [
        *(_law_check(*one, threshold) for one in tested),
        *(_fit_check(f"several passes, {rule}", fit, threshold, _LEAK, "two tokens") for rule, fit in passes.items()),
        _control_check(lies, threshold),
    ]


def _law_check(experiment: Experiment, name: str, tallies: Tallies, threshold: float) -> Check:
    what, meaning = _CLASSES[name]
    rate = f"{tallies.num_accepted / tallies.num_drafted:.0%} accepted" if tallies.num_drafted else "nothing drafted"
    return _fit_check(f"{experiment.name}: {what}", _tally(tallies, name).fit(), threshold, meaning, rate)


def _fit_check(name: str, fit: Fit, threshold: float, meaning: str, about: str) -> Check:
    enough = fit.num_degrees > 0
    return Check(
        name,
        enough and fit.p_value >= threshold,
        fit.p_value,
        threshold,
        f"chi-square {fit.chi_square:.1f}, {fit.num_degrees} degrees of freedom, {fit.num_draws} draws; {about}"
        if enough
        else f"{fit.num_draws} draws are too few to tell anything",
        meaning if enough else "nothing was tested; raise draws, or choose prompts with more than one way to go on",
    )


def _control_check(lies: Tallies, threshold: float) -> Check:
    fit = lies.pair.fit()
    return Check(
        "control: a drafter that lies about q is found out",
        fit.p_value < threshold,
        fit.p_value,
        threshold,
        f"must be below: chi-square {fit.chi_square:.1f}, {fit.num_degrees} degrees of freedom, {fit.num_draws} draws",
        "the test would not have seen a wrong law, so what it passed is not proven; raise draws or change prompts",
    )


def _about_the_runs(ground: Ground) -> list[Check]:
    watch = ground.watch
    return [
        Check(
            "pages",
            not watch.faults,
            len(watch.faults),
            0,
            "; ".join([f"looked at after {watch.num_looks} steps", *watch.faults[:3]]),
            "the cache lost or leaked pages, so texts can mix",
        ),
        Check(
            "drafter never failed",
            watch.num_failed_drafts == 0,
            watch.num_failed_drafts,
            0,
            f"{watch.num_failed_drafts} failures",
            "the drafter raised errors, and what decoded plainly instead says nothing about drafting (see the log)",
        ),
    ]


# -- setting up --------------------------------------------------------------------------------------------------


def _with_loaded_draft(ground: Ground, speculation: registry.Speculation) -> tuple[registry.Speculation, Loaded | None]:
    """A draft model is loaded once and shared by all runs. None: the method has none, or finds its own."""
    if not isinstance(speculation.options, DraftModelOptions):
        return speculation, None
    draft = load_draft(speculation.options, ground.setting(), speculation.method)
    return _drafting_with(draft, speculation), draft


def _drafting_with(draft: Loaded, speculation: registry.Speculation) -> registry.Speculation:
    options = replace(speculation.options, model=draft, quantization="none")  # as far as loading goes
    return replace(speculation, options=options)


def _own_experiments(ground: Ground, speculation: registry.Speculation, draft: Loaded | None) -> list[Experiment]:
    """The method under test, with its draft model remembered by path like the target, by each rule that it takes."""
    if draft is not None:
        remembering = Loaded(MemoLM(draft.model, _memo_rows(ground)), draft.tokenizer)
        speculation = _drafting_with(remembering, speculation)
    build = _knowing_words(speculation.build, ground)
    num_drafted = ground.options.num_drafted
    if not ground.num_drafted:
        return [Experiment("plain decoding", build, "rejection", 0, num_drafted)]
    found = []
    for number, rule in enumerate(_RULES[:2]):
        try:
            trees = ground.engine(rule=rule).drafter.trees
        except OptionError:  # `block` is for chains, and this method has nothing but trees
            continue
        nodes = max(num_drafted, TREE_NODES) if trees else num_drafted
        name = f"{speculation.method}, {rule}"
        found += [
            Experiment(name, build, rule, number, nodes),
            _of_texts(name, build, rule, 2 + number, ground.num_drafted),
        ]
    return found


def _knowing_words(build: Build, ground: Ground) -> Build:
    """The experiments draw ids and need no text, but a draft with another vocabulary is worded by both tokenizers."""
    return lambda setting: build(replace(setting, tokenizer=ground.tokenizer))


def _of_texts(name: str, build: Build, rule: Rule, number: int, num_drafted: int | Literal["auto"]) -> Experiment:
    """The same with drafts as long as the method's own; none reaches beyond the texts, as far as that goes."""
    nodes = min(MOST_DRAFTED, MOST_DRAFTED if num_drafted == "auto" else num_drafted)
    return Experiment(f"{name}, K {nodes}", build, rule, number, nodes, TEXT_LENGTH, max(1, TEXT_LENGTH - nodes))


def _our_experiments(
    ground: Ground, memo: MemoLM, speculation: registry.Speculation, draft: Loaded | None
) -> list[Experiment]:
    """A sampled draft under every rule, and the control, which comes last."""
    askew, num_drafted = _draft_model(AskewLM(memo)), ground.options.num_drafted
    sampled = [Experiment(f"sampled draft, {rule}", askew, rule, 10 + i, num_drafted) for i, rule in enumerate(_RULES)]
    if draft is not None and speculation.options.draft_sample_method == "probabilistic":
        sampled = sampled[-1:]  # the method itself is a sampled draft under the other rules
    else:
        sampled += [
            _of_texts(f"sampled draft, {rule}", askew, rule, 13 + i, MOST_DRAFTED) for i, rule in enumerate(_RULES[:2])
        ]
    return [*sampled, Experiment("control", lambda setting: Liar(askew(setting)), "rejection", 20, num_drafted)]


def _draft_model(model: CausalLM) -> Build:
    def build(setting: Setting) -> Drafter:
        return DraftModelDrafter(model, setting)

    return build


def _places(
    ground: Ground, laws: ExactLaws, prefixes: Sequence[tuple[int, ...]], experiment: Experiment
) -> Sequence[tuple[int, ...]]:
    """Where the law is wide *and* the method drafts; if it drafts nowhere, where the law is wide."""
    chosen = []
    if ground.num_drafted:
        for prefix in prefixes[:NUM_PROBES]:
            if _draw(ground, laws, [prefix], experiment, 4).num_drafted >= 4:
                chosen.append(prefix)
            if len(chosen) == NUM_PREFIXES:
                return chosen
    return chosen or prefixes[:NUM_PREFIXES]


def _draw(
    ground: Ground, laws: ExactLaws, prefixes: Sequence[tuple[int, ...]], experiment: Experiment, num_draws: int
) -> Tallies:
    return draw(
        laws,
        prefixes,
        experiment,
        num_draws=num_draws,
        seed=ground.options.seed,
        watch=ground.watch,
        tick=ground.meter.tick,
    )


def _tally(tallies: Tallies, name: str) -> Tally:
    tally = getattr(tallies, name)
    assert isinstance(tally, Tally)
    return tally


def _memo_rows(ground: Ground) -> int:
    return sum(len(prompt) + ground.options.max_tokens for prompt in ground.prompts) + _MEMO_ROWS


def _text_seconds(ground: Ground) -> float:
    return 3 * len(ground.prompts) * ground.options.max_tokens * ground.pass_seconds


def _draw_seconds(ground: Ground) -> float:
    """Of one experiment: the draws themselves, which handle laws as wide as the vocabulary, and some passes."""
    a_draw = SECONDS_A_DRAW * (1 + ground.model.info.vocab_size / 16_000)
    return ground.options.draws * a_draw + 20 * ground.pass_seconds


def _describe_target(info: ModelInfo) -> str:
    exact = ", bitwise: a row does not depend on the shape of a pass" if info.bitwise else ""
    weights = str(info.dtype).removeprefix("torch.") if info.quantization == "none" else info.quantization
    return f"{info.name} ({weights}{exact})"


def _describe(speculation: registry.Speculation, draft: Loaded | None) -> str:
    about = f" ({draft.model.info.name})" if draft is not None else ""
    return f"{speculation.method}{about}, K {speculation.common.num_speculative_tokens}, rule {speculation.common.rule}"
