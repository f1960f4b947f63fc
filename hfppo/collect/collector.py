"""Collect a rollout: prompts, completions, scores, passes, credit."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from hfppo import functional as F
from hfppo.collect.check_finite import check_rollout
from hfppo.collect.credit import Credit, GreedyScores, assign_credit, final_scores
from hfppo.collect.forward import Passes, autocast, forward_passes
from hfppo.collect.rollout_metrics import measure_episodes, measure_rollout, measure_scores
from hfppo.collect.rows import eval_rows, one_row_per_group, training_rows
from hfppo.config import PPOConfig
from hfppo.data.prompt_stream import PromptStream
from hfppo.data.prompts import Prompts, Row
from hfppo.environments.chat_format import parse_turn
from hfppo.environments.episodes import Episode, EpisodePlayer, completions_of
from hfppo.generation.sampler import Completions, Sampler
from hfppo.metrics import Measures, parts_of
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.modes import eval_mode, is_sharded
from hfppo.rewards.functions import RewardFunctions, Scored
from hfppo.rollout import Rollout, Transcript
from hfppo.state import PPOState, RunningMoments
from hfppo.support.out_of_memory import explain_out_of_memory
from hfppo.support.padding import pad_left

PhaseDisplay = Callable[[str], AbstractContextManager]  # shows a phase, by the name of its metric, while it lasts

# How errors call the phases of a rollout.
PHASES = {
    "generation": "sampling",
    "rewards": "the reward functions",
    "passes": "the passes without gradient",
}


@dataclass(frozen=True)
class Completed:
    """Rows with their completions. With an environment the prompts may be longer than the dataset's."""

    rows: list[Row]
    completions: Completions
    texts: list[Any]  # as reward functions get them: text or messages
    episodes: list[Episode]  # the same as episodes of several turns; empty without tools and environments

    def first(self, count: int) -> "Completed":
        """Return the first rows."""
        some = slice(count)
        return Completed(self.rows[some], self.completions.rows(some), self.texts[some], self.episodes[some])


@dataclass(frozen=True)
class Collected:
    """Everything that the collection of a rollout found."""

    rollout: Rollout
    transcript: Transcript
    measures: Measures  # times alone where `training` is False
    moments: RunningMoments | None  # of all scores so far, these included; None without `normalize_scores`


@dataclass(frozen=True)
class Phases:
    """Times the phases of a rollout, shows them, and adds hints to out-of-memory errors."""

    args: PPOConfig
    show: PhaseDisplay
    seconds: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # by metric; a phase entered twice adds up

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Show and time the code inside as `time/<name>`."""
        start = time.perf_counter()
        with self.show(f"time/{name}"):
            yield
        self.seconds[f"time/{name}"] += time.perf_counter() - start

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase.

        Raises:
            OutOfMemory: with the settings that help.
        """
        described = "sampling with vLLM" if name == "generation" and self.args.use_vllm else PHASES[name]
        with self.timed(name), explain_out_of_memory(described, self.args):
            yield

    def measures(self, tokens: float) -> Measures:
        """Return the seconds by phase, and the rate of sampling so many tokens."""
        rate = tokens / self.seconds["time/generation"]
        return {name: parts_of(x) for name, x in {**self.seconds, "time/tokens_per_second": rate}.items()}


@dataclass(frozen=True)
class Collector:
    """Collects rollouts; it keeps no state of its own."""

    model: ActorCritic
    sampler: Sampler
    rewards: RewardFunctions
    tokenizer: PreTrainedTokenizerBase
    accelerator: Accelerator
    args: PPOConfig
    player: EpisodePlayer | None = None  # with tools or environments

    def training_rows(self, prompts: Prompts | PromptStream, rollout_index: int) -> list[Row]:
        """Return this process's rows of a rollout."""
        number = rollout_index * self.accelerator.num_processes + self.accelerator.process_index
        return training_rows(prompts, number * self.args.rollout_size_per_process, self.args)

    def eval_rows(self, prompts: Prompts) -> list[Row]:
        """Return a row for each prompt, with the same seed every time."""
        return eval_rows(prompts, self.args.seed)

    def collect(
        self,
        rows: list[Row],
        ppo_state: PPOState,
        state: TrainerState,
        training: bool = True,
        show: PhaseDisplay = nullcontext,
    ) -> Collected:
        """Collect a rollout; nothing that is passed in is changed.

        Args:
            rows: the completions to make.
            ppo_state: gives β, and the moments of all scores so far.
            state: passed to the reward functions.
            training: False leaves the moments as they are and whitens neither rewards nor advantages, which would
                compare these rows with each other.
            show: shows each phase.
        Raises:
            NonFiniteError: a number is not finite on some process.
            OutOfMemory: with the settings that help.
        """
        phase = Phases(self.args, show)
        with phase.timed("rollout"), eval_mode(self.model), torch.no_grad():
            completed, greedy = self.sample(rows, phase)
            completions = completed.completions
            prompts = self.prompt_tensors(completed.rows)
            scored, passes = self.score_and_forward(completed, prompts, state, phase)
            moments = self.moments(scored, ppo_state, training)
            credit = assign_credit(
                scored,
                completions,
                passes,
                groups=torch.tensor([row.group for row in rows]),
                greedy=None if greedy is None else self.score_greedy(greedy, rows, moments, state, phase),
                moments=moments,
                kl_coef=ppo_state.kl_coef,
                args=self.args,
                whiten=self.whiten_globally if training else None,
            )
        rollout = build_rollout(prompts, completions, passes, credit)
        name = f"rollout {ppo_state.next_rollout + 1}" if training else "the completions"
        check_rollout(rollout, name, self.accelerator.process_index)
        measures = phase.measures(sum(float(some.completions.mask.sum()) for some in (completed, greedy) if some))
        if training:
            plain = final_scores(scored, completions, self.args)
            measures |= measure_scores(plain[scored.scorable], scored, self.rewards.names)
            measures |= measure_rollout(rollout, credit, ppo_state.kl_coef, self.args, self.gather)
            measures |= measure_episodes(completed.episodes)
        return Collected(rollout, self.transcript(completed, scored), measures, moments)

    def prompt_tensors(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Return (B, P) token ids, padded on the left, and their mask."""
        return pad_left([row.prompt_ids for row in rows], self.tokenizer.pad_token_id)

    def sample(self, rows: list[Row], phase: Phases) -> tuple[Completed, Completed | None]:
        """Complete the prompts, and once more greedily for an estimator that compares with that."""
        greedy = None
        with phase("generation"), self.sampler.ready():
            timed = partial(phase.timed, "environments")
            sampled = self.complete(rows, False, timed)
            if F.estimator_needs(self.args.advantage_estimator, "greedy_scores"):
                greedy = self.complete(one_row_per_group(rows), True, timed)
        return sampled, greedy

    def complete(
        self, rows: list[Row], greedy: bool, timed: Callable[[], AbstractContextManager] = nullcontext
    ) -> Completed:
        """Complete the prompts, in one turn or with tools and environments in several; the sampler must be ready.

        Args:
            greedy: take the likeliest tokens instead of sampling.
            timed: measures the time of tools and environments.
        """
        if self.player is None:
            seeds = None if greedy else [row.seed for row in rows]
            completions = self.ask_sampler([row.prompt_ids for row in rows], seeds)
            return Completed(rows, completions, self.texts(rows, completions), [])
        episodes = self.player.play(rows, self.ask_sampler, greedy, self.any_active, timed)
        completions = completions_of(episodes, self.tokenizer.pad_token_id)
        return Completed([e.row for e in episodes], completions, [e.messages for e in episodes], episodes)

    def any_active(self, own: bool) -> bool:
        """Return whether a row still plays, on any process if the model is sharded: its processes compute together."""
        if self.accelerator.num_processes == 1 or not is_sharded(self.model):
            return own
        active = torch.tensor([float(own)], dtype=torch.float32, device=self.accelerator.device)
        return bool(self.accelerator.reduce(active, "sum") > 0)

    def ask_sampler(
        self, prompts: list[list[int]], seeds: list[int] | None, budgets: list[int] | None = None
    ) -> Completions:
        """Return the completions on the CPU; the sampler must be ready.

        Args:
            prompts: token ids.
            seeds: one for each row; None completes greedily.
            budgets: one for each row, the most tokens; None: the configured limit.
        """
        prompt_ids, prompt_mask = (
            x.to(self.accelerator.device) for x in pad_left(prompts, self.tokenizer.pad_token_id)
        )
        limits = {} if budgets is None else {"budgets": budgets}
        with autocast(self.accelerator):
            completions = self.sampler(prompt_ids, prompt_mask, seeds, **limits).cpu()
        if len(completions.ids) != len(prompt_ids):
            raise ValueError(
                f"sampler {type(self.sampler).__name__} returned {len(completions.ids)} completions for "
                f"{len(prompt_ids)} prompts; it must return one for each, in their order"
            )
        return completions

    def texts(self, rows: list[Row], completions: Completions) -> list[Any]:
        """Return the completions as reward functions get them: text, or a message for a conversation."""
        ids = unpad(completions)
        if isinstance(rows[0].columns["prompt"], list):
            turns = zip(ids, [row.prompt_ids for row in rows], strict=True)
            return [[parse_turn(self.tokenizer, turn, prefix, tools=[])[0]] for turn, prefix in turns]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def continuations(self, completed: Completed) -> list[Any]:
        """Return the completions as they continue the text of their prompts.

        Alone, some tokenizers decode a completion without the space that it begins with. An assistant's message that
        the prompt has begun is continued too; any other message is text of its own.
        """
        ids = unpad(completed.completions)
        prompts = [row.columns["prompt"] for row in completed.rows]
        joined = [isinstance(prompt, str) or prompt[-1]["role"] == "assistant" for prompt in prompts]
        given = zip(completed.texts, completed.rows, ids, joined, strict=True)
        return [
            continue_text(text, row.prompt_ids, own, self.tokenizer) if join else text
            for text, row, own, join in given
        ]

    def transcript(self, completed: Completed, scored: Scored) -> Transcript:
        """Return the rows as text, with their scores by function."""
        return Transcript(
            prompts=[row.columns["prompt"] for row in completed.rows],
            completions=completed.texts,
            scores=dict(zip(self.rewards.names, scored.per_function.T.tolist(), strict=True)),
            extra=scored.extra,
        )

    @contextmanager
    def scoring(self, completed: Completed, state: TrainerState) -> Iterator[Callable[[], Scored]]:
        """Call the reward functions; asynchronous ones run on until the yielded function waits for them."""
        rows, completions, episodes = completed.rows, completed.completions, completed.episodes
        columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
        reserved = ("prompt", "completion", "completion_ids")
        others = {name: column for name, column in columns.items() if name not in reserved}
        if self.player is not None and self.player.agents.pool is not None:
            others["environments"] = [episode.environment for episode in episodes]
        given = columns["prompt"], completed.texts, unpad(completions), others, state, completions.mask, episodes
        continuations = self.continuations(completed) if self.rewards.read_continuations else None
        failed = torch.tensor([episode.failed for episode in episodes] or [False])
        with self.rewards.scoring(*given, continuations) as wait_for_scores:

            def scores() -> Scored:
                scored = wait_for_scores()
                return replace(scored, scorable=scored.scorable & ~failed)

            yield scores

    def score_and_forward(
        self, completed: Completed, prompts: tuple[Tensor, Tensor], state: TrainerState, phase: Phases
    ) -> tuple[Scored, Passes]:
        """Score the completions and run the passes; asynchronous reward functions wait while the models compute."""
        with ExitStack() as stack:
            with phase("rewards"):
                wait_for_scores = stack.enter_context(self.scoring(completed, state))
            with phase("passes"):
                passes = forward_passes(self.model, *prompts, completed.completions, self.accelerator, self.args)
            with phase("rewards"):
                return wait_for_scores(), passes

    def restore_base_states(self, rollout: Rollout) -> Rollout:
        """Return a rollout of a checkpoint with the `base_states` that it was collected with, to the bit."""
        if not self.model.keeps_base_states or rollout.base_states is not None:
            return rollout
        completions = Completions(
            rollout.completion_ids, rollout.mask, rollout.truncated, rollout.rollout_logprobs, context=rollout.context
        )
        prompts = rollout.prompt_ids, rollout.prompt_mask
        with eval_mode(self.model), torch.no_grad():  # by the same passes, whose other outputs are not needed
            passes = forward_passes(self.model, *prompts, completions, self.accelerator, self.args)
        return replace(rollout, base_states=passes.base_states)

    def moments(self, scored: Scored, ppo_state: PPOState, training: bool) -> RunningMoments | None:
        """Return the moments that normalize the scores, this rollout's on all processes included; None without."""
        if not self.args.normalize_scores:
            return None
        if not training:
            return ppo_state.score_moments
        return ppo_state.score_moments.with_scores(self.gather(scored.combined)[self.gather(scored.scorable)])

    def score_greedy(
        self, greedy: Completed, rows: list[Row], moments: RunningMoments | None, state: TrainerState, phase: Phases
    ) -> GreedyScores:
        """Score the greedy completion of each group, and return the score for each row."""
        with phase("rewards"), self.scoring(greedy, state) as wait_for_scores:
            scored = wait_for_scores()
        scores = final_scores(scored, greedy.completions, self.args, moments)
        position = {row.group: i for i, row in enumerate(greedy.rows)}
        index = torch.tensor([position[row.group] for row in rows])
        return GreedyScores(scores[index], scored.scorable[index])

    def whiten_globally(self, x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        """Whiten over the rows of all processes, and return this process's rows."""
        whitened = F.whiten(self.gather(x), self.gather(mask), shift_mean)
        first = self.accelerator.process_index * len(x)
        return whitened[first : first + len(x), : x.shape[1]]

    def gather(self, x: Tensor) -> Tensor:
        """Return the (processes·B, T) rows of all processes, in their order, padded to the longest."""
        padded = self.accelerator.pad_across_processes(x.to(self.accelerator.device), dim=1)
        return self.accelerator.gather(padded.to(x.dtype)).cpu()  # padding turns bool into int64


def build_rollout(prompts: tuple[Tensor, Tensor], completions: Completions, passes: Passes, credit: Credit) -> Rollout:
    """Join the results of a rollout's steps."""
    return Rollout(
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
        context=completions.context,
        base_states=passes.base_states,
    )


def continue_text(completion: Any, prompt_ids: list[int], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a completion, text or messages, with the text that its tokens add to the text of the prompt.

    A message that is not the text of all tokens, such as one with parsed calls, stays as it is.
    """
    alone, before, whole = tokenizer.batch_decode([ids, prompt_ids, prompt_ids + ids], skip_special_tokens=True)
    added = whole.removeprefix(before) if whole.startswith(before) else alone
    if isinstance(completion, str):
        return added
    first, *others = completion
    return [{**first, "content": added}, *others] if first["content"] == alone else completion


def unpad(completions: Completions) -> list[list[int]]:
    """Return the completions' token ids, those of EOS, tools and environments included."""
    return [row[real].tolist() for row, real in zip(completions.ids, completions.real, strict=True)]
