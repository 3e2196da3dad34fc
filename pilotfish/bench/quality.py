"""What quantised weights cost in quality: their laws against the float model's, on the float model's own text.

It does not know how weights are quantised. The one trick: no data set is needed; the float model answers our sample
prompts, and both models then read the same text, so every position gives a pair of laws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..decoding.sampling import SamplingParams
from ..llm import LLM
from ..models.base import CausalLM
from ..models.load import Loaded
from ..paged.batch import Feed, lay_out
from .prompts import BenchPrompt, read_prompts

_NEW_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Quality:
    """kl: mean KL(float || quantised) in nats. agreement: share of equal argmaxes. Perplexities of the same text."""

    kl: float
    agreement: float
    perplexity: float
    perplexity_float: float
    num_positions: int

    def describe(self) -> str:
        """One line for people."""
        change = 100 * (self.perplexity / self.perplexity_float - 1)
        return (
            f"KL {self.kl:.4f} nats, argmax agreement {self.agreement:.3f}, perplexity {self.perplexity:.2f} against "
            f"{self.perplexity_float:.2f} ({change:+.2f} %), over {self.num_positions} positions"
        )


def measure_quality(quantised: Loaded, reference: Loaded, prompts: Sequence[BenchPrompt] | None = None) -> Quality:
    """Compare a quantised model with the float model it was made from. prompts: our own samples if not given."""
    ids = [prompt.ids(reference.tokenizer) for prompt in (read_prompts() if prompts is None else prompts)]
    answers = LLM.from_model(reference).generate(ids, SamplingParams(temperature=0, max_tokens=_NEW_TOKENS))
    kl, agree, losses, losses_float, count = 0.0, 0, 0.0, 0.0, 0
    for prompt, answer in zip(ids, answers, strict=True):
        text = [*prompt, *answer.token_ids]
        theirs = torch.log_softmax(_logits(reference.model, text).float(), 1)
        ours = torch.log_softmax(_logits(quantised.model, text).float(), 1)
        kl += float((theirs.exp() * (theirs - ours)).sum())
        agree += int((theirs.argmax(1) == ours.argmax(1)).sum())
        following = torch.tensor(text[1:])[:, None]
        losses -= float(ours.gather(1, following).sum())
        losses_float -= float(theirs.gather(1, following).sum())
        count += len(following)
    perplexity, perplexity_float = torch.tensor([losses, losses_float]).div(count).exp().tolist()
    return Quality(kl / count, agree / count, perplexity, perplexity_float, count)


def _logits(model: CausalLM, text: Sequence[int]) -> torch.Tensor:
    """[len(text) - 1, V] on the CPU: the laws after each token but the last, in one pass."""
    cache = model.new_cache(1, len(text))
    cache.open("text", text)
    cache.reserve("text", len(text) - 1)
    feed = Feed("text", list(text[:-1]), 0, len(text) - 1)
    return model.forward(lay_out([feed], cache, model.info.device), cache).logits_NV.cpu()
