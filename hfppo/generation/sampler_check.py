"""Compare what the model's own sampler does with a forward over whole rows, before it is used."""

import itertools
from typing import cast

import torch

from hfppo.data.prompts import pad_left
from hfppo.generation.contract import Completions, Sampler
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.key_values import may_keep
from hfppo.models.output_checks import logits_of_forward, precision
from hfppo.models.packing import eval_mode

SHORT, LONG, TOKENS = 2, 6, 4  # tokens of two prompts, and of each completion
SEEDS = [0, 1]


@torch.no_grad()
def check_sampler(sampler: Sampler, device: torch.device) -> None:
    """Refuse an architecture whose `generate` reads padding; reuse no key-values that it cannot continue.

    A collective call where the weights are sharded. vLLM pads nothing, so its sampler is not tried.

    Raises:
        ValueError: log-probs of a prompt depend on the padding before it.
    """
    if not isinstance(sampler, TransformersSampler):
        return
    eager = torch.compiler.set_stance("force_eager")  # no graphs for a few tokens
    with eval_mode(sampler.model), eager:
        logits = logits_of_forward(sampler.model, device)
        # Beyond what rounding can do; what is not finite is named by the checks of a rollout.
        limit = max(0.01, 2 * torch.finfo(precision(logits)).eps * float(logits.abs().max()))
        trial = Trial(sampler, device)
        gap = trial.padding_gap()
        if sampler.batch_size > 1 and gap > limit and gap > 3 * trial.gap_alone():
            raise ValueError(
                f"{type(sampler.model.causal_lm).__name__} reads padding: `generate` gives other log-probs to a prompt "
                f"that is padded on the left (by {gap:.2g} nats per token), so it cannot sample prompts of several "
                "lengths at once; set local_rollout_forward_batch_size=1, set use_vllm=True if vLLM has this "
                "architecture, or use another one"
            )
        if may_keep(sampler.model):
            sampler.may_reuse = trial.continues(limit)


class Trial:
    """Samples a few tokens of two prompts, of which the shorter one is padded, as `sampler` would.

    Args:
        sampler: to be tried; it stays as it is.
        device: of the model.
    """

    def __init__(self, sampler: TransformersSampler, device: torch.device):
        model = sampler.model
        vocab_size = model.config.get_text_config().vocab_size
        unusual = {sampler.config.pad_token_id, *sampler.config.eos_token_id}
        usual = (token for token in itertools.count(vocab_size // 2) if token % vocab_size not in unusual)
        tokens = [token % vocab_size for token in itertools.islice(usual, SHORT + LONG + 1)]
        self.short, self.long, self.next = tokens[:SHORT], tokens[SHORT:-1], tokens[-1]
        # No token ends a completion.
        self.sampler = TransformersSampler(
            model, [vocab_size], sampler.config.pad_token_id, TOKENS, sampler.temperature, 2
        )
        self.device = device
        self.padded = self.sample([self.short, self.long])

    def sample(self, prompts: list[list[int]], budgets: list[int] | None = None) -> Completions:
        """Sample completions of some prompts together."""
        ids, mask = (x.to(self.device) for x in pad_left(prompts, cast(int, self.sampler.config.pad_token_id)))
        return self.sampler(ids, mask, SEEDS[: len(prompts)], budgets)

    def gap(self, prompt: list[int], completions: Completions) -> float:
        """Return the median distance between the first row's log-probs and a forward's without padding.

        Of an expert that rounding chooses otherwise, few tokens are off.
        """
        ids = torch.cat([torch.tensor([prompt], device=self.device), completions.ids[:1]], dim=1)
        temperature = self.sampler.temperature
        told = self.sampler.model(
            ids, torch.ones_like(ids), completions.mask[:1], temperature=temperature, values=False
        ).logprobs
        return float((told - completions.logprobs[:1]).abs().median())

    def padding_gap(self) -> float:
        """Return the distance of a row with padding before it."""
        return self.gap(self.short, self.padded)

    def gap_alone(self) -> float:
        """Return the distance of the same prompt without padding."""
        return self.gap(self.short, self.sample([self.short]))

    def continues(self, limit: float) -> bool:
        """Return whether a second turn goes on from the first one's key-values, which then lie in other columns."""
        budgets = [TOKENS] * 2
        try:
            with self.sampler.ready():
                first = self.sample([self.short, self.long], budgets)
                prompt = [*self.short, *first.ids[0].tolist(), self.next]
                second = self.sample([prompt], budgets[:1])
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it keeps a state of its own
            return False
        return not self.gap(prompt, second) > limit
