"""Samplers: from prompts to completions."""

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from hfppo.config import PPOConfig
from hfppo.generation.generate import Progress, SnapshotSampler, TransformersSampler
from hfppo.generation.sampler import Sampler, Sampling
from hfppo.generation.stop_strings import StopStrings
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.adapter_switch import ACTOR


def configured_sampling(args: PPOConfig, tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> Sampling:
    """Return the settings of a run.

    Args:
        eos_ids: tokens that end a completion; the configuration may add some.
    """
    stops = StopStrings(tokenizer, tuple(args.stop_strings)) if args.stop_strings else None
    ends = [*eos_ids, *args.stop_token_ids]
    return Sampling(args.temperature, args.max_completion_length, ends, tokenizer.pad_token_id, stops)


def make_sampler(
    model: ActorCritic, args: PPOConfig, accelerator: Accelerator, sampling: Sampling, on_progress: Progress
) -> Sampler:
    """Return the sampler that the configuration asks for. vLLM's modules are imported only where it is used.

    Args:
        on_progress: see `TransformersSampler`; vLLM does not call it.
    Raises:
        ImportError, ValueError, ServerError: vLLM is not installed, or cannot serve the adapter.
    """
    if not args.use_vllm:
        return TransformersSampler(model, sampling, args.local_rollout_forward_batch_size, on_progress)
    from hfppo.generation.vllm import ColocatedEngine, VLLMSampler
    from hfppo.generation.vllm_server import ServerEngine

    engine = (ServerEngine if args.vllm_mode == "server" else ColocatedEngine)(model, args)
    return VLLMSampler(model, engine, accelerator, args.output_dir, sampling)


def keeping_policy(sampler: Sampler) -> Sampler:
    """Return a sampler that keeps its policy within `ready`, while another thread trains.

    Raises:
        ValueError: the sampler cannot do that.
    """
    if sampler.keeps_policy:
        return sampler
    if type(sampler) is TransformersSampler:
        if parameters := getattr(sampler.model.peft_config[ACTOR], "target_parameters", None):
            raise ValueError(
                f"rollouts_ahead=1 samples in a second thread, but PEFT adapts target_parameters={sorted(parameters)} "
                "through a cache that all threads share; set rollouts_ahead=0, or adapt modules only"
            )
        return SnapshotSampler(sampler)
    raise ValueError(
        f"rollouts_ahead=1 samples while the actor is trained, and {type(sampler).__name__} may read the weights that "
        "change; copy them in `ready` and set its attribute keeps_policy=True, or set rollouts_ahead=0"
    )
