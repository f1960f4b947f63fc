"""Samplers: from prompts to completions."""

from collections.abc import Callable

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from hfppo.config import PPOConfig
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.sampler import Completions, Sampler, completion_ids, completions_from, eos_token_ids
from hfppo.generation.stop_strings import StopStrings
from hfppo.models.actor_critic import ActorCritic

__all__ = [
    "Completions",
    "Sampler",
    "TransformersSampler",
    "completion_ids",
    "completions_from",
    "eos_token_ids",
    "make_sampler",
]


def make_sampler(
    model: ActorCritic,
    eos_ids: list[int],
    pad_id: int,
    args: PPOConfig,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Sampler:
    """Make the sampler that the configuration asks for; vLLM's modules are imported only where it is used.

    Args:
        tokenizer: finds the stop strings of `generation_kwargs`.
        on_progress: see `TransformersSampler`; vLLM does not call it.
    Raises:
        ImportError, ValueError, ServerError: vLLM is not there, or cannot serve the adapter.
    """
    eos_ids = [*eos_ids, *args.stop_token_ids]
    stops = StopStrings(tokenizer, tuple(args.stop_strings)) if args.stop_strings and tokenizer is not None else None
    if not args.use_vllm:
        # Beside the sampler's log-probs its values save a pass of the actor; bootstrapping needs one more of them.
        with_values = model.critic_is_shared and args.policy_mode == "bypass" and not args.bootstrap_truncated
        return TransformersSampler(
            model,
            eos_ids,
            pad_id,
            args.max_completion_length,
            args.temperature,
            args.local_rollout_forward_batch_size,
            with_values,
            stops,
            on_progress,
        )
    from hfppo.generation.vllm import ColocatedEngine, Engine, Sampling, VLLMSampler
    from hfppo.generation.vllm_server import ServerEngine

    sampling = Sampling(args.temperature, args.max_completion_length, eos_ids, stops)
    engine: Engine
    if args.vllm_mode == "server":
        engine = ServerEngine(model, args.vllm_server_base_url, args.vllm_server_timeout)
    else:
        engine = ColocatedEngine(model, args)
    return VLLMSampler(model, engine, accelerator, args.output_dir, pad_id, sampling)
