"""A character tokenizer, tiny models and trainers for all tests; nothing is downloaded."""

import json
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests/hub_runs.py has a Hub of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed

from hfppo import PlotCallback, PPOConfig, PPOTrainer

torch.set_num_threads(1)

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}？{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}，{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = character_tokenizer()
    made.chat_template = CHAT_TEMPLATE
    return made


def tiny_model(seed: int = 0, **config) -> LlamaForCausalLM:
    """Two layers, random weights that are large enough for a distribution with some shape."""
    set_seed(seed)
    defaults = {
        "vocab_size": 26,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **config}))


def ragged_model() -> LlamaForCausalLM:
    """One whose completions often end early, so that several processes hold completions of other lengths."""
    made = tiny_model(seed=1)
    made.generation_config.eos_token_id = list(range(1, 8))
    return made


@pytest.fixture
def picture() -> None:
    """Let the runs of a test draw their curves."""


@pytest.fixture(autouse=True)
def no_picture(monkeypatch, request):
    """Without `picture`, draw no curves at the end of a run: that takes longer than most runs here."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr(PlotCallback, "on_train_end", TrainerCallback.on_train_end)


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """Return the entries of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def dataset() -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"请问{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(3, 7)]
    )


def count_digits(completions, **kwargs) -> list[float]:
    """A reward that a few steps can raise: the share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


SMALL = {
    "per_device_train_batch_size": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "max_steps": 8,
    "seed": 3,
}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture
def make_trainer(tmp_path: Path, tokenizer, dataset):
    """Build a small trainer; keyword arguments of PPOTrainer, and `config` for PPOConfig's fields."""

    def make(config: dict | None = None, **kwargs) -> PPOTrainer:
        args = PPOConfig(**{"output_dir": str(tmp_path / "out"), **SMALL, **(config or {})})
        defaults = {
            "model": None,
            "reward_funcs": count_digits,
            "train_dataset": dataset,
            "processing_class": tokenizer,
            "peft_config": LORA,
        }
        merged = {**defaults, **kwargs}
        if merged["model"] is None:
            merged["model"] = tiny_model()
        return PPOTrainer(args=args, **merged)

    return make


def untimed_logs(trainer) -> list[dict[str, float]]:
    """What was logged, without times and Trainer's summary of the run."""
    return [
        {name: x for name, x in log.items() if not name.startswith(("time/", "train_"))}
        for log in trainer.state.log_history
    ]


def trained_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trainable weights by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright; for tests marked `browser`."""
    playwright = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Any]]:
    """Open an HTML file; takes the options of Playwright's `new_context`.

    At the end of the test, fails if a page has asked for anything but itself or has reported an error.
    """
    requests: list[str] = []
    errors: list[str] = []
    contexts = []

    def opened(path: Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, "locale": "en-US", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5_000)
        page.on("request", lambda request: requests.append(request.url) if request.url != path.as_uri() else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert requests == []
    assert errors == []
