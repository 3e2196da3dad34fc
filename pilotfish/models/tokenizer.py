"""Text to tokens and back: the tokenizer, its incremental inverse, and whether two tokenizers are the same.

Does not know models, requests or stop strings; which ids end a text is the generation config's business.
The one trick: a decoder looks ahead only at unfinished characters and behind only a few tokens, so streaming decodes a
short window and emits what lies beyond the part already sent; the cost of a token does not grow with the text.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, PromptError

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_FILLER = re.compile(r"(?i)[<\[].*(unused|reserved|placeholder).*[>\]]")


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what decoding needs."""

    def __init__(self, hf: "PreTrainedTokenizerBase") -> None:
        self.hf = hf

    def __len__(self) -> int:
        """How many tokens there are, added ones included. Models are often padded to more rows."""
        return len(self.vocabulary)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, by default with the special tokens (such as <s>) that the model expects around it."""
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids. Special tokens, and the ids of padded rows that stand for no token, have no text."""
        return self.text(list(filter(self.spelt.__contains__, ids)))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The ids of a conversation in the model's own format, up to where the assistant's answer begins. tools: that
        the model shall know of, as JSON schemas in OpenAI's form."""
        if self.hf.chat_template is None:
            raise ModelError(
                f"the tokenizer {self.hf.name_or_path!r} has no chat template, so it cannot format messages; "
                "give the prompt as plain text, or use an instruction-tuned model"
            )
        text = self._format(messages, tools)
        if tools and text == self._format(messages, None):
            raise ModelError(
                f"the chat template of {self.hf.name_or_path!r} knows no tools; leave them out, or use a model "
                "that was trained to call tools"
            )
        # The template has written the special tokens itself.
        return self.encode(text, add_special_tokens=False)

    def _format(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        import jinja2

        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except jinja2.TemplateError as error:  # templates refuse roles and orders they do not know
            raise PromptError(f"the model's chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return text

    def for_grammars(self) -> Any:
        """The same tokens in llguidance's form; takes some seconds. Raises ModelError for tokenizers it cannot read."""
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self.hf, PreTrainedTokenizerFast):
            raise ModelError(f"structured output needs a fast tokenizer, and {self.hf.name_or_path!r} has none")
        try:
            read = from_tokenizer(self.hf, slices=[])
        except ValueError as error:
            raise ModelError(f"llguidance, for structured output, cannot read this tokenizer: {error}") from error
        spelt = self.spelt

        class Spelt:
            """llguidance takes all added tokens for special, such as Qwen's <tool_call>, which has a text."""

            eos_token_id, bos_token_id = read.eos_token, None
            special_token_ids = tuple(token for token in range(read.vocab_size) if token not in spelt)
            tokens = tuple(read.decode_bytes([token]) for token in range(read.vocab_size))

            def __call__(self, text: str | bytes) -> list[int]:
                raw = text.encode() if isinstance(text, str) else text
                return list(read.tokenize_bytes(raw))

        return LLTokenizer(TokenizerWrapper(Spelt()), eos_token=read.eos_tokens)

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token's id. Made once: asking Hugging Face costs a tenth of a second."""
        return dict(self.hf.get_vocab())

    @functools.cached_property
    def spelt(self) -> frozenset[int]:
        """The ids that have a text: those of tokens which decoding does not skip as special."""
        marked = {token for token, added in self.hf.added_tokens_decoder.items() if added.special}
        # "Special" is written down in two places which need not agree with what decoding skips, so decoding decides.
        special = {token for token in marked.union(self.hf.all_special_ids) if not self.text([token])}
        return frozenset(self.vocabulary.values()) - special

    @functools.cached_property
    def byte_tokens(self) -> frozenset[int]:
        """The ids of single bytes in SentencePiece vocabularies, spelt like <0x0A>."""
        return frozenset(token for name, token in self.vocabulary.items() if BYTE_TOKEN.fullmatch(name))

    @functools.cached_property
    def token_bytes(self) -> Mapping[int, bytes]:
        """What each token that has a text stands for. Raises ModelError where that cannot be told."""
        from .spelling import token_bytes

        return token_bytes(self)

    @functools.cached_property
    def leads(self) -> bool:
        """Whether the first token of a text stands for a space that is not in the text, as in most of SentencePiece.
        Raises ModelError as `token_bytes`."""
        from .spelling import leads

        return leads(self)

    def text(self, ids: list[int]) -> str:
        """`decode` for ids known to be in `spelt`; saves looking at each of them."""
        text = self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class Detokenizer:
    """The text of one request, token by token: what `feed` and `flush` return adds up to `tokenizer.decode` of all ids.

        ids     ... [ window: the last 8 to 16 tokens          ]
        text    ...   | sent (drawn from the window alone) | new | held |

    Held back is only what a later token can still change: an unfinished UTF-8 character, which shows as one U+FFFD at
    the end, and a run of SentencePiece byte tokens, which as a whole either is UTF-8 or becomes U+FFFD.

    Why the window may start anywhere, even inside a character: it is decoded alone, but only compared with itself. Its
    beginning can read differently (a missing leading space, a broken character), yet a UTF-8 decoder that starts in the
    middle is in step again after at most 3 bytes, and an unfinished character has at most 3: with 8 tokens of a byte or
    more, the end reads the same.
    """

    WINDOW = 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.text
        self._spelt = tokenizer.spelt
        self._byte_tokens = tokenizer.byte_tokens
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were returned

    def feed(self, token: int) -> str:
        """The text that became final with this token; often a word, sometimes nothing."""
        if token not in self._spelt:
            return ""
        self._window.append(token)
        if token in self._byte_tokens:
            return ""
        text = self._text(self._window)
        final = _final(text)
        new = text[self._sent : final]
        self._sent = max(self._sent, final)
        if len(self._window) >= 2 * self.WINDOW:
            self._window = self._window[-self.WINDOW :]
            self._sent = _final(self._text(self._window))
        return new

    def flush(self) -> str:
        """The text still held back, now that nothing will follow."""
        text = self._text(self._window)
        new = text[self._sent :]
        self._sent = len(text)
        return new


def _final(text: str) -> int:
    """How many characters no later token can change: of broken characters, only the last is still open."""
    return len(text) - text.endswith(REPLACEMENT)


def mismatch(draft: Tokenizer, target: Tokenizer) -> str | None:
    """Why the draft's ids do not mean what the target's do, in a sentence; None if they do.

    Compares tokens, not sizes: padding and added tokens make tables of one tokenizer differ in length. An id that only
    one of them knows is no contradiction; it is never drafted, or always rejected. Nor is one that both keep free,
    under whatever names. Whether the draft *model* has a row for every id it may have to read is the model's business.
    """
    drafts = {token: name for name, token in draft.vocabulary.items()}
    targets = {token: name for name, token in target.vocabulary.items()}
    shared = drafts.keys() & targets.keys()
    if not shared:
        return "the draft and the target have no token id in common"
    differing = [token for token in shared if drafts[token] != targets[token]]
    first = min(
        (t for t in differing if not (_FILLER.fullmatch(drafts[t]) and _FILLER.fullmatch(targets[t]))), default=None
    )
    if first is None:
        return None
    return f"token {first} is {targets[first]!r} in the target and {drafts[first]!r} in the draft"
