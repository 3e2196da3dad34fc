"""The commit walk: every way to end, met inside an accepted run exactly where plain decoding would have met it."""

import random

import pytest

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.request import FinishReason, Request, SpeculationStats, TokenLogprob
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.decoding.verify import Verdict

EOS = 0
WORDS = ["<eos>", "a", "b", "c", "ab", "abc", "ba", " ", "xyz", "\n", ""]  # a token's id is its index
A, B, C, AB, ABC, BA, SPACE, XYZ, NEWLINE, NOTHING = range(1, len(WORDS))


class Words:
    """A text stream that knows WORDS."""

    def feed(self, token):
        return WORDS[token]

    def flush(self):
        return ""


class Reluctant:
    """A text stream that is always one character behind, as with an unfinished UTF-8 character."""

    def __init__(self):
        self.kept = ""

    def feed(self, token):
        text = self.kept + WORDS[token]
        self.kept = text[-1:]
        return text[:-1]

    def flush(self):
        text, self.kept = self.kept, ""
        return text


def a_request(*, prompt=(7, 7, 7), max_length=1000, stop_ids=(EOS,), stream=Words, **params):
    params = SamplingParams(**params)
    stop_ids = frozenset(stop_ids) | set(params.stop_token_ids)
    return Request("r", prompt, params, 0, "rejection", max_length, stop_ids, stream() if stream else None)


def accept(request, tokens, *, drafted=0, logprobs=()):
    """One pass that accepts all of ``tokens`` but the last, which the target adds; ``drafted`` more were drafted."""
    draft = chain((*tokens[:-1], *[XYZ] * drafted))
    return request.advance(1, draft, Verdict(tuple(range(len(tokens) - 1)), tokens[-1]), logprobs)


# Ends inside a run.


def test_a_run_without_an_end_is_kept_whole():
    request = a_request()
    step = accept(request, (A, B, C), drafted=2)
    assert step.request is request
    assert step.tokens == (A, B, C)
    assert step.pieces == ("a", "b", "c")
    assert (step.num_drafted, step.num_accepted, step.finish) == (4, 2, None)
    assert list(step.kept) == [0, 1, 2]  # the pending token's row and the two accepted; the last has none yet
    assert request.tokens == [7, 7, 7, A, B, C]
    assert request.output == [A, B, C]
    assert request.text == "abc"
    assert request.finish is None


@pytest.mark.parametrize("at", range(4))
def test_end_of_text_anywhere_in_a_run(at):
    run = [A, B, C, SPACE]
    run[at] = EOS
    request = a_request()
    step = accept(request, run)
    assert step.finish is request.finish is FinishReason.STOP
    assert request.stop_reason is None
    assert request.output == run[: at + 1] == list(step.tokens)  # the end itself is a token, but has no text
    assert request.text == "".join(step.pieces) == "abc "[:at]
    assert step.num_accepted == min(at + 1, 3)
    assert list(step.kept) == list(range(1 + at))


def test_a_stop_id_is_named_as_the_reason():
    request = a_request(stop_token_ids=[C])
    accept(request, (A, C, B))
    assert request.finish is FinishReason.STOP
    assert request.stop_reason == C
    assert request.output == [A, C]
    assert request.text == "a"


def test_ignore_eos_goes_on_but_stop_ids_still_stop():
    request = a_request(stop_ids=(), ignore_eos=True, stop_token_ids=[C])
    accept(request, (A, EOS, B))
    assert request.finish is None
    accept(request, (B, C, A))
    assert request.output == [A, EOS, B, B, C]


@pytest.mark.parametrize("stream", [Words, None], ids=["text", "ids alone"])
def test_max_tokens_inside_a_run(stream):
    request = a_request(max_tokens=2, stream=stream)
    assert request.room == 2
    step = accept(request, (A, B, C))
    assert step.tokens == (A, B)
    assert step.finish is FinishReason.LENGTH
    assert request.stop_reason is None
    assert request.room == 0
    assert step.num_accepted == 2
    assert list(step.kept) == [0, 1]


@pytest.mark.parametrize("stream", [Words, None], ids=["text", "ids alone"])
def test_the_contexts_end_inside_a_run(stream):
    request = a_request(max_length=6, stream=stream)
    assert request.room == 3
    step = accept(request, (A, B, C, SPACE))
    assert step.tokens == (A, B, C)
    assert step.finish is FinishReason.LENGTH
    assert len(request.tokens) == 6


def test_a_stop_beats_the_length_on_the_very_last_token():
    request = a_request(max_tokens=2)
    accept(request, (A, EOS))
    assert request.finish is FinishReason.STOP
    request = a_request(max_tokens=2, stop="b")
    accept(request, (A, B))
    assert (request.finish, request.stop_reason, request.text) == (FinishReason.STOP, "b", "a")


def test_before_min_tokens_nothing_stops():
    """The law forbids stop ids there; if one comes anyway (a bias), plain decoding would go on as well."""
    request = a_request(min_tokens=2, stop="b")
    accept(request, (EOS, B))
    assert request.finish is None
    assert request.text == "<eos>b"
    accept(request, (A, B))
    assert (request.finish, request.text) == (FinishReason.STOP, "<eos>ba")
    request = a_request(min_tokens=2)
    accept(request, (A, EOS))
    assert request.finish is None, "the law forbids an end while fewer than 2 tokens stand before it"
    request = a_request(min_tokens=2)
    accept(request, (A, B, EOS, C))
    assert request.output == [A, B, EOS]


# Stop strings.


@pytest.mark.parametrize(
    ("stop", "run", "text", "reason", "num_tokens"),
    [
        ("b", (A, B, C), "a", "b", 2),  # a token of its own
        ("b", (A, ABC, C), "aa", "b", 2),  # inside a token: what follows it in the token is cut as well
        ("cab", (A, ABC, ABC, C), "aab", "cab", 3),  # from the end of one token to the middle of the next
        ("abcab", (A, B, C, A, B), "", "abcab", 5),  # the whole text so far
        ("zc", (XYZ, NOTHING, C), "xy", "zc", 3),  # around a token without text
        (("c", "b"), (A, ABC), "aa", "b", 2),  # two at once: the earlier one
        (("bc", "abc"), (ABC,), "", "abc", 1),
        (("abc", "ab"), (AB, C), "", "ab", 1),  # the shorter one is complete first
        (("ab", "abc"), (ABC,), "", "ab", 1),  # both begin here: the first named
        (("abc", "ab"), (ABC,), "", "abc", 1),
        ("aab", (A, A, A, B), "a", "aab", 4),  # a beginning that has to be given up half
        ("\n\n", (A, NEWLINE, NEWLINE, B), "a", "\n\n", 3),
    ],
)
def test_stop_strings(stop, run, text, reason, num_tokens):
    request = a_request(stop=stop)
    pieces = accept(request, run).pieces
    assert request.finish is FinishReason.STOP
    assert request.stop_reason == reason
    assert request.num_output == num_tokens
    assert request.text == "".join(pieces) == text
    # A stream that is a character behind finds the string later, or never if nothing follows; the text is the same.
    request = a_request(stop=stop, stream=Reluctant)
    accept(request, (*run, SPACE, SPACE))
    assert request.finish is FinishReason.STOP
    assert request.num_output in (num_tokens, num_tokens + 1, num_tokens + 2)
    assert request.text == text


def test_the_stop_string_is_shown_if_asked_for_but_nothing_after_it():
    request = a_request(stop="b", include_stop_str_in_output=True)
    accept(request, (A, ABC, C))
    assert request.text == "aab"
    assert request.output == [A, ABC]


def test_text_that_might_be_a_stop_string_is_held_back_until_it_is_not():
    request = a_request(stop=["abx", "bcd"])
    assert accept(request, (A,)).pieces == ("",)
    assert accept(request, (B,)).pieces == ("",)  # "ab": may be abx
    assert accept(request, (C,)).pieces == ("a",)  # "bc": may be bcd
    assert accept(request, (C,)).pieces == ("bcc",)
    assert accept(request, (XYZ, A)).pieces == ("xyz", "")
    assert request.text == "abccxyz"
    accept(request, (EOS,))
    assert request.text == "abccxyza"  # at the end what was held is shown


def test_what_is_held_back_comes_out_at_the_length_and_at_an_abort():
    request = a_request(stop="abx", max_tokens=2)
    step = accept(request, (A, B))
    assert step.pieces == ("", "ab")
    assert request.text == "ab"
    request = a_request(stop="abx", stream=Reluctant)
    accept(request, (A, B))
    assert request.text == ""
    assert request.finish_with(FinishReason.ABORT) == "ab"
    assert request.text == "ab"
    assert request.finish is FinishReason.ABORT
    assert request.finish_with(FinishReason.ERROR) == ""
    assert request.finish is FinishReason.ABORT


def test_a_stop_string_may_end_in_what_the_stream_held_back():
    """The last token's text is complete only when the stream is flushed."""
    request = a_request(stop="b", max_tokens=2, stream=Reluctant)
    accept(request, (A, B))
    assert (request.finish, request.text) == (FinishReason.STOP, "a")


# What else belongs to an emitted token.


def test_a_chunk_of_a_prompt_only_fills_the_cache():
    request = a_request()
    step = request.advance(5, EMPTY, None)
    assert list(step.kept) == [0, 1, 2, 3, 4]
    assert (step.tokens, step.pieces, step.num_drafted, step.finish) == ((), (), 0, None)
    assert request.stats.num_steps == 0
    assert request.tokens == [7, 7, 7]


@pytest.mark.parametrize("num_trunk", [1, 4])
def test_kept_rows_of_a_tree_are_the_trunks_and_the_paths(num_trunk):
    # pending ── 0 A ── 2 C ── 4 A
    #         └─ 1 B ── 3 C ── 5 B
    tree = Draft((A, B, C, C, A, B), (-1, -1, 0, 1, 2, 3))
    request = a_request()
    step = request.advance(num_trunk, tree, Verdict((1, 3), SPACE))
    assert step.tokens == (B, C, SPACE)
    assert list(step.kept) == [*range(num_trunk), num_trunk + 1, num_trunk + 3]
    assert (step.num_drafted, step.num_accepted) == (6, 2)
    # An end on the way: the row of the last emitted token is not needed any more.
    step = a_request(stop="c").advance(num_trunk, tree, Verdict((1, 3, 5), SPACE))
    assert step.tokens == (B, C)
    assert list(step.kept) == [*range(num_trunk), num_trunk + 1]
    step = a_request().advance(num_trunk, tree, Verdict((), SPACE))
    assert list(step.kept) == list(range(num_trunk))


def test_log_probabilities_are_cut_to_what_was_emitted():
    logprobs = [TokenLogprob(token, -0.5) for token in (A, EOS, C)]
    request = a_request(logprobs=0)
    accept(request, (A, EOS, C), logprobs=logprobs)
    assert request.logprobs == logprobs[:2]
    assert [entry.token for entry in request.logprobs] == request.output


def test_row_outputs_are_what_stands_before_each_rows_choice():
    request = a_request()
    accept(request, (A, B))
    tree = Draft((C, A, B), (-1, 0, -1))
    assert request.row_outputs(tree) == [[A, B], [A, B, C], [A, B, C, A], [A, B, B]]
    assert request.row_outputs(EMPTY) == [[A, B]]


def test_guessed_tokens_are_not_settled():
    request = a_request()
    accept(request, (A, B))
    assert request.num_settled == len(request.tokens) == 5
    request.num_guessed = 2
    assert request.num_settled == 3


def test_a_prompt_must_leave_room():
    for prompt, max_length in (((), 10), ((1, 2), 2)):
        with pytest.raises(AssertionError):
            a_request(prompt=prompt, max_length=max_length)


# Statistics.


def test_stats_count_what_was_emitted():
    request = a_request()
    accept(request, (A, B, C), drafted=1)  # 3 drafted, 2 accepted
    request.advance(1, EMPTY, Verdict((), A))  # a plain step is not a draft
    accept(request, (B,), drafted=3)  # 3 drafted, none accepted
    accept(request, (C, EOS, A, A))  # 3 drafted and found good, 2 of them emitted
    stats = request.stats
    assert stats.num_steps == 4
    assert stats.per_step_drafted == [3, 3, 3]
    assert stats.per_step_accepted == [2, 0, 2]
    assert stats.acceptance_histogram() == [1, 0, 2, 0]
    assert stats.report() == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 9,
        "acceptance_histogram": [1, 0, 2, 0],
        "acceptance_histogram_by_draft_length": {3: [1, 0, 2, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
        "per_step_accepted": [2, 0, 2],
        "per_step_drafted": [3, 3, 3],
    }


def test_stats_of_a_request_that_never_drafted():
    report = SpeculationStats().report()
    assert report["mean_acceptance_length"] == 1.0
    assert report["draft_acceptance_rate"] == 0.0
    assert report["acceptance_histogram"] == [0]


# However a text is cut into runs, it is the same text.


SETTINGS = [
    {},
    {"stop": "ab"},
    {"stop": ["abc", "ba", "b "]},
    {"stop": ["aba", "bab"], "include_stop_str_in_output": True},
    {"stop": "yzx", "max_tokens": 9},
    {"stop": ["bb", "cc"], "min_tokens": 5},
    {"stop_token_ids": [XYZ], "min_tokens": 3},
    {"max_tokens": 7},
    {"stop_ids": (), "ignore_eos": True, "stop": "\na"},
    {"max_length": 9, "stop": "abcabc"},
    {"stream": None, "max_tokens": 11, "stop_token_ids": [SPACE]},
]


def plain_text(tokens, setting):
    """(output, text, finish, stop reason), read off the whole text after each token. For min_tokens = 0 and Words."""
    stops = [setting["stop"]] if isinstance(setting.get("stop"), str) else setting.get("stop", [])
    limit = min(setting.get("max_tokens", 256), setting.get("max_length", 1000) - 3)
    text = ""
    for i, token in enumerate(tokens, 1):
        if token in setting.get("stop_ids", (EOS,)) or token in setting.get("stop_token_ids", ()):
            return tokens[:i], text, "stop", token if token in setting.get("stop_token_ids", ()) else None
        text += WORDS[token]
        if hits := [(text.index(stop), number) for number, stop in enumerate(stops) if stop in text]:
            at, number = min(hits)
            shown = at + len(stops[number]) * setting.get("include_stop_str_in_output", False)
            return tokens[:i], text[:shown], "stop", stops[number]
        if i == limit:
            return tokens[:i], text, "length", None
    return tokens, text, None, None


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_runs_of_any_length_give_the_text_of_plain_decoding(setting):
    rng = random.Random(str(setting))
    finishes = set()
    for _ in range(150):
        tokens = rng.choices(range(len(WORDS)), weights=[0.4, 4, 4, 2, 2, 1, 1, 2, 0.5, 1, 0.5], k=rng.randint(1, 20))
        for stream in (Words, Reluctant) if setting.get("stream", Words) else (None,):
            by_one, by_all, by_some = (a_request(**(setting | {"stream": stream})) for _ in range(3))
            walk(by_one, tokens, lambda: 1)
            walk(by_all, tokens, lambda: 20)
            walk(by_some, tokens, lambda: rng.randint(1, 6))
            assert ending(by_one) == ending(by_all) == ending(by_some)
            finishes.add(by_one.finish)
            if stream is Words and "min_tokens" not in setting:
                assert ending(by_one) == plain_text(tokens, setting)
    assert len(finishes) > 1, "the setting should end some texts one way and some another"


def ending(request):
    return (
        request.output,
        request.text + (request._held if not request.finish else ""),
        request.finish,
        request.stop_reason,
    )


def walk(request, tokens, how_many):
    """Advance to the end in runs; what streams is never taken back, and the cache holds what it should."""
    streamed, cached, num_emitted, waiting = "", request.num_prompt - 1, 0, list(tokens)
    while waiting and not request.finish:
        run = waiting[: how_many()]
        step = accept(request, run, drafted=2)
        streamed += "".join(step.pieces)
        assert len(step.pieces) == len(step.tokens)
        assert streamed == request.text
        num_emitted += len(step.tokens)
        cached += len(step.kept)
        assert cached == len(request.tokens) - 1
        del waiting[: len(run)]
    assert num_emitted == request.num_output


def test_what_streams_never_shows_the_beginning_of_a_stop_string():
    """Nor holds back more than that: what was sent ends just before the first place where one may yet begin."""
    rng, stops = random.Random(0), ["abc", "ba b", "\n\n"]
    for _ in range(300):
        request, text = a_request(stop=stops), ""
        for token in rng.choices([A, B, C, AB, BA, SPACE, NEWLINE], k=20):
            accept(request, (token,))
            if request.finish:
                assert not any(stop in request.text for stop in stops)
                break
            text += WORDS[token]
            open_at = (at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops))
            assert request.text == text[: next(open_at, len(text))]
