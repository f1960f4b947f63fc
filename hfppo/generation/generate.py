"""Sampling with transformers' `generate`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hfppo.generation.key_values import CACHE, KeyValues, Row, can_lay_out, continue_rows, lay_out, shared_length
from hfppo.generation.sampler import Sampler, Sampling
from hfppo.generation.stop_strings import StopStringCriterion
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.batch_size import sampler_rows
from hfppo.models.modes import attributes, is_sharded
from hfppo.models.output_head import float32_logits
from hfppo.sample import Ids, Turn
from hfppo.state import stream_seed
from hfppo.support.padding import pad_left

BLOCK = 64  # tokens whose probabilities are summed in float32
CHUNK = 32  # most tokens of a sequence in one call of `generate`
BELOW_ONE = 1.0 - 2.0**-53  # the largest float64 below 1
Progress = Callable[[float], None]  # takes the share that is done, from 0 to 1


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


class TransformersSampler(Sampler):
    """Sample from the actor itself, up to `batch_size` rows at a time.

    Tokens come from the whole distribution at the temperature; the model's own generation config is ignored. So
    π_rollout equals π_old up to rounding.

    `generate` is called for a chunk of tokens at a time. Between chunks, finished sequences leave the batch and
    waiting prompts join it. A prefix that several prompts share is prefilled once. A turn of an episode prefills only
    its new tokens: within `ready` its KV cache is kept for the next turn while the active sequences fit one batch.

    That needs a model that is not sharded, with full attention in all layers, as `sdpa` or `eager`, and no state but
    key-values. With other models, `generate` samples each batch in one call.

    Args:
        batch_size: None: see `sampler_rows`.
        on_progress: called with the share of the tokens that is sampled, from 0 to 1.
    """

    def __init__(
        self, model: ActorCritic, sampling: Sampling, batch_size: int | None, on_progress: Progress | None = None
    ):
        self.model, self.sampling, self.batch_size = model, sampling, batch_size
        self.on_progress = on_progress or (lambda share: None)
        self.at_once = 0  # most rows of a batch in the latest call
        self.rows: list[Row] = []  # of the latest call; between calls, of a turn that is kept for the next one
        self.weights_stay = False
        self.may_reuse = True  # False once `generate` turns out not to continue from the KV cache; see `check_sampler`

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Sampler`. Within the block, the KV cache of turns is kept."""
        self.weights_stay = True
        try:
            yield
        finally:
            self.weights_stay, self.rows = False, []

    def __call__(self, prompts: list[Ids], seeds: list[int] | None, budgets: list[int] | None = None) -> list[Turn]:
        """See `Sampler`."""
        if not self.rows:  # otherwise their KV cache fills some of the memory that was free in the first turn
            size = max(map(len, prompts)), self.sampling.max_tokens
            self.at_once = sampler_rows(self.model, self.batch_size, *size, self.model.device)
        self.may_reuse &= not is_sharded(self.model)
        limits = budgets or repeat(self.sampling.max_tokens)
        given = zip(prompts, limits, seeds or repeat(None), strict=False)
        rows = [Row([*prompt], limit, seed) for prompt, limit, seed in given]
        in_turns = budgets is not None and self.weights_stay and len(rows) <= self.at_once
        continue_rows(self.rows if in_turns else [], rows)
        self.rows = rows
        by_length = sorted(rows, key=lambda row: len(row.tokens), reverse=True)  # similar lengths need little padding
        while batch := [row for row in by_length if not row.done][: self.at_once]:
            old = [row for row in batch if row.key_values.cache]
            new = [row for row in batch if not row.key_values.cache]
            lay_out(old, [row for row in rows if row.done and row.key_values.cache])
            self._read_shared(new)
            if old and new:  # new rows have more tokens to read
                self._sample(new, 1, in_turns)
            self._sample([row for row in batch if not row.done], CHUNK, in_turns)
        self.rows = [row for row in rows if row.key_values.cache]
        return [Turn(row.tokens[-len(row.logprobs) :], row.logprobs, not row.ended) for row in rows]

    def _report(self, batch: list[Row], tokens: int) -> None:
        """Report the progress after some tokens of a batch."""
        more = dict.fromkeys(batch, tokens)
        shares = [row.done or min(1.0, (len(row.logprobs) + more.get(row, 0)) / row.limit) for row in self.rows]
        self.on_progress(sum(shares) / len(shares))

    def _read_shared(self, rows: list[Row]) -> None:
        """Prefill a prefix that several sequences share once, if that saves enough."""
        length = shared_length(rows) if self.may_reuse else 0
        if length:
            heads = {tuple(row.tokens[:length]): Row(row.tokens[:length], 1, None, row.key_values) for row in rows}
            self._read_shared([*heads.values()])
            self._sample([*heads.values()], 1, keep=True)
            for row in rows:
                row.key_values = heads[tuple(row.tokens[:length])].key_values
            self._read_shared(rows)

    def _sample(self, rows: list[Row], most: int, keep: bool) -> None:
        """Prefill the tokens of a batch that are not in its KV cache, and sample the next ones.

        Args:
            most: maximum number of new tokens of a row; ignored if the KV cache cannot be kept.
            keep: also keep the KV cache of finished completions.
        """
        settings, device = self.sampling, self.model.device
        ids, mask = (x.to(device) for x in pad_left([row.tokens for row in rows], settings.pad_id))
        width = ids.shape[1]
        columns = max(len(row.tokens) + row.left for row in rows)  # the same, whenever a row joined the batch
        most = min(most, columns - width) if self.may_reuse else max(row.left for row in rows)
        numbers = [row_uniforms(row.seed, len(row.logprobs) + most) for row in rows if row.seed is not None]
        # MPS has no float64, and CUDA no deterministic cumulative sum.
        on_cpu = device.type == "mps" or torch.are_deterministic_algorithms_enabled()
        uniforms = torch.stack([x[-most:] for x in numbers]).to("cpu" if on_cpu else device) if numbers else None
        choice = SeededChoice(uniforms, settings.temperature, partial(self._report, rows))
        starts = [width - len(row.logprobs) for row in rows]
        stops = None if settings.stops is None else StopStringCriterion(settings.stops, starts)
        lay_out([row for row in rows if row.key_values.cache])
        config = GenerationConfig(
            max_new_tokens=most,
            eos_token_id=settings.eos_ids,
            pad_token_id=settings.pad_id,
            use_cache=True,
            return_dict_in_generate=True,
        )
        if isinstance(self.model, FSDPModule) and "generate" not in vars(self.model):
            # The shards of the root are gathered for it as well; Trainer asks for that in training only.
            register_fsdp_forward_method(self.model, "generate")
        with (
            torch.no_grad(),
            # Compiled layers are for whole sequences: a graph for one token and its cache costs more than it saves.
            torch.compiler.set_stance("force_eager"),
            # `generate` fills unset fields of a passed config, such as a repetition penalty, from the model's own.
            attributes(self.model.causal_lm, generation_config=config),
            float32_logits(self.model.causal_lm),
            batch_state_reset(self.model),
        ):
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([choice]),
                stopping_criteria=StoppingCriteriaList([stops] if stops else []),
                synced_gpus=is_sharded(self.model),
                **{CACHE: rows[0].key_values.cache},
            )
        sampled, logprobs = output.sequences[:, width:].tolist(), torch.stack(choice.logprobs, dim=1).tolist()
        known = output.sequences.shape[1] - 1  # columns of the KV cache; the last token was not read
        self.may_reuse &= can_lay_out(output.get(CACHE), known, self.model.causal_lm.config._attn_implementation)
        for number, row in enumerate(rows):
            begin = width - len(row.tokens)
            row.extend(sampled[number], logprobs[number], settings.eos_ids, stops.ends[number] - width if stops else 0)
            place = KeyValues(output.get(CACHE), number * known + begin, min(len(row.tokens), known - begin))
            row.key_values = place if self.may_reuse and (keep or not row.done) else KeyValues()


class SnapshotSampler(TransformersSampler):
    """Samples from a copy of the actor, with the adapter's weights of the time when `ready` was entered.

    Args:
        sampler: gives the actor and the settings.
    """

    keeps_policy = True

    def __init__(self, sampler: TransformersSampler):
        super().__init__(sampler.model.copy_actor(), sampler.sampling, sampler.batch_size)
        self.actor = sampler.model

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Sampler`."""
        self.model.load_actor_weights(self.actor.actor_weights())
        with super().ready():
            yield


def row_uniforms(seed: int, width: int) -> Tensor:
    """Return (T,) float64 numbers in [0, 1) of a row's seed."""
    return torch.rand(width, generator=torch.Generator().manual_seed(stream_seed(seed)), dtype=torch.float64)


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
