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
from hfppo.config import PPOConfig
from hfppo.data.prompts import Prompts, pad_left
from hfppo.data.stream import PromptStream
from hfppo.generation import Completions, Sampler
from hfppo.memory import explained_memory
from hfppo.metrics import Meter
from hfppo.models.actor_critic import ActorCritic, TokenOutputs
from hfppo.models.layout import eval_mode, rows_at_once
from hfppo.models.output_head import is_sharded
from hfppo.nonfinite import check_rollout
from hfppo.rewards.functions import RewardFunctions, Scored
from hfppo.rollout import EVAL_STREAM, SAMPLING_STREAM, Rollout, Transcript, stream_seed
from hfppo.rollout_metrics import measure_rollout, measure_scores
from hfppo.state import PPOState, RunningMoments


@dataclass(frozen=True)
class Row:
    """One completion to be made: a dataset row, its prompt's token ids, its group and its seed."""

    columns: dict[str, Any]
    prompt_ids: list[int]
    group: int
    seed: int


@dataclass(frozen=True)
class Passes:
    """What the models say about the tokens before the update, (B, T) each."""

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    final_value: Tensor | None  # (B,)


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
        first = (rollout_index * self.accelerator.num_processes + self.accelerator.process_index) * args.rollout_size
        groups = range(first // args.num_generations, (first + args.rollout_size) // args.num_generations)
        found = dict(zip(groups, prompts.at(groups, args.seed), strict=True))
        return [
            Row(
                *found[number // args.num_generations],
                group=number // args.num_generations,
                seed=stream_seed(args.seed, SAMPLING_STREAM, number),
            )
            for number in range(first, first + args.rollout_size)
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
            meter: receives the rollout's metrics, of a look the seconds only.
            training: False to look only: the moments stay, and advantages are not whitened.
        Raises:
            NonFiniteError: a number is not finite, on some process; the moments are those before.
            OutOfMemory: with the settings that help.
        """
        with meter.timed("time/rollout"), eval_mode(self.model), torch.no_grad():
            prompt_ids, prompt_mask = self.prompt_tensors(rows)
            with meter.timed("time/generation"):
                completions = self.sample(prompt_ids, prompt_mask, [row.seed for row in rows])
            tokens = float(completions.mask.sum())
            meter.add_number("time/tokens_per_second", tokens / meter.seconds("time/generation"))
            texts = self.texts(rows, completions)
            scored, passes = self.score_during_passes(rows, completions, texts, prompt_ids, prompt_mask, state, meter)
            moments = self.moments(scored, ppo_state, training)
            old_logprobs = completions.logprobs if passes.old_logprobs is None else passes.old_logprobs
            scores, loss_mask = self.final_scores(scored, completions, moments), self.loss_mask(scored, completions)
            weights, kept = self.importance_weights(old_logprobs, completions)
            known = completions.mask & scored.scorable[:, None]
            placed = self.place_scores(scored, scores, completions.mask, moments)
            kl = self.kl(old_logprobs, passes.ref_logprobs)
            rewards = F.token_rewards(placed, kl, completions.mask, ppo_state.kl_coef)
            if self.args.whiten_rewards:
                rewards = self.whiten_globally(rewards, known, shift_mean=False)
            advantages, returns = self.advantages(rows, rewards, scored, passes, completions, moments, state)
            whiten = training and self.args.whitens_advantages
            whitened = self.whiten_globally(advantages, known) if whiten else advantages
        rollout = Rollout(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completions.ids,
            mask=completions.mask,
            loss_mask=loss_mask & kept,
            truncated=completions.truncated,
            scores=scores,
            rollout_logprobs=completions.logprobs,
            old_logprobs=old_logprobs,
            rewards=rewards,
            advantages=whitened,
            ref_logprobs=passes.ref_logprobs,
            values=passes.values,
            weights=weights,
            returns=returns,
        )
        check_rollout(rollout, ppo_state.rollouts, self.accelerator.process_index)
        if training and moments is not None:
            ppo_state.score_moments = moments
        if training:
            plain = self.final_scores(scored, completions)
            measure_scores(meter, plain[scored.scorable], scored, self.rewards.names)
            measure_rollout(meter, rollout, advantages, known, ppo_state.kl_coef, self.args, self.gather)
        return rollout, self.transcript(rows, texts, scored)

    def prompt_tensors(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """(B, P) token ids padded on the left and their mask."""
        return pad_left([row.prompt_ids for row in rows], self.tokenizer.pad_token_id)

    def sample(self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None) -> Completions:
        """Have the prompts completed with the current weights."""
        phase = "sampling with vLLM" if self.args.use_vllm else "sampling"
        with explained_memory(phase, self.args), self.sampler.ready():
            return self.ask_sampler(prompt_ids, prompt_mask, seeds)

    def ask_sampler(self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None) -> Completions:
        """The completions of a sampler that is ready, on the CPU."""
        device = self.accelerator.device
        with self.accelerator.autocast():
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
        completions: Completions,
        texts: list[Any],
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        state: TrainerState,
        meter: Meter,
    ) -> tuple[Scored, Passes]:
        """Scores and passes; functions that only wait, for a server say, do so while the models compute."""
        with ExitStack() as stack:
            with meter.timed("time/rewards"), explained_memory("the reward functions", self.args):
                scored = stack.enter_context(self.scoring(rows, completions, texts, state))
            with meter.timed("time/passes"), explained_memory("the passes without gradient", self.args):
                passes = self.forward_passes(prompt_ids, prompt_mask, completions)
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

    def forward_passes(self, prompt_ids: Tensor, prompt_mask: Tensor, completions: Completions) -> Passes:
        """The passes without gradient of actor, critic and reference, some rows at a time."""
        args, device = self.args, self.accelerator.device
        attention_mask = torch.cat([prompt_mask, completions.mask], dim=1)
        input_ids = torch.cat([prompt_ids, completions.ids], dim=1)
        needs_old, lengths = args.policy_mode != "bypass", attention_mask.sum(dim=1)
        known = None if needs_old else completions.values
        order = lengths.argsort(descending=True, stable=True)  # of one length, little padding
        size = args.local_rollout_forward_batch_size
        if not is_sharded(self.model):  # which wants as many forwards from every process
            size = rows_at_once(size, int(lengths.max()), device)
        batches = [
            {
                "input_ids": input_ids[rows].to(device),
                "attention_mask": attention_mask[rows].to(device),
                "completion_mask": completions.mask[rows].to(device),
                "temperature": args.temperature,
            }
            for rows in order.split(size)
        ]
        outputs, references = [TokenOutputs()], [TokenOutputs()]
        with self.accelerator.autocast():  # not around the reward functions, which have types of their own
            if needs_old or known is None:
                outputs = [self.model(**batch, policy=needs_old) for batch in batches]
            if args.needs_reference:
                with self.model.reference():  # once, since PEFT looks at all its modules to disable an adapter
                    references = [self.model(**batch, values=False) for batch in batches]
        back = order.argsort()

        def in_order(parts: list[Tensor]) -> Tensor | None:
            return None if parts[0] is None else torch.cat(parts).cpu()[back]

        return Passes(
            old_logprobs=in_order([part.logprobs for part in outputs]),
            ref_logprobs=in_order([part.logprobs for part in references]),
            values=in_order([part.values for part in outputs]) if known is None else known,
            final_value=in_order([part.final_value for part in outputs]),
        )

    def final_scores(self, scored: Scored, completions: Completions, moments: RunningMoments | None = None) -> Tensor:
        """(B,) scores with clip and penalty.

        Without `moments` they are plain, as metrics and evaluations report them; a clip that is meant for normalised
        ones is left out then.
        """
        args, scores = self.args, scored.combined
        if moments is not None:
            scores = moments.normalize(scores)
        if args.reward_clip is not None and args.normalize_scores == (moments is not None):
            scores = scores.clamp(-args.reward_clip, args.reward_clip)
        if args.missing_eos_penalty is not None:
            scores = scores - args.missing_eos_penalty * completions.truncated
        return scores

    def loss_mask(self, scored: Scored, completions: Completions) -> Tensor:
        """(B, T) bool, True on the tokens that the losses count."""
        counted = scored.scorable
        if self.args.mask_truncated_completions:
            counted = counted & ~completions.truncated
        return completions.mask & counted[:, None]

    def importance_weights(self, old_logprobs: Tensor, completions: Completions) -> tuple[Tensor | None, Tensor]:
        """(B, T) weights of the policy loss where it is corrected, and the (B, T) mask of the tokens not rejected."""
        args = self.args
        if args.policy_mode != "corrected":
            return None, completions.mask
        return F.importance_weights(
            old_logprobs,
            completions.logprobs,
            completions.mask,
            args.mismatch_level,
            args.mismatch_correction,
            args.mismatch_floor,
            args.mismatch_cap,
        )

    def place_scores(self, scored: Scored, scores: Tensor, mask: Tensor, moments: RunningMoments | None) -> Tensor:
        """(B,) scores for the last token, or (B, T) where functions reward tokens."""
        if scored.per_token is None:
            return scores
        # What normalisation, clip and penalty add to the score of a completion stands on its last token.
        scale = 1.0 if moments is None else 1.0 / moments.std
        change = scores - scale * scored.combined
        return scale * scored.per_token + F.token_rewards(change, torch.zeros(mask.shape), mask, 0.0)

    def kl(self, logprobs: Tensor, ref: Tensor | None) -> Tensor:
        """(B, T) KL per token for the reward; 0 where nothing asks for a reference."""
        return torch.zeros_like(logprobs) if ref is None else F.token_kl(logprobs, ref, self.args.kl_estimator)

    def advantages(
        self,
        rows: list[Row],
        rewards: Tensor,
        scored: Scored,
        passes: Passes,
        completions: Completions,
        moments: RunningMoments | None,
        state: TrainerState,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T) advantages before whitening, and returns where there is a critic."""
        args, mask = self.args, completions.mask
        estimator = F.ADVANTAGE_ESTIMATORS[args.advantage_estimator]
        if F.estimator_needs(args.advantage_estimator, "groups"):
            return self.group_advantages(estimator, rows, rewards, mask, scored.scorable), None
        if F.estimator_needs(args.advantage_estimator, "greedy_scores"):
            greedy_scores, known = self.greedy_scores(rows, moments, state)
            return estimator(rewards, mask, greedy_scores).where(known[:, None], 0.0), None
        if not args.needs_critic:
            return estimator(rewards, mask, args.gamma), None
        lam = args.lam if args.lam_alpha is None else F.length_adaptive_lam(mask, args.lam_alpha)
        final = passes.final_value * completions.truncated if args.bootstrap_truncated else None
        advantages, returns = estimator(rewards, passes.values, mask, args.gamma, lam, final)
        if args.lam_critic is not None:
            returns = estimator(rewards, passes.values, mask, args.gamma, args.lam_critic, final)[1]
        return advantages, returns

    def group_advantages(
        self, estimator: Callable[..., Tensor], rows: list[Row], rewards: Tensor, mask: Tensor, scorable: Tensor
    ) -> Tensor:
        """(B, T) advantages against the others of a prompt that have a score; 0 where there is none to compare."""
        groups = torch.tensor([row.group for row in rows])
        _, index = groups.unique(return_inverse=True)
        comparable = scorable & (torch.bincount(index[scorable], minlength=len(groups))[index] > 1)
        advantages = torch.zeros_like(rewards)
        if comparable.any():
            scaled = F.estimator_needs(self.args.advantage_estimator, "scale")
            options = {"scale": self.args.scale_rewards} if scaled else {}
            advantages[comparable] = estimator(rewards[comparable], mask[comparable], groups[comparable], **options)
        return advantages

    def greedy_scores(
        self, rows: list[Row], moments: RunningMoments | None, state: TrainerState
    ) -> tuple[Tensor, Tensor]:
        """(B,) score of the greedy completion of each row's prompt, and (B,) bool: whether it has one."""
        first = {row.group: row for row in reversed(rows)}
        one_each = list(first.values())
        greedy = self.sample(*self.prompt_tensors(one_each), None)
        with self.scoring(one_each, greedy, self.texts(one_each, greedy), state) as result:
            scored = result()
        scores = self.final_scores(scored, greedy, moments)
        position = {group: i for i, group in enumerate(first)}
        index = torch.tensor([position[row.group] for row in rows])
        return scores[index], scored.scorable[index]

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


def unpadded(completions: Completions) -> list[list[int]]:
    """The completions' token ids, EOS included."""
    return [row[mask].tolist() for row, mask in zip(completions.ids, completions.mask, strict=True)]
