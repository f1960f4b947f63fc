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

SHORT, LONG, TOKENS = 2, 6, 3  # tokens of two prompts, of which the shorter one is padded, and of each completion


@torch.no_grad()
def check_sampler(sampler: Sampler, device: torch.device) -> None:
    """Check that `generate` does not read padding, and find out whether its KV cache can be used again.

    A collective call where the weights are sharded. Only `TransformersSampler` pads prompts, so only it is checked.

    Raises:
        ValueError: the log-probs of a prompt depend on the padding before it.
    """
    if not isinstance(sampler, TransformersSampler):
        return
    model, settings = sampler.model, sampler.sampling
    vocab_size = model.config.get_text_config().vocab_size
    ids = (number % vocab_size for number in itertools.count(vocab_size // 2))
    usual = (token for token in ids if token not in {settings.pad_id, *settings.eos_ids})
    short, long, answer = (list(itertools.islice(usual, n)) for n in (SHORT, LONG, 1))
    trial = TransformersSampler(model, replace(settings, max_tokens=TOKENS, eos_ids=[vocab_size], stops=None), 2)

    def sample(*prompts: list[int]) -> Turn:
        """Sample a turn of each prompt together, and return the first one."""
        return trial([*prompts], list(range(len(prompts))), [TOKENS] * len(prompts))[0]

    eager = torch.compiler.set_stance("force_eager")  # no graphs for a few tokens
    with eval_mode(model), eager, trial.ready():
        logits = logits_of_forward(model, device)
        # Rounding stays below this limit. A comparison with NaN is False.
        limit = max(0.01, 2 * torch.finfo(precision(logits)).eps * float(logits.abs().max()))
        turn = sample(short, long)
        gap = gap_to_forward(trial, short, turn, device)
        try:  # whether the next turn is right after the KV cache of the first one has moved to other columns
            prompt = [*short, *turn.ids, *answer]
            again = gap_to_forward(trial, prompt, sample(prompt), device)
            sampler.may_reuse = trial.may_reuse and not again > limit
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the model keeps a state of its own
            sampler.may_reuse = False
        padded = sampler.batch_size != 1 and gap > limit
        if padded and gap > 3 * gap_to_forward(trial, short, sample(short), device):
            name = type(model.causal_lm).__name__
            raise ValueError(
                f"{name} reads padding: `generate` gives other log-probs to a prompt that is padded on the left (by "
                f"{gap:.2g} nats per token), so it cannot sample prompts of several lengths at once; set "
                "local_rollout_forward_batch_size=1, set use_vllm=True if vLLM has this architecture, or use another"
            )


def gap_to_forward(sampler: TransformersSampler, prompt: list[int], turn: Turn, device: torch.device) -> float:
    """Return the median distance of a turn's log-probs from a forward without padding.

    A mean includes single tokens that are off because rounding made a router choose another expert.
    """
    ids = torch.tensor([prompt + turn.ids], device=device)
    mask = torch.ones((1, len(turn.ids)), dtype=torch.bool, device=device)
    want = Want(sampler.sampling.temperature, values=False)
    outputs = sampler.model(ids, torch.ones_like(ids), mask, want)
    return float((outputs.logprobs.cpu() - torch.tensor([turn.logprobs])).abs().median())
