"""Sampling with vLLM: an engine in the training process, or a server (`vllm_server`).

vLLM loads the base itself and never changes it; before each rollout it is sent the adapter only.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import LoraConfig, PeftConfig
from transformers import set_seed

from hfppo.config import PPOConfig
from hfppo.generation.sampler import Sampler, Sampling
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.loading import positions_of
from hfppo.sample import Ids, Turn

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts for `max_lora_rank`
# Fields of LoraConfig that vLLM does not support: it rejects such an adapter, or ignores a part of it.
UNSERVED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "alora_invocation_tokens", "modules_to_save",
    "trainable_token_indices", "target_parameters", "layer_replication", "arrow_config", "kasa_config",
    "rank_pattern", "alpha_pattern",
)  # fmt: skip

# With these vLLM also finds stop strings in special tokens, and returns the token that completes one.
WITH_STOP_STRINGS = {"include_stop_str_in_output": True, "skip_special_tokens": False}

Sampled = tuple[list[int], list[float]]  # token ids, EOS included, and their log-probs


@dataclass(frozen=True)
class Adapter:
    """The policy's adapter, as vLLM loads it from a folder.

    Every sync uses a new name and a new number. For a known number vLLM keeps the old weights; for a known name it
    keeps the prefix cache computed with them.
    """

    name: str
    number: int
    folder: str


class Engine(Protocol):
    """Interface to vLLM, in this process or on a server."""

    shared: bool  # whether all processes use the same engine

    def load(self, adapter: Adapter, old: Adapter | None) -> None:
        """Load the new adapter and unload the old one. If processes share the engine, only one of them calls this."""

    def generate(self, prompts: list[list[int]], sampling: list[dict[str, object]], adapter: Adapter) -> list[Sampled]:
        """Return a completion for each prompt, in order.

        Args:
            sampling: fields of `vllm.SamplingParams` for each prompt, see `sampling_fields`.
        """

    def awake(self) -> AbstractContextManager[None]:
        """Keep the engine's weights and cache in memory inside the block; a server manages its own memory."""
        return nullcontext()


class VLLMSampler(Sampler):
    """Samples with vLLM from the actor's current adapter.

    Args:
        engine: vLLM, in this process or on a server.
        folder: adapters are written here for vLLM and removed when the run ends. A server on another machine must see
            this folder under the same path. With colocated engines each machine reads its own folder.
    """

    def __init__(self, model: ActorCritic, engine: Engine, accelerator: Accelerator, folder: str, sampling: Sampling):
        self.model, self.engine, self.accelerator, self.sampling = model, engine, accelerator, sampling
        self.keeps_policy = True  # of the adapter that `ready` publishes
        self._writes = accelerator.is_main_process if engine.shared else accelerator.is_local_main_process
        own = None
        if self._writes:
            os.makedirs(folder, exist_ok=True)
            # Trainer does not push files whose names begin with "_".
            self._own = tempfile.TemporaryDirectory(prefix="_vllm-", dir=folder)
            own = self._own.name
        # A process reads from the last writer up to itself: launchers number the processes machine by machine.
        # Two runs have different names, because they may share a server.
        folders = [found for found in gather_object([own])[: accelerator.process_index + 1] if found is not None]
        self.folder = Path(folders[-1])
        self.adapter: Adapter | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `Sampler`."""
        with self.engine.awake():
            self._sync()
            yield

    def _sync(self) -> None:
        """Send the current adapter to the engine."""
        old = self.adapter
        number = 1 if old is None else old.number + 1
        folder = self.folder.absolute() / f"policy-{number}"
        new = Adapter(f"{self.folder.name}-{number}", number, str(folder))
        weights = self.model.weights_to_save()
        if self._writes:
            self.model.save_adapter(new.folder, weights)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process or not self.engine.shared:
            self.engine.load(new, old)
        self.accelerator.wait_for_everyone()
        if self._writes and old is not None:
            shutil.rmtree(old.folder)
        self.adapter = new

    def __call__(self, prompts: list[Ids], seeds: list[int] | None, budgets: list[int] | None = None) -> list[Turn]:
        """See `Sampler`."""
        assert self.adapter is not None, "call it inside `ready`"
        nothing = [None] * len(prompts)
        own = zip(seeds or nothing, budgets or nothing, strict=True)
        fields = [sampling_fields(self.sampling, seed, budget) for seed, budget in own]
        sampled = self.engine.generate(prompts, fields, self.adapter)
        stops, eos_ids = self.sampling.stops, self.sampling.eos_ids
        return [Turn.up_to_end(ids, logprobs, eos_ids, stops.end(ids) if stops else 0) for ids, logprobs in sampled]


def sampling_fields(sampling: Sampling, seed: int | None, budget: int | None = None) -> dict[str, object]:
    """Return fields of `vllm.SamplingParams`, which have the same names in requests to a server.

    They are complete, so that no default of vLLM or of the model's generation config applies.

    Args:
        seed: the completion's seed; None: greedy.
        budget: the maximum number of tokens of the completion; None: `max_tokens`.
    """
    return {
        "temperature": 0.0 if seed is None else sampling.temperature,
        "seed": seed,
        "max_tokens": sampling.max_tokens if budget is None else budget,
        "stop_token_ids": sampling.eos_ids,
        "ignore_eos": True,  # only `stop_token_ids` end a completion
        "logprobs": 0,  # the sampled token only
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **({} if sampling.stops is None else {"stop": list(sampling.stops.strings), **WITH_STOP_STRINGS}),
    }


class ColocatedEngine(Engine):
    """A `vllm.LLM` in each training process.

    Raises:
        ValueError: vLLM cannot serve the base or the adapter, or the engine needs several GPUs.
    """

    shared = False

    def __init__(self, model: ActorCritic, args: PPOConfig):
        options = engine_options(model)
        engine_kwargs = cast(dict[str, Any], args.vllm_engine_kwargs or {})
        for name, size in engine_kwargs.items():
            if name.endswith("_parallel_size") and size > 1:
                raise ValueError(
                    f"vllm_engine_kwargs={engine_kwargs!r}: a colocated engine has only its training process's "
                    f"GPU, and the process is one of {args.world_size}; leave {name} out, or set vllm_mode='server'"
                )
        # In a separate process the engine does not see settings of the training process, such as the device.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm
        from vllm.lora.request import LoRARequest

        self._sleeps = engine_kwargs.get("enable_sleep_mode", False)
        self._params, self._tokens, self._lora = vllm.SamplingParams, vllm.TokensPrompt, LoRARequest
        if args.world_size > 1:  # without this, the engine of every process uses the first GPU
            options["distributed_executor_backend"] = "external_launcher"
        options |= {"gpu_memory_utilization": 0.3, "seed": args.seed, **most_tokens(model, args), **engine_kwargs}
        threads = torch.get_num_threads()
        self.llm = vllm.LLM(**options)
        set_seed(args.seed)  # vLLM has reseeded the training process, and left it a single thread
        torch.set_num_threads(threads)

    def load(self, adapter: Adapter, old: Adapter | None) -> None:
        """Do nothing: `generate` names the adapter, and vLLM evicts the least recently used one."""

    def generate(self, prompts: list[list[int]], sampling: list[dict[str, object]], adapter: Adapter) -> list[Sampled]:
        """See `Engine`."""
        outputs = self.llm.generate(
            [self._tokens(prompt_token_ids=ids) for ids in prompts],
            [self._params(**fields, detokenize="stop" in fields) for fields in sampling],
            lora_request=self._lora(adapter.name, adapter.number, adapter.folder),
            use_tqdm=False,
        )
        completions = [output.outputs[0] for output in outputs]
        return [
            (list(c.token_ids), [entry[token].logprob for entry, token in zip(c.logprobs, c.token_ids, strict=True)])
            for c in completions
        ]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """See `Engine`."""
        if self._sleeps:
            self.llm.wake_up()
        try:
            yield
        finally:
            if self._sleeps:
                self.llm.sleep(level=1)  # moves the base to CPU memory and drops the cache


def engine_options(model: ActorCritic) -> dict[str, Any]:
    """Return the options that vLLM must be started with, here or as a server, by the names of its Python arguments.

    Raises:
        ValueError: vLLM cannot serve the adapter, or load the base.
    """
    adapter, base = model.peft_config["default"], model.causal_lm.config.name_or_path
    options = {
        "model": base,
        "revision": adapter.revision,
        "enable_lora": True,
        "max_lora_rank": start_rank(adapter),
        "max_loras": 1,
        "logprobs_mode": "processed_logprobs",  # after temperature, as in every other forward
        "generation_config": "vllm",
        "dtype": str(model.dtype).removeprefix("torch."),  # by default vLLM loads a float32 model in bfloat16
    }
    if not base:
        raise ValueError(
            "use_vllm=True needs a base that vLLM can load too, but the model has no id or path; save it with "
            "save_pretrained and give that folder as model"
        )
    if model.is_resized:
        raise ValueError(
            f"use_vllm=True: vLLM would load the base from {base!r}, whose vocabulary has another size than the "
            "model's; save the resized base and its tokenizer with save_pretrained, and give that folder as model"
        )
    return options


def most_tokens(model: ActorCritic, args: PPOConfig) -> dict[str, int]:
    """Return vLLM's `max_model_len`; empty where prompts may have any length.

    By default vLLM reserves cache for a sequence of the base's full length, for which the GPU may be too small.
    """
    if args.max_prompt_length is None:
        return {}
    longest = args.max_prompt_length + args.max_completion_length
    positions, _ = positions_of(model.causal_lm)
    return {"max_model_len": longest if positions is None else min(longest, positions)}


def start_rank(peft_config: PeftConfig) -> int:
    """Return the `max_lora_rank` to start vLLM with: the smallest allowed value, at least the adapter's rank.

    Raises:
        ValueError: vLLM cannot serve the adapter.
    """
    if not isinstance(peft_config, LoraConfig):
        name = type(peft_config).__name__
        raise ValueError(f"use_vllm=True serves LoRA, not {name}; use peft.LoraConfig, or set use_vllm=False")
    for field in UNSERVED:
        if value := getattr(peft_config, field, None):
            raise ValueError(
                f"vLLM cannot serve an adapter with {field}={value!r}; leave it out of peft_config, or set "
                "use_vllm=False"
            )
    if peft_config.r > RANKS[-1]:
        raise ValueError(f"vLLM serves ranks up to {RANKS[-1]}, the adapter has r={peft_config.r}; lower it")
    return next(possible for possible in RANKS if possible >= peft_config.r)
