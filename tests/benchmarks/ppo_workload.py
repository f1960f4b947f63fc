"""The work that the GPU kit measures, and how it is timed; `ppo_hfppo` does it."""

import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

SCORING = AutoModelForSequenceClassification


@dataclass(frozen=True)
class Workload:
    """One rollout and its updates: `prompts` completions of `new_tokens` tokens, in `mini_batches` per epoch."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    prompts: int
    shortest_prompt: int
    longest_prompt: int
    new_tokens: int
    micro_batch: int
    epochs: int = 2
    mini_batches: int = 1
    rank: int = 16
    dtype: str = "float32"
    tied: bool = False
    checkpointing: bool = False  # of activations

    def shape(self) -> dict[str, Any]:
        """The fields of a model's configuration."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        own = {name: getattr(self, name) for name in (*names, "num_key_value_heads")}
        length = self.longest_prompt + self.new_tokens
        special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return {**own, **special, "max_position_embeddings": length + 8, "tie_word_embeddings": self.tied}

    @property
    def steps(self) -> int:
        """Optimizer steps of a rollout."""
        return self.epochs * self.mini_batches


LLAMA = {"architecture": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "shortest_prompt": 8, "longest_prompt": 24}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "vocab_size": 512, "prompts": 8, "new_tokens": 8, "micro_batch": 4}
QWEN = {"architecture": "qwen2", "vocab_size": 151_936, "dtype": "bfloat16", "tied": True, "checkpointing": True}
QWEN |= {"prompts": 256, "shortest_prompt": 256, "longest_prompt": 1024, "new_tokens": 512, "micro_batch": 8}


def qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Workload:
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return Workload(**{**QWEN, **shape, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more})


WORKLOADS = {
    "tiny": Workload(**{**LLAMA, **TINY}),  # shows that a benchmark runs
    # For a GPU. Not run yet.
    "qwen2.5-0.5b": qwen(896, 4864, 24, 14, 2, checkpointing=False),
    "qwen2.5-1.5b": qwen(1536, 8960, 28, 12, 2),
    "qwen2.5-7b": qwen(3584, 18_944, 28, 28, 4, tied=False, vocab_size=152_064, prompts=8, micro_batch=2),
}


def training_device() -> torch.device:
    """Return accelerate's device."""
    return PartialState().device


def drawing_device() -> torch.device:
    """Return where to draw random weights: a GPU draws billions of numbers in a moment."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write_models(workload: Workload, folder: Path, names: tuple[str, ...] = ("policy", "reward")) -> None:
    """Write models with random weights."""
    shape = {**workload.shape(), "dtype": workload.dtype}
    set_seed(0)
    for name in names:
        kind, more = (AutoModelForCausalLM, {}) if name == "policy" else (SCORING, {"num_labels": 1})
        with drawing_device():
            model = kind.from_config(AutoConfig.for_model(workload.architecture, **shape, **more))
        model.save_pretrained(folder / name)


def load(workload: Workload, folder: Path, name: str, quantized: bool, **options: Any) -> PreTrainedModel:
    """Load one of the models that `write_models` wrote; a quantized policy is made in memory.

    Args:
        options: of `from_pretrained`.
    """
    if quantized and name == "policy":
        return random_nf4(workload, **options)
    kind = AutoModelForCausalLM if name == "policy" else SCORING
    return kind.from_pretrained(folder / name, **{"dtype": "auto", **options}).to(training_device())


def random_nf4(workload: Workload, **options: Any) -> PreTrainedModel:
    """Return a policy in NF4 with the random weights of one layer in all layers.

    In memory the weights of a single layer suffice, and nothing is written: 7B parameters would be 15 GB.
    """
    shape = {**workload.shape(), "dtype": workload.dtype}
    set_seed(0)
    config = AutoConfig.for_model(workload.architecture, **shape)
    first = AutoConfig.for_model(workload.architecture, **{**shape, "num_hidden_layers": 1})
    with drawing_device():
        one = AutoModelForCausalLM.from_config(first)
    weights = {}
    for name, tensor in one.state_dict().items():
        for layer in range(workload.num_hidden_layers if ".layers.0." in name else 1):
            weights[name.replace(".layers.0.", f".layers.{layer}.")] = tensor
    dtype = getattr(torch, workload.dtype)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    made = {"config": config, "state_dict": weights, "quantization_config": nf4, "device_map": training_device()}
    return type(one).from_pretrained(None, **made, **options)  # the Auto class wants a name


def distinct_characters(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that costs nothing."""
    return [len(set(text)) / max(1, len(text)) for text in completions]


def tokenizer_for(workload: Workload) -> PreTrainedTokenizerFast:
    """One token per character. EOS lies beyond the model's vocabulary: it is never sampled."""
    characters = [chr(0x10000 + n) for n in range(workload.vocab_size)]
    vocabulary = {token: index for index, token in enumerate([*characters, "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=characters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=characters[0], eos_token="</s>", padding_side="left"
    )


def prompts_for(workload: Workload) -> list[list[int]]:
    """The token ids of the prompts, the same for every rollout."""
    generator = torch.Generator().manual_seed(0)
    longest = workload.longest_prompt + 1
    lengths = torch.randint(workload.shortest_prompt, longest, (workload.prompts,), generator=generator).tolist()
    return [torch.randint(1, workload.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def adapter_for(workload: Workload) -> LoraConfig:
    return LoraConfig(r=workload.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def common_config(workload: Workload, rollouts: int, folder: Path) -> dict[str, Any]:
    """Fields of PPOConfig that follow from the workload."""
    return {
        "output_dir": tempfile.mkdtemp(dir=folder),
        "per_device_train_batch_size": workload.micro_batch,
        "gradient_accumulation_steps": workload.prompts // (workload.micro_batch * workload.mini_batches),
        "num_mini_batches": workload.mini_batches,
        "num_ppo_epochs": workload.epochs,
        "total_episodes": rollouts * workload.prompts,
        "local_rollout_forward_batch_size": min(64, workload.prompts),
        "temperature": 1.0,
        "learning_rate": 1e-5,
        "kl_coef": 0.05,
        "bf16": workload.dtype == "bfloat16",
        "gradient_checkpointing": workload.checkpointing,
        "use_cpu": training_device().type == "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class Stopwatch:
    """Seconds by phase; an inner phase stops the clock of the outer one, so that phases add up to all the time."""

    def __init__(self) -> None:
        self.names = ["rest"]
        self.restart()

    def restart(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.since = time.perf_counter()

    def note(self) -> None:
        """Give the time since the last call to the phase in progress."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.names[-1]] += now - self.since
        self.since = now

    @contextmanager
    def phase(self, name: str):
        self.note()
        self.names.append(name)
        try:
            yield
        finally:
            self.note()
            self.names.pop()

    def rename(self, name: str) -> None:
        """From here on, the phase in progress is another."""
        self.note()
        self.names[-1] = name

    def timed(self, function: Callable, name: str | Callable[..., str]) -> Callable:
        """The function as a phase; its name may depend on the arguments."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(*args, **kwargs)):
                return function(*args, **kwargs)

        return run


class Clock(TrainerCallback):
    """Notes the time at the end of each rollout's last update."""

    def __init__(self, watch: Stopwatch, steps_per_rollout: int):
        self.watch, self.steps_per_rollout = watch, steps_per_rollout
        self.seconds: list[dict[str, float]] = []  # by phase, of each rollout
        self.tokens: list[int] = []  # of completions

    def on_train_begin(self, args, state, control, **kwargs):
        self.watch.restart()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.steps_per_rollout == 0:
            self.watch.note()
            self.seconds.append(dict(self.watch.seconds))
            self.watch.restart()

    def measured(self) -> dict[str, Any]:
        """Return what was measured; the first rollout warms up."""
        return {"seconds": self.seconds[1:], "tokens": self.tokens[1:], "peak": peak_bytes()}


def peak_bytes() -> int:
    """Of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
