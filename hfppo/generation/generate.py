"""Sampling with transformers' `generate`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hfppo.generation.key_values import CACHE, KeyValues, may_keep
from hfppo.generation.sampler import Completions, Sampler, Sampling, completions_from, join_completions
from hfppo.generation.stop_strings import StopStringCriterion
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.batch_size import sampler_rows
from hfppo.models.modes import is_sharded
from hfppo.models.output_head import float32_logits
from hfppo.state import stream_seed

BLOCK = 64  # tokens whose probabilities are summed in float32
WORTHWHILE = 0.75  # the largest share of tokens left to read for which another call of `generate` is worth it
BELOW_ONE = 1.0 - 2.0**-53  # the largest float64 below 1


class SeededChoice(LogitsProcessor):
    """Choose each row's next token with the row's own random numbers, and record its log-prob.

    All other tokens get probability 0, so `generate` takes the chosen one. With one stream of random
    numbers for the batch, as in `do_sample=True`, a row's completion would depend on its neighbours: on the batch
    size, and on the number of processes.

    Args:
        uniforms: (B, T) in [0, 1), one per token; None chooses the likeliest.
        temperature: divides the logits.
        on_token: called with the number of tokens chosen so far.
    """

    def __init__(self, uniforms: Tensor | None, temperature: float, on_token: Callable[[int], None]):
        self.uniforms, self.temperature, self.on_token = uniforms, temperature, on_token
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scaled = scores.float() if self.temperature == 1.0 else scores.float() / self.temperature
        logprobs = torch.log_softmax(scaled, dim=-1)
        if self.uniforms is None:
            choice = logprobs.argmax(dim=-1, keepdim=True)
        else:
            uniforms = self.uniforms[:, len(self.logprobs), None]
            choice = draw(logprobs.exp().to(uniforms.device), uniforms).to(scores.device)
        self.logprobs.append(logprobs.gather(1, choice).squeeze(1))
        self.on_token(len(self.logprobs))
        return torch.full_like(scores, -torch.inf).scatter(1, choice, 0.0)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return (B, 1) tokens drawn from (B, V) probabilities: the inverse of their cumulative sum at (B, 1) numbers.

    The numbers are float64, uniform in [0, 1). Each one chooses first a block of tokens, then a token of that
    block by its position within the block, which is uniform again. The sums over a large vocabulary need float64 but
    are slow in it; with blocks few of them are needed.
    """
    vocab_size = probabilities.shape[-1]
    padded = nn.functional.pad(probabilities, (0, -vocab_size % BLOCK)) if vocab_size % BLOCK else probabilities
    blocks = padded.unflatten(-1, (-1, BLOCK))
    block, within = invert(blocks.sum(dim=-1), uniforms)
    token, _ = invert(blocks.take_along_dim(block[..., None], dim=1).squeeze(1), within)
    return (block * BLOCK + token).clamp(max=vocab_size - 1)  # beyond it only if numbers are not finite


def invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, 1) indices drawn from (B, N) weights, and each number's position in [0, 1) within its weight."""
    cumulative = weights.double().cumsum(dim=-1)
    drawn = uniforms * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, drawn, right=True).clamp(max=weights.shape[-1] - 1)
    ends, lengths = cumulative.gather(1, index), weights.gather(1, index)
    return index, (1.0 - (ends - drawn) / lengths).clamp(0.0, BELOW_ONE)


@dataclass(frozen=True)
class Batch:
    """B rows that are sampled together."""

    prompt_ids: Tensor  # (B, P), padded on the left
    prompt_mask: Tensor  # (B, P) bool
    seeds: list[int] | None  # None: greedy
    limits: list[int]  # the most tokens of each completion


class TurnCache:
    """Keeps the KV cache of a turn of episodes for the next turn, while the weights stay the same."""

    def __init__(self) -> None:
        self.weights_stay = False
        self.kept: KeyValues | None = None

    @contextmanager
    def while_weights_stay(self) -> Iterator[None]:
        """Keep the KV cache within the block."""
        self.weights_stay = True
        try:
            yield
        finally:
            self.weights_stay, self.kept = False, None

    def put(self, kept: KeyValues | None) -> None:
        """Replace the stored KV cache; None clears it."""
        self.kept = kept

    def take(self, batch: Batch) -> DynamicCache | None:
        """Remove the stored KV cache, and return the part that the prompts begin with, or None."""
        kept, self.kept = self.kept, None
        return None if kept is None else kept.continued_by(batch.prompt_ids, batch.prompt_mask)


class TransformersSampler(Sampler):
    """Sample from the actor itself, `batch_size` rows at a time.

    Tokens come from the whole distribution at the temperature; the model's own generation config is ignored. So
    π_rollout equals π_old up to rounding.

    A prompt that adjacent rows of a batch share, as in a group, is read once. A turn of an episode reads only what is
    new since the turn before: within `ready` its KV cache is kept for the next turn while the active rows fit one
    batch. `key_values` has the conditions.

    Args:
        batch_size: None: see `sampler_rows`.
        on_progress: called with the share of the tokens that is sampled, from 0 to 1.
    """

    def __init__(
        self,
        model: ActorCritic,
        sampling: Sampling,
        batch_size: int | None,
        on_progress: Callable[[float], None] | None = None,
    ):
        self.model, self.sampling, self.batch_size = model, sampling, batch_size
        self.on_progress = on_progress or (lambda share: None)
        self.rows = 0  # rows per batch in the latest call
        self.turn_cache = TurnCache()
        self.may_reuse = True  # False if `check_sampler` finds that the model does not continue from a KV cache
        self.may_share = True  # False once a batch's KV cache turns out to be of another kind

    def ready(self) -> AbstractContextManager[None]:
        """See `Sampler`."""
        return self.turn_cache.while_weights_stay()

    def __call__(
        self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None, budgets: list[int] | None = None
    ) -> Completions:
        """See `Sampler`."""
        lengths = prompt_mask.sum(dim=1)
        by_length = lengths.argsort(descending=True, stable=True)  # rows of similar length need little padding
        if self.turn_cache.kept is None:  # otherwise it fills some of the memory that was free in the first turn
            size = int(lengths.max()), self.sampling.max_tokens
            self.rows = sampler_rows(self.model, self.batch_size, *size, prompt_ids.device)
        parts = [rows.sort().values for rows in by_length.split(self.rows)]
        keepable = self.may_reuse and may_keep(self.model)
        in_turns = budgets is not None and self.turn_cache.weights_stay and len(parts) == 1 and keepable
        if not in_turns:
            self.turn_cache.put(None)
        sampled: list[Completions] = []
        for rows in parts:
            width = int(lengths[rows].max())
            batch = Batch(
                prompt_ids[rows, -width:],
                prompt_mask[rows, -width:],
                seeds=None if seeds is None else [seeds[row] for row in rows.tolist()],
                limits=[self.sampling.max_tokens if budgets is None else budgets[row] for row in rows.tolist()],
            )
            on_token = partial(self._report, batch, sum(len(part.ids) for part in sampled), len(prompt_ids))
            past = self.turn_cache.take(batch)
            if past is None and keepable and self.may_share:
                past = self._read_shared(batch)
            completions, key_values = self._sample(batch, on_token, past, in_turns)
            self.turn_cache.put(key_values)
            sampled.append(completions)
        return join_completions(sampled, self.sampling.pad_id).rows(torch.cat(parts).argsort())

    def _report(self, batch: Batch, rows_before: int, all_rows: int, tokens: int) -> None:
        """Report the progress after some tokens of a batch."""
        share = len(batch.limits) * tokens / max(batch.limits)
        self.on_progress((rows_before + share) / all_rows)

    def _read_shared(self, batch: Batch) -> DynamicCache | None:
        """Read a prompt once for the adjacent rows that share it.

        Returns:
            The KV cache of each row's first columns; None if it cannot be laid out, or if it saves too little.
        """
        prompt_ids, prompt_mask = batch.prompt_ids, batch.prompt_mask
        both = torch.cat([prompt_ids, prompt_mask.to(prompt_ids.dtype)], dim=1)
        distinct, row_of = both.unique_consecutive(dim=0, return_inverse=True)
        ids, mask = distinct.chunk(2, dim=1)
        if ids.numel() + len(prompt_ids) > WORTHWHILE * prompt_ids.numel():  # the last column is read for all rows
            return None
        once = Batch(ids, mask.bool(), seeds=None, limits=[1] * len(ids))
        _, read = self._sample(once, on_token=lambda tokens: None, past=None, keep=True)
        self.may_share = read is not None
        return None if read is None else read.lay_out(row_of.tolist(), prompt_ids, prompt_mask)

    def _sample(
        self, batch: Batch, on_token: Callable[[int], None], past: DynamicCache | None, keep: bool
    ) -> tuple[Completions, KeyValues | None]:
        """Sample the completions of one batch.

        Args:
            past: the KV cache of the prompts' first columns.
            keep: also return the KV cache of prompts and completions, if it is of a kind that can be kept.
        """
        settings, width, most = self.sampling, batch.prompt_ids.shape[1], max(batch.limits)
        device = batch.prompt_ids.device
        # MPS has no float64, and CUDA no deterministic cumulative sum.
        on_cpu = device.type == "mps" or torch.are_deterministic_algorithms_enabled()
        uniforms = None if batch.seeds is None else row_uniforms(batch.seeds, most).to("cpu" if on_cpu else device)
        choice = SeededChoice(uniforms, settings.temperature, on_token)
        stops = None if settings.stops is None else StopStringCriterion(settings.stops, width, len(batch.limits))
        config = GenerationConfig(
            max_new_tokens=most,
            eos_token_id=settings.eos_ids,
            pad_token_id=settings.pad_id,
            use_cache=True,
            return_dict_in_generate=keep,
        )
        if isinstance(self.model, FSDPModule) and "generate" not in vars(self.model):
            # The shards of the root are gathered for it as well; Trainer asks for that in training only.
            register_fsdp_forward_method(self.model, "generate")
        with (
            torch.no_grad(),
            # Compiled layers are for whole sequences: a graph for one token and its cache costs more than it saves.
            torch.compiler.set_stance("force_eager"),
            generation_config_of(self.model, config),
            float32_logits(self.model.causal_lm),
            batch_state_reset(self.model),
        ):
            output = self.model.generate(
                input_ids=batch.prompt_ids,
                attention_mask=batch.prompt_mask.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([choice]),
                stopping_criteria=StoppingCriteriaList([] if stops is None else [stops]),
                synced_gpus=is_sharded(self.model),
                **({} if past is None else {CACHE: past}),
            )
        sequences = output.sequences if keep else output
        completions = completions_from(
            sequences[:, width:],
            torch.stack(choice.logprobs, dim=1),
            settings.eos_ids,
            torch.tensor(batch.limits, device=device),
            None if stops is None else torch.tensor(stops.ends, device=device),
        )
        if not keep:
            return completions, None
        mask = torch.cat([batch.prompt_mask, completions.mask], dim=1)
        return completions, KeyValues.of(output[CACHE], sequences, mask)


def row_uniforms(seeds: list[int], width: int) -> Tensor:
    """Return (B, T) float64 numbers in [0, 1), each row from its own seed."""
    generators = [torch.Generator().manual_seed(stream_seed(seed)) for seed in seeds]
    return torch.stack([torch.rand(width, generator=g, dtype=torch.float64) for g in generators])


@contextmanager
def generation_config_of(model: ActorCritic, config: GenerationConfig) -> Iterator[None]:
    """Give the model this generation config for the block.

    `generate` fills unset fields of a passed config, such as a repetition penalty, from the model's own.
    """
    base = model.causal_lm
    before = base.generation_config
    base.generation_config = config
    try:
        yield
    finally:
        base.generation_config = before


@contextmanager
def batch_state_reset(model: ActorCritic) -> Iterator[None]:
    """Restore the tensors that modules set in the block apart from the KV cache, such as `rope_deltas`.

    They have one row per row of the batch, and the next pass may have other rows.
    """
    before = [(module, dict(vars(module))) for module in model.causal_lm.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in [name for name, value in vars(module).items() if isinstance(value, Tensor)]:
                if name not in attributes:
                    delattr(module, name)
                elif vars(module)[name] is not attributes[name]:
                    setattr(module, name, attributes[name])
