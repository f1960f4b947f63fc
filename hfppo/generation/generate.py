"""Sampling with transformers' `generate`."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hfppo.generation.key_values import CACHE, KeyValues, may_keep
from hfppo.generation.sampler import Completions, Sampler, completions_from, join_completions
from hfppo.generation.stop_strings import StopStringCriterion, StopStrings
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.modes import is_sharded
from hfppo.state import stream_seed

BLOCK = 64  # tokens whose probabilities are summed in float32
WORTHWHILE = 0.75  # of the tokens: reading shared prompts once costs another call of `generate`
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


class TransformersSampler(Sampler):
    """Sample from the actor itself, `batch_size` rows at a time.

    Tokens come from the whole distribution at `temperature`; the model's own generation config is ignored. So
    π_rollout equals π_old up to rounding.

    A prompt that adjacent rows of a batch share, as in a group, is read once. The turns of an episode do not read the
    episode from its beginning each time: within `ready`, the key-values of one turn are kept for the next, if the rows
    that still play are one batch, so that there are never more of them than while one batch is sampled. `key_values`
    has the conditions.

    Args:
        with_values: also return the shared critic's values, computed from the hidden states of sampling.
        stops: texts that end a completion as well.
        on_progress: called with the share of the tokens that is sampled, from 0 to 1.
    """

    def __init__(
        self,
        model: ActorCritic,
        eos_ids: list[int],
        pad_id: int,
        max_completion_length: int,
        temperature: float,
        batch_size: int,
        with_values: bool = False,
        stops: StopStrings | None = None,
        on_progress: Callable[[float], None] | None = None,
    ):
        self.model, self.temperature, self.batch_size = model, temperature, batch_size
        self.with_values, self.stops = with_values, stops
        self.on_progress = on_progress or (lambda share: None)
        self.config = GenerationConfig(
            max_new_tokens=max_completion_length, eos_token_id=eos_ids, pad_token_id=pad_id, use_cache=True
        )
        self.weights_held = False  # so that key-values stay valid
        self.kept: KeyValues | None = None  # of the last turn
        self.may_reuse = True  # until `check_sampler` finds that the model does not continue from key-values
        self.may_share = True  # until a batch's key-values turn out to be of another kind

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Sampler`."""
        self.weights_held = True
        try:
            yield
        finally:
            self.weights_held, self.kept = False, None

    def __call__(
        self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None, budgets: list[int] | None = None
    ) -> Completions:
        """See `Sampler`."""
        lengths = prompt_mask.sum(dim=1)
        by_length = lengths.argsort(descending=True, stable=True)  # of about one length, little padding
        batches = [rows.sort().values for rows in by_length.split(self.batch_size)]
        keepable = self.may_reuse and may_keep(self.model)
        in_turns = budgets is not None and self.weights_held and len(batches) == 1 and keepable
        kept, self.kept = self.kept if in_turns else None, None
        parts = []
        done = 0
        for rows in batches:
            ids, mask = (x[rows, -int(lengths[rows].max()) :] for x in (prompt_ids, prompt_mask))
            batch_seeds = None if seeds is None else [seeds[row] for row in rows.tolist()]
            limits = [self.config.max_new_tokens] * len(rows) if budgets is None else [budgets[row] for row in rows]

            def on_token(tokens: int, before: int = done, share: int = len(rows), most: int = max(limits)) -> None:
                self.on_progress((before + share * tokens / most) / len(prompt_ids))

            # Frees key-values that these prompts cannot use.
            past, kept = None if kept is None else kept.continued_by(ids, mask), None
            if past is None and keepable and self.may_share:
                past = self._read_shared(ids, mask)
            part, self.kept = self._sample(ids, mask, batch_seeds, limits, on_token, past, in_turns)
            parts.append(part)
            done += len(rows)
        return join_completions(parts, self.config.pad_token_id).rows(torch.cat(batches).argsort())

    def _read_shared(self, prompt_ids: Tensor, prompt_mask: Tensor) -> DynamicCache | None:
        """Read a prompt once for the adjacent rows that share it.

        Returns:
            Key-values of each row's first columns, or None: they cannot be laid out, or too little would be saved.
        """
        both = torch.cat([prompt_ids, prompt_mask.to(prompt_ids.dtype)], dim=1)
        distinct, row_of = both.unique_consecutive(dim=0, return_inverse=True)
        ids, mask = distinct.chunk(2, dim=1)
        if ids.numel() + len(prompt_ids) > WORTHWHILE * prompt_ids.numel():  # with the last column, read for all rows
            return None
        _, read = self._sample(
            ids, mask.bool(), seeds=None, limits=[1] * len(ids), on_token=lambda tokens: None, past=None, keep=True
        )
        self.may_share = read is not None
        return None if read is None else read.lay_out(row_of.tolist(), prompt_ids, prompt_mask)

    def _sample(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        seeds: list[int] | None,
        limits: list[int],
        on_token: Callable[[int], None],
        past: DynamicCache | None,
        keep: bool,
    ) -> tuple[Completions, KeyValues | None]:
        """Sample completions of (B, T) prompts in one batch, of at most `limits` tokens each.

        Args:
            past: key-values of the prompts' first columns.
            keep: also return the key-values of prompts and completions, if they are of a kind that can be kept.
        """
        device = prompt_ids.device
        # MPS has no float64, and CUDA no deterministic cumulative sum.
        on_cpu = device.type == "mps" or torch.are_deterministic_algorithms_enabled()
        where = torch.device("cpu") if on_cpu else device
        config = copy.deepcopy(self.config)
        config.max_new_tokens, config.return_dict_in_generate = max(limits), keep
        uniforms = None if seeds is None else row_uniforms(seeds, max(limits)).to(where)
        choice = SeededChoice(uniforms, self.temperature, on_token)
        stops = None
        if self.stops is not None:
            stops = StopStringCriterion(self.stops, prompt_ids.shape[1], len(prompt_ids))
        if isinstance(self.model, FSDPModule) and "generate" not in vars(self.model):
            # The shards of the root are gathered for it as well; Trainer asks for that in training only.
            register_fsdp_forward_method(self.model, "generate")
        # Compiled layers are for whole sequences: a graph for one token and its cache costs more than it saves.
        eager = torch.compiler.set_stance("force_eager")
        sharded = is_sharded(self.model)
        reading = state_values(self.model, self.with_values and not sharded)
        of_model = generation_config_of(self.model, config), batch_state_reset(self.model)
        with torch.no_grad(), eager, of_model[0], of_model[1], reading as values:
            output = self.model.generate(
                input_ids=prompt_ids,
                attention_mask=prompt_mask.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([choice]),
                stopping_criteria=StoppingCriteriaList([] if stops is None else [stops]),
                synced_gpus=sharded,
                **({} if past is None else {CACHE: past}),
            )
        sequences = output.sequences if keep else output
        ids = sequences[:, prompt_ids.shape[1] :]
        completions = completions_from(
            ids,
            torch.stack(choice.logprobs, dim=1),
            self.config.eos_token_id,
            torch.stack(values, dim=1) if values else None,
            torch.tensor(limits, device=ids.device),
            None if stops is None else torch.tensor(stops.ends, device=ids.device),
        )
        if not keep:
            return completions, None
        mask = torch.cat([prompt_mask, completions.mask], dim=1)
        return completions, KeyValues.of(output[CACHE], sequences, mask)


def row_uniforms(seeds: list[int], width: int) -> Tensor:
    """Return (B, T) float64 numbers in [0, 1), each row from its own seed."""
    return torch.stack(
        [
            torch.rand(width, generator=torch.Generator().manual_seed(stream_seed(seed)), dtype=torch.float64)
            for seed in seeds
        ]
    )


@contextmanager
def state_values(model: ActorCritic, wanted: bool) -> Iterator[list[Tensor]]:
    """Collect the shared critic's (B,) values of the last position in each forward pass of the actor, if `wanted`.

    A hook on the output head computes them, because some architectures do not call their whole trunk to generate.
    """
    values: list[Tensor] = []
    if not wanted:
        yield values
        return

    def read(head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values.append(model.critic.value_head(inputs[0][:, -1]))

    hook = model.causal_lm.get_output_embeddings().register_forward_pre_hook(read)
    try:
        yield values
    finally:
        hook.remove()


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
    """Reset the tensors that modules keep from a batch beside its key-values, such as `rope_deltas`, after the block.

    They have one row per row of that batch, and the next pass may have others.
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
