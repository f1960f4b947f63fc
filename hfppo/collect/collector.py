"""Collect a rollout: prompts, completions, scores, passes, credit."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.utils.logging import get_logger

from hfppo import functional as F
from hfppo.collect.candidates import Choice, ScoreLine, choose, measure_choice, num_candidates
from hfppo.collect.check_finite import check_rollout
from hfppo.collect.credit import CreditAssignment, counts_in_loss
from hfppo.collect.forward import any_active, autocast, forward_passes, single_pass
from hfppo.collect.rollout_metrics import measure_episodes, measure_rollout, measure_scores, scores_alike
from hfppo.config import PPOConfig
from hfppo.data.prompt_stream import PromptStream
from hfppo.data.prompts import Prompt, Prompts, Row
from hfppo.environments.chat_format import parse_turn
from hfppo.environments.episodes import EpisodePlayer
from hfppo.functional.kl import clamp_log_ratio
from hfppo.generation.sampler import Sampler
from hfppo.metrics import Measures, parts, parts_of
from hfppo.models.actor_critic import ActorCritic, Want
from hfppo.models.modes import eval_mode
from hfppo.rewards.functions import PendingScores, RewardFunctions, score_table
from hfppo.rewards.reward_func import Numbers, RewardBatch
from hfppo.rollout import Rollout, Transcript
from hfppo.sample import Ended, Ids, Sample, Turn, pad
from hfppo.state import CHOICE_STREAM, ENVIRONMENT_STREAM, EVAL_STREAM, SAMPLING_STREAM, PPOState, stream_seed
from hfppo.support.out_of_memory import ADVICE, explain_out_of_memory

logger = get_logger(__name__)

Streams = tuple[tuple[int, ...], tuple[int, ...]]  # of random numbers, for sampling and for environments
TRAINING = (SAMPLING_STREAM,), (ENVIRONMENT_STREAM,)
EVALUATION = (EVAL_STREAM,), (EVAL_STREAM, ENVIRONMENT_STREAM)

PhaseDisplay = Callable[[str], AbstractContextManager]  # shows a phase, by the name of its metric, while it lasts


@dataclass(frozen=True)
class Collected:
    """Result of collecting one rollout."""

    rollout: Rollout
    transcript: Transcript
    measures: Measures  # only times if `training` is False


@dataclass(frozen=True)
class Phases:
    """Times the phases of a rollout, shows them, and adds hints to out-of-memory errors."""

    with_vllm: bool
    show: PhaseDisplay
    # By metric; a phase entered twice adds up.
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as `time/<name>`, and show it as the current phase.

        Raises:
            OutOfMemory: with the settings that help in this phase, if some do.
        """
        start = time.perf_counter()
        advised = "generation with vLLM" if name == "generation" and self.with_vllm else name
        with self.show(f"time/{name}"), explain_out_of_memory(advised) if advised in ADVICE else nullcontext():
            yield
        self.seconds[f"time/{name}"] += time.perf_counter() - start

    def measures(self, tokens: float) -> Measures:
        """Return the seconds of each phase, and the sampling rate for a number of tokens."""
        rate = tokens / self.seconds["time/generation"]
        return {**self.times(), "time/tokens_per_second": parts_of(rate)}

    @property
    def own_seconds(self) -> float:
        """Seconds of the phases in which a process waits for no other, unless the model is sharded."""
        return sum(self.seconds[f"time/{name}"] for name in ("generation", "passes", "rewards"))

    def times(self) -> Measures:
        """Return the seconds of each phase."""
        return {name: parts_of(x) for name, x in self.seconds.items()}


@dataclass(frozen=True)
class Sampled:
    """Samples before the passes, and the scores that asynchronous reward functions may still compute."""

    samples: Sequence[Sample]
    pending: PendingScores  # `result` waits for the scores, and writes them on the samples
    phase: Phases  # times so far
    measures: Measures = field(default_factory=dict)


@dataclass(frozen=True)
class Collector:
    """Collects rollouts. It has no state."""

    model: ActorCritic
    sampler: Sampler
    rewards: RewardFunctions
    tokenizer: PreTrainedTokenizerBase
    accelerator: Accelerator
    args: PPOConfig
    player: EpisodePlayer | None = None  # None without tools and environments

    def choose_prompts(
        self, prompts: Prompts | PromptStream, state: PPOState, show: PhaseDisplay = nullcontext
    ) -> Choice:
        """Return this process's prompts of the next rollout: those that the critic chooses, or the next ones.

        There may be more than a rollout has groups.

        Args:
            show: shows the critic's pass over the candidates.
        Raises:
            OutOfMemory: with the settings that help.
        """
        line, args, processes = ScoreLine.fit(state.uniform_scores), self.args, self.accelerator.num_processes
        count = args.prompts_per_process * processes
        first = state.next_rollout * count + state.passed_over
        window = range(first, first + num_candidates(line, state.spread, args) * processes)
        part = self.own_part(len(window))
        if not line.may_choose:
            own = window[part]
            return Choice(own, [*range(len(own))], [True] * len(own), len(window) - count)
        phase = Phases(args.use_vllm, show)
        with phase("candidates"):
            candidates = self.rows_at(window, [*range(len(window))][part], prompts)[:: args.num_generations]
            values = self.gather(self.prompt_values(candidates)[:, None])[:, 0]
        expected = line.expected(values, values.mean())
        taken, uniform = choose(line.distances(expected), count, (args.seed, CHOICE_STREAM, first))
        measures = measure_choice(expected, taken, uniform, part) | phase.times()
        part = self.own_part(count)
        plain = {name: x.tolist() for name, x in measures.items()}
        return Choice(window, taken[part].tolist(), uniform[part].tolist(), len(window) - count, plain)

    def rows_of(self, choice: Choice, prompts: Prompts | PromptStream) -> list[Row]:
        """Return the completions to make for chosen prompts."""
        return self.rows_at(choice.positions, choice.taken, prompts)

    def rows_at(self, positions: range, taken: list[int], prompts: Prompts | PromptStream) -> list[Row]:
        """Return the completions to make for the prompts at some of the positions, given by index."""
        found = [*zip(positions, prompts.at(positions, self.args.seed), strict=True)]
        return make_rows((found[i] for i in taken), self.args.seed, TRAINING, self.args.num_generations)

    def own_part(self, count: int) -> slice:
        """Return this process's part of so many rows of all processes."""
        size = count // self.accelerator.num_processes
        return slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)

    def prompt_values(self, rows: list[Row]) -> Tensor:
        """Return V(s₀) of rows, (B,), with the texts of their environments."""
        rows = rows if self.player is None else self.player.complete_prompts(rows)
        # A completion of one token, which no forward reads.
        samples = [Sample(row, row.prompt_ids[-1:], sampled=[True], logprobs=[0.0]) for row in rows]
        sequences = pad(samples, self.tokenizer.pad_token_id, several_turns=False)
        values = single_pass(self.model, sequences, self.accelerator, self.args, Want(policy=False)).values
        assert values is not None
        return values[:, 0]

    def eval_rows(self, prompts: Prompts) -> list[Row]:
        """Return a row for each prompt, with the same seeds in every evaluation."""
        return make_rows(((n, prompts[n]) for n in range(len(prompts))), self.args.seed, EVALUATION)

    def collect(
        self,
        rows: list[Row],
        ppo_state: PPOState,
        state: TrainerState,
        training: bool = True,
        show: PhaseDisplay = nullcontext,
    ) -> Collected:
        """Collect a rollout. The arguments are not changed.

        Args:
            rows: the completions to make.
            ppo_state: gives β.
            state: passed to the reward functions.
            training: False leaves out whitening of advantages, by which rows affect each other.
            show: shows each phase.
        Raises:
            NonFiniteError: a number is not finite on some process.
            OutOfMemory: with the settings that help.
        """
        phase = Phases(self.args.use_vllm, show)
        with eval_mode(self.model):
            sampled = self.sample(rows, state, phase, self.sampler.ready())
            with sampled.pending:
                return self.finish(sampled, ppo_state, training)

    @torch.no_grad()
    def sample(self, rows: list[Row], state: TrainerState, phase: Phases, ready: AbstractContextManager) -> Sampled:
        """Complete rows, and begin to score them.

        Args:
            state: see `collect`.
            phase: times the phases.
            ready: the sampler's block.
        """
        with phase("rollout"):
            with phase("generation"), ready:
                samples = self.complete(rows, timed=partial(phase, "environments"))
            with phase("rewards"):
                return Sampled(samples, self.rewards.start(self.reward_batch(samples, state)), phase)

    @torch.no_grad()
    def finish(self, sampled: Sampled, ppo_state: PPOState, training: bool = True) -> Collected:
        """Make the rollout of sampled completions: the passes, the credit, the metrics.

        Args:
            ppo_state, training: see `collect`.
        """
        samples, phase, measures = sampled.samples, sampled.phase, sampled.measures
        with phase("rollout"), eval_mode(self.model):
            if training and self.args.selects_groups:
                with phase("rewards"):
                    sampled.pending.result()
                    samples, of_groups = self.select_groups(samples)
                measures = measures | of_groups
            sequences = pad(samples, self.tokenizer.pad_token_id, several_turns=self.player is not None)
            with phase("passes"):
                needs_reference = self.args.needs_reference or ppo_state.kl_coef != 0  # a callback may raise β from 0
                passes = forward_passes(self.model, sequences, self.accelerator, self.args, needs_reference)
            with phase("rewards"):
                numbers = sampled.pending.result()
            if training and self.accelerator.num_processes > 1:  # nothing above waits for another process
                measures = measures | {"time/straggler": parts_of(phase.own_seconds)}
            whiten = partial(F.whiten, total=self.total) if training else None
            assign_credit = CreditAssignment(self.args, ppo_state.kl_coef, whiten, self.rewards.weights)
            credited = assign_credit(samples, sequences, passes)
        rollout = credited.rollout
        name = f"rollout {ppo_state.next_rollout + 1}" if training else "the completions"
        check_rollout(rollout, name)
        measures = measures | phase.measures(float(rollout.mask.sum()))
        if training:
            measures |= self.measure_samples(samples, numbers)
            measures |= measure_rollout(credited, ppo_state.kl_coef, self.args, self.total)
        return Collected(rollout, transcript_of(samples), measures)

    def measure_samples(self, samples: Sequence[Sample], numbers: Numbers) -> Measures:
        """Measure scores, turns and tools."""
        of_turns = {} if self.player is None else measure_episodes(samples)
        return measure_scores(samples, numbers) | of_turns

    def complete(
        self, rows: list[Row], greedy: bool = False, timed: Callable[[], AbstractContextManager] = nullcontext
    ) -> Sequence[Sample]:
        """Complete the prompts, in one turn or with tools and environments in several; the sampler must be ready.

        Args:
            greedy: take the likeliest tokens instead of sampling.
            timed: measures the time of tools and environments.
        """
        if self.player is None:
            turns = self.ask_sampler([row.prompt_ids for row in rows], None if greedy else [row.seed for row in rows])
            return answers(rows, turns, self.tokenizer)
        at_once = self.args.use_vllm and self.args.vllm_mode == "server"
        active = bool if at_once else partial(any_active, self.model, self.accelerator)
        return self.player.play(rows, self.ask_sampler, greedy, active, timed, at_once)

    def ask_sampler(self, prompts: list[Ids], seeds: list[int] | None, budgets: list[int] | None = None) -> list[Turn]:
        """Return a turn for each prompt; the sampler must be ready. See `Sampler`."""
        limits = {} if budgets is None else {"budgets": budgets}
        with autocast(self.accelerator):
            turns = self.sampler(prompts, seeds, **limits)
        if len(turns) != len(prompts):
            raise ValueError(
                f"sampler {type(self.sampler).__name__} returned {len(turns)} turns for {len(prompts)} prompts; it "
                "must return one for each, in their order"
            )
        return turns

    def reward_batch(self, samples: Sequence[Sample], state: TrainerState) -> RewardBatch:
        """Return samples as the reward functions get them."""
        warn_of_hidden(samples, self.tokenizer)
        return RewardBatch(samples, self.tokenizer, state)

    def select_groups(self, samples: Sequence[Sample]) -> tuple[list[Sample], Measures]:
        """Return as many groups of scored samples as a rollout has, those whose scores differ first, and measures."""
        size = self.args.num_generations
        scores = torch.tensor([sample.score for sample in samples], dtype=torch.float32)
        scored = torch.tensor([sample.scored for sample in samples])
        counts = torch.tensor([counts_in_loss(sample, self.args) for sample in samples])
        alike = scores_alike(scores, scored, counts, size)
        groups = alike.int().argsort(stable=True)[: self.args.prompts_per_process].tolist()
        measures = {
            "candidates/spread": parts(~alike),
            "candidates/completions": parts_of(len(scores) * self.accelerator.num_processes),
        }
        return [sample for group in groups for sample in samples[group * size : (group + 1) * size]], measures

    def restore_base_states(self, rollout: Rollout) -> Rollout:
        """Recompute the `base_states` of a loaded rollout, which checkpoints omit, to the bit."""
        if not self.model.keeps_base_states or rollout.base_states is not None:
            return rollout
        with eval_mode(self.model), torch.no_grad():  # the passes of the collection; only their base states are used
            needs_reference = rollout.ref_logprobs is not None
            passes = forward_passes(self.model, rollout, self.accelerator, self.args, needs_reference)
        return replace(rollout, base_states=passes.base_states)

    def align_returns(self, rollout: Rollout) -> tuple[Rollout, Measures]:
        """Give a rollout the ratio of the present policy to the one that sampled it, and measure the ratio."""
        want = Want(self.args.temperature, values=False)
        logprobs = single_pass(self.model, rollout, self.accelerator, self.args, want).logprobs
        assert logprobs is not None
        ratio = clamp_log_ratio(logprobs - rollout.rollout_logprobs).exp()
        measures = {
            "value/ratio_mean": parts(ratio, rollout.fitted),
            "value/rejected_frac": parts(ratio > F.MAX_ALIGNED_RATIO, rollout.fitted),
        }
        return replace(rollout, value_ratio=ratio), measures

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all processes, in their order; (B, …) of this process's B rows."""
        return self.accelerator.gather(x.to(self.accelerator.device)).cpu()

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of a (B, T) tensor over all processes: of sums of rows, so that none gets others' tokens."""
        if self.accelerator.num_processes == 1:
            return x.sum()
        return self.gather(x.sum(dim=1, dtype=torch.float64)).sum()


def answers(rows: list[Row], turns: list[Turn], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return completions of one turn: as text, or as messages that answer conversations."""
    samples = []
    for row, turn in zip(rows, turns, strict=True):
        sample = Sample(row, turns=1, ended=Ended.CUT if turn.truncated else Ended.STOPPED)
        sample.append(turn.ids, turn.logprobs)
        if isinstance(row.columns["prompt"], list):
            sample.text = [parse_turn(tokenizer, turn.ids, row.prompt_ids, tools=[])[0]]
        else:
            sample.text = str(tokenizer.decode(turn.ids, skip_special_tokens=True))
        samples.append(sample)
    return samples


def warn_of_hidden(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if the policy samples special tokens that its text leaves out, other than EOS and the like."""
    text, usual = str([sample.text for sample in samples]), set(map(str, tokenizer.special_tokens_map.values()))
    inside: set[int] = set()  # a turn's last token may end it
    for sample in samples:
        within = zip(sample.ids, sample.sampled, sample.sampled[1:], strict=False)
        inside |= {token for token, sampled, goes_on in within if sampled and goes_on}
    hidden = [number for number in sorted(inside) if not tokenizer.decode([number], skip_special_tokens=True)]
    for token in (str(tokenizer.decode([number])) for number in hidden):
        if token and token not in usual and token not in text:
            logger.warning_once(
                "the policy samples %r, which the text for reward functions leaves out because it is a special token "
                "of the tokenizer; look for it in completion_ids",
                token,
            )


def transcript_of(samples: Sequence[Sample]) -> Transcript:
    """Return the samples as text, with their scores by function."""
    scores = dict(zip(samples[0].scores, score_table(samples).T.tolist(), strict=True))
    extra = {name: [sample.extra[name] for sample in samples] for name in samples[0].extra}
    prompts = [sample.row.columns["prompt"] for sample in samples]
    return Transcript(prompts, [sample.text for sample in samples], scores, extra)


def make_rows(prompts: Iterable[tuple[int, Prompt]], seed: int, streams: Streams, completions: int = 1) -> list[Row]:
    """Return the completions to make of prompts, a function of seed and position.

    Args:
        prompts: each with its position in the order of prompts.
        streams: `TRAINING` or `EVALUATION`.
        completions: number for each prompt.
    """
    sampling, environment = streams
    return [
        Row(
            *prompt,
            number=number,
            group=position,
            seed=stream_seed(seed, *sampling, number),
            environment_seed=stream_seed(seed, *environment, position) % 2**32,
        )
        for position, prompt in prompts
        for number in range(position * completions, (position + 1) * completions)
    ]


def group_equal_rows(rows: list[Row]) -> list[Row]:
    """Return the rows in groups of equal rows."""
    groups: dict[str, int] = {}
    return [replace(row, group=groups.setdefault(repr((row.prompt_ids, row.columns)), row.group)) for row in rows]
