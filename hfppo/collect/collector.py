"""From prompts to a rollout."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from hfppo import functional as F
from hfppo.collect.credit import Baseline, assign_credit, final_scores
from hfppo.collect.finite import check_rollout
from hfppo.collect.forward import Passes, autocast, forward_passes
from hfppo.collect.rollout_metrics import measure_rollout, measure_scores
from hfppo.config import PPOConfig
from hfppo.data.prompts import Prompts, pad_left
from hfppo.data.stream import PromptStream
from hfppo.generation import Completions, Sampler
from hfppo.metrics import Meter
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.layout import eval_mode
from hfppo.rewards.functions import RewardFunctions, Scored
from hfppo.rollout import Rollout, Transcript
from hfppo.run_state import PPOState, RunningMoments
from hfppo.seeds import EVAL_STREAM, SAMPLING_STREAM, stream_seed
from hfppo.support.out_of_memory import explained_memory


@dataclass(frozen=True)
class Row:
    """One completion to be made: a dataset row, its prompt's token ids, its group and its seed."""

    columns: dict[str, Any]
    prompt_ids: list[int]
    group: int
    seed: int


@dataclass(frozen=True)
class Collector:
    """All that collecting a rollout needs; it keeps no state of its own."""

    model: ActorCritic
    sampler: Sampler
    rewards: RewardFunctions
    tokenizer: PreTrainedTokenizerBase
    accelerator: Accelerator
    args: PPOConfig

    def training_rows(self, prompts: Prompts | PromptStream, rollout_index: int) -> list[Row]:
        """This process's rows of a rollout: a function of the seed, the rollout and the process alone."""
        args = self.args
        size = args.rollout_size_per_process
        first = (rollout_index * self.accelerator.num_processes + self.accelerator.process_index) * size
        groups = range(first // args.num_generations, (first + size) // args.num_generations)
        found = dict(zip(groups, prompts.at(groups, args.seed), strict=True))
        return [
            Row(
                *found[number // args.num_generations],
                group=number // args.num_generations,
                seed=stream_seed(args.seed, SAMPLING_STREAM, number),
            )
            for number in range(first, first + size)
        ]

    def eval_rows(self, prompts: Prompts) -> list[Row]:
        """A row for each prompt, which draws the same numbers every time."""
        return [
            Row(*prompts[n], group=n, seed=stream_seed(self.args.seed, EVAL_STREAM, n)) for n in range(len(prompts))
        ]

    def collect(
        self, rows: list[Row], ppo_state: PPOState, state: TrainerState, meter: Meter, training: bool = True
    ) -> tuple[Rollout, Transcript]:
        """Collect a rollout, and its completions as text.

        Args:
            rows: what to complete.
            ppo_state: β, and the moments of the scores, which take those of this rollout in.
            state: passed to the reward functions.
            meter: receives the rollout's metrics; with `training` False its seconds alone.
            training: False to look only: the moments stay, and neither rewards nor advantages are whitened, which
                would compare them with those of other rows.
        Raises:
            NonFiniteError: a number is not finite, on some process; the moments are those before.
            OutOfMemory: with the settings that help.
        """
        with meter.timed("time/rollout"), eval_mode(self.model), torch.no_grad():
            prompts = self.prompt_tensors(rows)
            completions, greedy = self.sample(rows, prompts, meter)
            texts = self.texts(rows, completions)
            scored, passes = self.score_during_passes(rows, prompts, completions, texts, state, meter)
            moments = self.moments(scored, ppo_state, training)
            baseline = self.baseline(rows, greedy, moments, state, meter)
            credit = assign_credit(
                scored,
                completions,
                passes,
                groups=torch.tensor([row.group for row in rows]),
                baseline=baseline,
                moments=moments,
                kl_coef=ppo_state.kl_coef,
                args=self.args,
                whiten=self.whiten_globally if training else None,
            )
        rollout = Rollout(
            prompt_ids=prompts[0],
            prompt_mask=prompts[1],
            completion_ids=completions.ids,
            mask=completions.mask,
            loss_mask=credit.loss_mask,
            truncated=completions.truncated,
            scores=credit.scores,
            rollout_logprobs=completions.logprobs,
            old_logprobs=credit.old_logprobs,
            rewards=credit.rewards,
            advantages=credit.advantages,
            ref_logprobs=passes.ref_logprobs,
            values=passes.values,
            weights=credit.weights,
            returns=credit.returns,
        )
        name = f"rollout {ppo_state.rollouts + 1}" if training else "the completions"
        check_rollout(rollout, name, self.accelerator.process_index)
        if training:
            if moments is not None:
                ppo_state.score_moments = moments
            plain = final_scores(scored, completions, self.args)
            measure_scores(meter, plain[scored.scorable], scored, self.rewards.names)
            measure_rollout(meter, rollout, credit, ppo_state.kl_coef, self.args, self.gather)
        return rollout, self.transcript(rows, texts, scored)

    def prompt_tensors(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """(B, P) token ids padded on the left and their mask."""
        return pad_left([row.prompt_ids for row in rows], self.tokenizer.pad_token_id)

    def sample(
        self, rows: list[Row], prompts: tuple[Tensor, Tensor], meter: Meter
    ) -> tuple[Completions, Completions | None]:
        """Completions by the current weights; and the greedy one of each prompt, for an estimator that wants it."""
        phase = "sampling with vLLM" if self.args.use_vllm else "sampling"
        greedy = None
        with explained_memory(phase, self.args), ExitStack() as ready:
            with meter.timed("time/generation"):
                ready.enter_context(self.sampler.ready())
                sampled = self.ask_sampler(*prompts, [row.seed for row in rows])
            if F.estimator_needs(self.args.advantage_estimator, "greedy_scores"):
                with meter.timed("time/generation"):
                    greedy = self.ask_sampler(*self.prompt_tensors(one_of_each_prompt(rows)), None)
        tokens = sum(float(completions.mask.sum()) for completions in (sampled, greedy) if completions is not None)
        meter.add_number("time/tokens_per_second", tokens / meter.seconds("time/generation"))
        return sampled, greedy

    def ask_sampler(self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None) -> Completions:
        """The completions of a sampler that is ready, on the CPU."""
        device = self.accelerator.device
        with autocast(self.accelerator):
            completions = self.sampler(prompt_ids.to(device), prompt_mask.to(device), seeds).cpu()
        if len(completions.ids) != len(prompt_ids):
            raise ValueError(
                f"sampler {type(self.sampler).__name__} gave {len(completions.ids)} completions for {len(prompt_ids)} "
                "prompts; it must give one for each, in their order"
            )
        return completions

    def texts(self, rows: list[Row], completions: Completions) -> list[Any]:
        """The completions as reward functions see them: text or a message."""
        texts = self.tokenizer.batch_decode(unpadded(completions), skip_special_tokens=True)
        conversational = isinstance(rows[0].columns["prompt"], list)
        return [[{"role": "assistant", "content": text}] if conversational else text for text in texts]

    def transcript(self, rows: list[Row], texts: list[Any], scored: Scored) -> Transcript:
        """The rows as people read them."""
        return Transcript(
            prompts=[row.columns["prompt"] for row in rows],
            completions=texts,
            scores=dict(zip(self.rewards.names, scored.per_function.T.tolist(), strict=True)),
            extra=scored.extra,
        )

    def scoring(
        self, rows: list[Row], completions: Completions, texts: list[Any], state: TrainerState
    ) -> AbstractContextManager[Callable[[], Scored]]:
        """Ask the reward functions; inside, slow ones go on until the yielded function waits for them."""
        columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
        reserved = ("prompt", "completion", "completion_ids")
        others = {name: column for name, column in columns.items() if name not in reserved}
        width = completions.mask.shape[1]
        return self.rewards.scoring(columns["prompt"], texts, unpadded(completions), others, state, width)

    def score_during_passes(
        self,
        rows: list[Row],
        prompts: tuple[Tensor, Tensor],
        completions: Completions,
        texts: list[Any],
        state: TrainerState,
        meter: Meter,
    ) -> tuple[Scored, Passes]:
        """Scores and passes; functions that only wait, for a server say, do so while the models compute."""
        with ExitStack() as stack:
            with meter.timed("time/rewards"), explained_memory("the reward functions", self.args):
                scored = stack.enter_context(self.scoring(rows, completions, texts, state))
            with meter.timed("time/passes"), explained_memory("the passes without gradient", self.args):
                passes = forward_passes(self.model, *prompts, completions, self.accelerator, self.args)
            with meter.timed("time/rewards"), explained_memory("the reward functions", self.args):
                return scored(), passes

    def moments(self, scored: Scored, ppo_state: PPOState, training: bool) -> RunningMoments | None:
        """The moments that normalise the scores, after those of this rollout on all processes; None: nothing does."""
        if not self.args.normalize_scores:
            return None
        moments = replace(ppo_state.score_moments)
        if training:
            moments.add(self.gather(scored.combined)[self.gather(scored.scorable)])
        return moments

    def baseline(
        self,
        rows: list[Row],
        greedy: Completions | None,
        moments: RunningMoments | None,
        state: TrainerState,
        meter: Meter,
    ) -> Baseline | None:
        """What the greedy completions score; None where there are none."""
        if greedy is None:
            return None
        one_each = one_of_each_prompt(rows)
        texts = self.texts(one_each, greedy)
        with (
            meter.timed("time/rewards"),
            explained_memory("the reward functions", self.args),
            self.scoring(one_each, greedy, texts, state) as result,
        ):
            scored = result()
        scores = final_scores(scored, greedy, self.args, moments)
        position = {row.group: i for i, row in enumerate(one_each)}
        index = torch.tensor([position[row.group] for row in rows])
        return Baseline(scores[index], scored.scorable[index])

    def whiten_globally(self, x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        """`whiten` over the rows of all processes; gives this process's rows back."""
        whitened = F.whiten(self.gather(x), self.gather(mask), shift_mean)
        first = self.accelerator.process_index * len(x)
        return whitened[first : first + len(x), : x.shape[1]]

    def gather(self, x: Tensor) -> Tensor:
        """(processes·B, T) rows of all processes, in the order of the processes, padded to the longest."""
        padded = self.accelerator.pad_across_processes(x.to(self.accelerator.device), dim=1)
        return self.accelerator.gather(padded.to(x.dtype)).cpu()  # padding turns bool into int64, where it pads


def grouped(rows: list[Row]) -> list[Row]:
    """The rows, equal ones in one group."""
    groups: dict[str, int] = {}
    return [replace(row, group=groups.setdefault(repr((row.prompt_ids, row.columns)), row.group)) for row in rows]


def one_of_each_prompt(rows: list[Row]) -> list[Row]:
    """The first row of each group."""
    return list({row.group: row for row in reversed(rows)}.values())


def unpadded(completions: Completions) -> list[list[int]]:
    """The completions' token ids, EOS included."""
    return [row[mask].tolist() for row, mask in zip(completions.ids, completions.mask, strict=True)]
