"""Compare `generate` with a forward over whole rows, before the first rollout."""

import itertools
from dataclasses import replace

import torch

from hfppo.generation.generate import TransformersSampler
from hfppo.generation.sampler import Sampler
from hfppo.models.actor_critic import Want
from hfppo.models.modes import eval_mode
from hfppo.models.output_checks import logits_of_forward, precision
from hfppo.sample import Turn

SHORT, LONG, TOKENS = 2, 6, 3  # lengths of two prompts, and of each completion


@torch.no_grad()
def check_sampler(sampler: Sampler, device: torch.device) -> None:
    """Check that `generate` does not read padding, and find out whether its KV cache can be used again.

    A collective call where the weights are sharded. Only `TransformersSampler` pads prompts, so only it is checked.

    Raises:
        ValueError: the log-probs of a prompt depend on the padding before it.
    """
    if not isinstance(sampler, TransformersSampler):
        return
    eager = torch.compiler.set_stance("force_eager")  # no graphs for a few tokens
    trial = Trial(sampler, device)
    with eval_mode(sampler.model), eager, trial.sampler.ready():
        logits = logits_of_forward(sampler.model, device)
        # Rounding stays below this limit. A comparison with NaN is False.
        limit = max(0.01, 2 * torch.finfo(precision(logits)).eps * float(logits.abs().max()))
        first = trial.sample(trial.short, trial.long)
        gap = trial.gap(trial.short, first)
        sampler.may_reuse = trial.continues(first, limit)
        if sampler.batch_size != 1 and gap > limit and gap > 3 * trial.gap(trial.short, trial.sample(trial.short)):
            name = type(sampler.model.causal_lm).__name__
            raise ValueError(
                f"{name} reads padding: `generate` gives other log-probs to a prompt that is padded on the left (by "
                f"{gap:.2g} nats per token), so it cannot sample prompts of several lengths at once; set "
                "local_rollout_forward_batch_size=1, set use_vllm=True if vLLM has this architecture, or use another"
            )


class Trial:
    """Samples a few tokens for two prompts; the shorter one is padded.

    Args:
        sampler: gives model and settings; it is not called.
        device: the model's device.
    """

    def __init__(self, sampler: TransformersSampler, device: torch.device):
        settings = sampler.sampling
        self.pad_id = settings.pad_id
        vocab_size = sampler.model.config.get_text_config().vocab_size
        ids = (number % vocab_size for number in itertools.count(vocab_size // 2))
        usual = (token for token in ids if token not in {self.pad_id, *settings.eos_ids})
        self.short, self.long, self.answer = (list(itertools.islice(usual, n)) for n in (SHORT, LONG, 1))
        without_end = replace(settings, max_tokens=TOKENS, eos_ids=[vocab_size], stops=None)
        self.sampler = TransformersSampler(sampler.model, without_end, batch_size=2)
        self.device = device

    def sample(self, *prompts: list[int]) -> Turn:
        """Sample a turn of each prompt together, and return the first one."""
        return self.sampler([*prompts], list(range(len(prompts))), [TOKENS] * len(prompts))[0]

    def gap(self, prompt: list[int], turn: Turn) -> float:
        """Return the median distance of a turn's log-probs from a forward without padding.

        A mean includes single tokens that are off because rounding made a router choose another expert.
        """
        sampler = self.sampler
        ids = torch.tensor([prompt + turn.ids], device=self.device)
        mask = torch.ones((1, len(turn.ids)), dtype=torch.bool, device=self.device)
        want = Want(sampler.sampling.temperature, values=False)
        outputs = sampler.model(ids, torch.ones_like(ids), mask, want)
        return float((outputs.logprobs.cpu() - torch.tensor([turn.logprobs])).abs().median())

    def continues(self, first: Turn, limit: float) -> bool:
        """Return whether the shorter row's next turn is right after its KV cache has moved to other columns."""
        prompt = [*self.short, *first.ids, *self.answer]
        try:
            second = self.sample(prompt)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the model keeps a state of its own
            return False
        return not self.gap(prompt, second) > limit
