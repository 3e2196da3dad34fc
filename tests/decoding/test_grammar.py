"""Structured output in the core: each row masked by its own state, drafts cut, and the exact law of what comes out.

The grammar here is a table of states, so the law of plain constrained decoding can be written down.
"""

import itertools
import math

import pytest
import torch

from pilotfish.decoding.draft import Draft, chain
from pilotfish.decoding.grammar import Constraint, StructuredOutputsParams
from pilotfish.decoding.request import FinishReason, Request
from pilotfish.decoding.sampling import SamplingParams, process, warp
from pilotfish.decoding.verify import Verdict, verify
from pilotfish.engine.judge import judge
from pilotfish.errors import OptionError, PilotfishError
from tests.decoding.enumeration import BranchingNoise, branches, chosen, deep, drawn, target_rows

A, B, C, END = range(4)
# state -> {token: state}. a (b | c a)* : accepting in state 1. State 3 takes nothing and accepts: the end.
TABLE = {0: {A: 1}, 1: {B: 1, C: 2, A: 3}, 2: {A: 1}, 3: {}}
ACCEPTING = {1, 3}


class TableMatcher:
    """A `Matcher` over a table. poison: a state in which it gives up."""

    def __init__(self, states=(0,), poison=None):
        self.states, self.poison = list(states), poison

    @property
    def accepting(self):
        return self.states[-1] in ACCEPTING

    def allowed(self):
        row_V = torch.zeros(4, dtype=torch.bool)
        row_V[list(TABLE[self.states[-1]])] = True
        return row_V

    def take(self, token):
        after = TABLE[self.states[-1]].get(token)
        if after is None:
            return False
        if after == self.poison:
            raise PilotfishError("too complex")
        self.states.append(after)
        return True

    def undo(self):
        self.states.pop()

    def copy(self):
        return TableMatcher(self.states, self.poison)


def a_constraint(poison=None):
    return Constraint(TableMatcher(poison=poison), {END})


def ids(row_V):
    return set(row_V.nonzero().flatten().tolist())


TREE = Draft((A, B, C, B, END, A, A), (-1, 0, 0, 2, 0, 2, 5))
#            a  ab ac acb a$  aca acaa


def test_each_row_is_masked_by_the_state_after_its_own_path():
    constraint = a_constraint()
    rows = constraint.masks(TREE)
    assert ids(rows[0]) == {A}  # the end may not come before the grammar accepts
    assert ids(rows[1]) == ids(rows[2]) == {A, B, C, END}
    assert ids(rows[3]) == {A}
    assert ids(rows[6]) == {A, B, C, END}  # behind a node whose elder sibling is forbidden
    assert constraint.matcher.states == [0], "looking moves nothing"


def test_the_pending_row_follows_what_was_emitted():
    constraint = a_constraint()
    assert not constraint.advance(A)
    assert ids(constraint.masks(chain([C, A]))[0]) == {A, B, C, END}
    assert not constraint.advance(C)
    assert ids(constraint.masks(Draft())[0]) == {A}
    constraint.advance(A)
    assert constraint.advance(A), "nothing but the end can follow"


def test_drafts_are_cut_where_the_grammar_forbids_them():
    cut = a_constraint().cut(TREE)
    assert (cut.tokens, cut.parents) == ((A, B, C, END, A, A), (-1, 0, 0, 0, 2, 4))
    chances = Draft((B, A, B), (-1, -1, 1), chances=(0.5, 0.3, 0.2), kind="k")
    cut = a_constraint().cut(chances)
    assert (cut.tokens, cut.parents, cut.chances, cut.kind) == ((A, B), (-1, 0), (0.3, 0.2), "k")
    assert len(a_constraint().cut(chain([B, A]))) == 0
    fine = chain([A, B, B])
    assert a_constraint().cut(fine) is fine


def test_nothing_is_kept_behind_an_end():
    cut = a_constraint().cut(chain([A, END, B]))
    assert cut.tokens == (A, END)
    assert a_constraint().cut(chain([A, A, A])).tokens == (A, A)


def test_drawn_tokens_stay():
    """To drop one for what it is would bias the text: the law of what is left would no longer be q."""
    drawn = chain([B, A], torch.full((2, 4), 0.25))
    assert a_constraint().cut(drawn) is drawn


@pytest.mark.parametrize("draft", [chain([A, C, A, B]), Draft((A, B, C, A, B), (-1, 0, 0, 2, 3))])
def test_a_draft_into_a_part_that_is_too_complex_is_cut_and_the_request_goes_on(draft):
    constraint = a_constraint(poison=2)
    rows = constraint.masks(draft)
    assert ids(rows[0]) == {A} and ids(rows[1]) == {A, B, C, END}
    assert C not in constraint.cut(draft).tokens and A in constraint.cut(draft).tokens
    request = Request("r", (0,), SamplingParams(temperature=0), 0, "rejection", 99, frozenset({END}))
    request.constraint = constraint
    logits_NV = torch.zeros(len(draft) + 1, 4)
    logits_NV[:, C] = 1  # the target itself goes there
    logits_NV[-1, B] = 2
    ((verdict, _),) = judge([request], [draft], logits_NV)
    assert [draft.tokens[node] for node in verdict.path] == [A] and verdict.token == C
    step = request.advance(1, draft, verdict)
    assert step.tokens == (A, C) and step.finish is FinishReason.ERROR and "too complex" in request.error


# -- the law ---------------------------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(5)
TEXTS = [text for length in range(5) for text in itertools.product(range(4), repeat=length)]
LOGITS = {text: torch.randn(4, generator=GENERATOR, dtype=torch.float64) for text in TEXTS}
Q = {text: torch.softmax(torch.randn(4, generator=GENERATOR, dtype=torch.float64), 0) for text in TEXTS}
DEPTH = 3


def plain_row(text, params):
    """By the definition: forbid what the table forbids, then warp. None behind an end."""
    state = 0
    for token in text:
        if token == END or state == 3:
            return None
        state = TABLE[state][token]
    if state == 3:
        return None
    allowed = [*TABLE[state], *([END] if state in ACCEPTING else [])]
    logits = torch.full((1, 4), -math.inf, dtype=torch.float64)
    logits[0, allowed] = LOGITS[text][allowed]
    return warp(logits, params)[0]


def go_on(text, params, probability=1.0):
    """The law of plain constrained decoding from a text on, to DEPTH tokens or an end: {text: probability}."""
    row = plain_row(text, params) if len(text) < DEPTH else None
    if row is None:
        return {text: probability}
    law = {}
    for token, p in enumerate(row.tolist()):
        if p > 0:
            law |= go_on((*text, token), params, probability * p)
    return law


def drafted_law(draft_of, params, rule, masks=Constraint.masks):
    """The same where a pass with a draft comes first; every branch of chance is run."""

    def one_pass(branch):
        noise = BranchingNoise(branch)
        constraint = a_constraint()
        request = Request("r", (0,), params, 0, rule, 99, frozenset({END}), constraint=constraint)
        draft = constraint.cut(draft_of(noise))
        logits_NV = target_rows(LOGITS.__getitem__, draft)
        p_NV = warp(logits_NV, params, allowed_NV=masks(constraint, draft))
        request.advance(1, draft, verify(draft, p_NV, rule, noise))
        return tuple(request.output)

    law = {}
    for probability, text in branches(one_pass):
        for longer, p in go_on(text[:DEPTH], params, probability).items():
            law[longer] = law.get(longer, 0) + p
    return law


DRAFTS = {
    "chosen chain": lambda _noise: chosen(Q.__getitem__, deep(1, 1, 1)),
    "chain along the grammar": lambda _noise: chain([A, C, A]),
    "chosen tree": lambda _noise: chosen(Q.__getitem__, deep(4, 2, 1)),
    "drawn chain": lambda noise: drawn(noise, Q.__getitem__, deep(1, 1)),
    "drawn tree": lambda noise: drawn(noise, Q.__getitem__, deep(2, 1)),
    "none": lambda _noise: Draft(),
}
LAWS = [SamplingParams(), SamplingParams(temperature=0.6, top_k=2), SamplingParams(top_p=0.7, min_p=0.1)]


def distance(law, other):
    return max(abs(law.get(text, 0) - other.get(text, 0)) for text in law | other)


CASES = [
    (name, rule)
    for name in DRAFTS
    for rule in ("rejection", "block", "coupled")
    if (rule, name[-4:]) != ("block", "tree")
]


@pytest.mark.parametrize("params", LAWS, ids=range(len(LAWS)))
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_the_law_is_that_of_plain_constrained_decoding(name, rule, params):
    plain = go_on((), params)
    assert abs(sum(plain.values()) - 1) < 1e-12 and len(plain) > 2
    assert distance(drafted_law(DRAFTS[name], params, rule), plain) < 1e-12


def of_the_pending_row(constraint, draft):
    """What others did: every row masked by the state at the start of the draft."""
    return Constraint.masks(constraint, Draft()).expand(len(draft) + 1, -1)


def of_the_row_before(constraint, draft):
    """Off by one."""
    rows = Constraint.masks(constraint, draft)
    return rows[[0, *range(len(draft))]]


@pytest.mark.parametrize("masks", [of_the_pending_row, of_the_row_before])
def test_a_mask_from_the_wrong_row_would_be_seen(masks):
    """Negative control."""
    law = drafted_law(DRAFTS["chain along the grammar"], SamplingParams(), "rejection", masks)
    assert distance(law, go_on((), SamplingParams())) > 0.01


def test_a_mask_behind_the_cuts_would_be_seen():
    """Negative control: forbidden ids taken out of what top_k left, instead of before."""
    params = SamplingParams(top_k=2)
    late = warp(LOGITS[()][None], params)[0] * torch.tensor([1.0, 0, 0, 0])
    assert float(late.sum()) < 0.99, "and so the first token would be another"
    assert plain_row((), params).tolist() == [1, 0, 0, 0]


# -- beside other parameters -----------------------------------------------------------------------------------------


def test_masks_come_first_and_nothing_brings_a_forbidden_id_back():
    params = SamplingParams(logit_bias={B: 100.0}, repetition_penalty=2.0, presence_penalty=-2.0, min_tokens=2)
    allowed = torch.tensor([[True, False, True, True]])
    row = process(torch.zeros(1, 4), params, [B, B], [[B]], {END}, allowed)[0]
    assert row[B] == -math.inf and row[END] == -math.inf, "and min_tokens forbids the end as ever"
    assert math.isfinite(row[A]) and math.isfinite(row[C])


def test_a_request_ends_with_its_grammar():
    request = Request("r", (0,), SamplingParams(), 0, "rejection", 99, frozenset({END}), constraint=a_constraint())
    step = request.advance(1, chain([A, A, B]), Verdict((0, 1, 2), C))
    assert step.tokens == (A, A) and step.finish is FinishReason.STOP and request.stop_reason is None


def test_an_end_is_an_end_before_the_grammar_s():
    request = Request("r", (0,), SamplingParams(), 0, "rejection", 99, frozenset({END}), constraint=a_constraint())
    step = request.advance(1, chain([A, END]), Verdict((0, 1), C))
    assert step.tokens == (A, END) and step.finish is FinishReason.STOP


def test_max_tokens_cuts_a_text_short_of_its_grammar():
    params = SamplingParams(max_tokens=2)
    request = Request("r", (0,), params, 0, "rejection", 99, frozenset({END}), constraint=a_constraint())
    assert request.advance(1, chain([A, B]), Verdict((0, 1), B)).finish is FinishReason.LENGTH


def test_where_nothing_is_allowed_the_request_fails_and_says_so():
    params = SamplingParams(logit_bias={A: -math.inf})
    request = Request("r", (0,), params, 0, "rejection", 99, frozenset({END}), constraint=a_constraint())
    (error,) = judge([request], [Draft()], torch.zeros(1, 4))
    assert isinstance(error, PilotfishError) and "forbidden" in str(error)


# -- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar"),
        ({"regex": "a", "json": {}}, "not json and regex"),
        ({"regex": 5}, "regex must be a text, not 5"),
        ({"choice": "ab"}, "choice must be a list of texts, not 'ab'"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": "[1]"}, "an object, not [1]"),
        ({"json": {"a": math.nan}}, "json is no JSON schema"),
        ({"json": 7}, "json must be a JSON schema, not 7"),
        ({"json_object": 1, "whitespace_pattern": 3}, "whitespace_pattern must be a text"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for JSON, not for regex"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, told):
    with pytest.raises(OptionError) as caught:
        StructuredOutputsParams(**wrong)
    assert told in str(caught.value)


def test_equal_wishes_are_equal():
    one, other = StructuredOutputsParams(json={"a": 1}), StructuredOutputsParams(json='{"a": 1}')
    assert one == other and hash(one) == hash(other) and one.kind == "json"
    assert StructuredOutputsParams(json=False).kind == "json"
    assert StructuredOutputsParams(choice=["a"]) == StructuredOutputsParams(choice=("a",))


def test_params_take_nothing_else():
    with pytest.raises(OptionError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})
