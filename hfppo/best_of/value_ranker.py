"""`ValueRanker`: the value of a completion is the critic's prediction before its last token.

By then the critic has read everything but the end. docs/critic.md says when ranking by it helps. PPO-MCTS,
arXiv:2309.15028, searches with the value of every token instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hfppo.checkpoint import saved_run
from hfppo.data.chat_template import CLOCK, RunDate
from hfppo.data.prompts import dataset_of, prepare_prompts
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.sampler import Completions, Sampling, completion_ids, completions_from, eos_token_ids
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import find_critic, find_saved_critic
from hfppo.models.loading import load_model, load_tokenizer, separate_adapter
from hfppo.models.modes import eval_mode
from hfppo.state import BEST_OF_STREAM, stream_seed
from hfppo.support.padding import pad_left

Prompt = str | list[dict[str, Any]]  # text, or a conversation


@dataclass(frozen=True)
class Ranked:
    """A completion with the numbers of actor and critic for each of its tokens."""

    completion: str
    tokens: list[str]
    values: list[float]  # V(s_t) before token t
    logprobs: list[float]  # log π(y_t), nats
    truncated: bool  # whether the length limit ended it

    @property
    def value(self) -> float:
        """The value before the last token."""
        return self.values[-1]

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, nats."""
        return sum(self.logprobs) / len(self.logprobs)


class ValueRanker:
    """The actor and the critic of a run, to sample completions and to rank them.

    Args:
        model: with a critic.
        tokenizer: of the model.
        batch_size: completions in one pass.
        date: for chat templates that read it; None: today.
    """

    def __init__(
        self,
        model: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        date: RunDate | None = None,
    ):
        self.model, self.tokenizer, self.batch_size, self.date = model, tokenizer, batch_size, date
        self.eos_ids = eos_token_ids(tokenizer, model.causal_lm.generation_config)
        self.pad_id = self.eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @classmethod
    def from_pretrained(cls, folder: str, batch_size: int = 64, **init_kwargs: Any) -> Self:
        """Load what `PPOTrainer` saved or pushed; chat templates read the date of a checkpoint's run.

        Args:
            folder: an output folder, a checkpoint, or the id of a repository.
            batch_size: completions in one pass.
            init_kwargs: passed to the base's `from_pretrained`, for example `dtype`.
        Raises:
            ValueError: there is no critic, or a part cannot be loaded.
        """
        if find_saved_critic(folder) is None:
            raise ValueError(
                f"{folder} holds no critic/; give a folder or repository that PPOTrainer wrote with "
                "advantage_estimator='gae'"
            )
        tokenizer = load_tokenizer(folder, **init_kwargs)
        actor = separate_adapter(load_model(folder, **init_kwargs), None)
        model = ActorCritic(actor.base, actor.peft_config, find_critic(folder), start_adapter=actor.start_adapter)
        run = saved_run(folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device), tokenizer, batch_size, None if run is None else run.run_date)

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[str], temperature: float = 1.0) -> list[Ranked]:
        """Return the numbers of given completions, in their order; each ends as the policy would end it.

        Args:
            completions: one for each prompt.
            temperature: divides the logits.
        Raises:
            ValueError: as many completions as prompts are wanted, or a prompt cannot be rendered.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; give one for each prompt")
        ids = [torch.tensor(completion_ids(text, self.tokenizer, self.eos_ids)) for text in completions]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.eos_ids[0])
        given = completions_from(padded, torch.zeros(padded.shape, dtype=torch.float32), self.eos_ids)
        return self._judge(self._prompt_ids(prompts), given, temperature)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        """Return the value of each completion before its last token."""
        return [ranked.value for ranked in self.judge(prompts, completions)]

    def best_of(
        self, prompt: Prompt, n: int = 8, max_completion_length: int = 256, temperature: float = 1.0, seed: int = 0
    ) -> list[Ranked]:
        """Sample n completions of a prompt, and return them with the highest value first.

        Args:
            max_completion_length: in tokens.
            temperature: divides the logits; that of the run.
            seed: of the draws; completion i is the same for every n.
        """
        (ids,) = self._prompt_ids([prompt])
        rows = [ids] * n
        sampling = Sampling(temperature, max_completion_length, self.eos_ids, self.pad_id)
        sampler = TransformersSampler(self.model, sampling, self.batch_size)
        prompt_ids, prompt_mask = (x.to(self.model.device) for x in pad_left(rows, self.pad_id))
        with eval_mode(self.model):
            sampled = sampler(prompt_ids, prompt_mask, [stream_seed(seed, BEST_OF_STREAM, i) for i in range(n)])
        return sorted(self._judge(rows, sampled.cpu(), temperature), key=lambda ranked: -ranked.value)

    def _prompt_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of prompts."""
        prepared = prepare_prompts(dataset_of(prompts, {}), self.tokenizer, {CLOCK: self.date}, "prompts")
        return [prepared[i][1] for i in range(len(prepared))]

    @torch.no_grad()
    def _judge(self, prompts: list[list[int]], completions: Completions, temperature: float) -> list[Ranked]:
        """Return the numbers of completions, one for each prompt."""
        ranked = []
        with eval_mode(self.model):
            for rows in torch.arange(len(prompts)).split(self.batch_size):
                some = completions.rows(rows)
                prompt_ids, prompt_mask = pad_left([prompts[i] for i in rows.tolist()], self.pad_id)
                outputs = self.model(
                    input_ids=torch.cat([prompt_ids, some.ids], dim=1).to(self.model.device),
                    attention_mask=torch.cat([prompt_mask, some.mask], dim=1).to(self.model.device),
                    completion_mask=some.mask.to(self.model.device),
                    temperature=temperature,
                )
                ranked += [
                    self._ranked(some, i, outputs.values.cpu(), outputs.logprobs.cpu()) for i in range(len(rows))
                ]
        return ranked

    def _ranked(self, completions: Completions, row: int, values: Tensor, logprobs: Tensor) -> Ranked:
        """Return a row with its numbers, (B, T) each."""
        mask = completions.mask[row]
        ids = completions.ids[row][mask].tolist()
        return Ranked(
            completion=str(self.tokenizer.decode(ids, skip_special_tokens=True)),
            tokens=[str(self.tokenizer.decode([token])) for token in ids],
            values=values[row][mask].tolist(),
            logprobs=logprobs[row][mask].tolist(),
            truncated=bool(completions.truncated[row]),
        )
