"""recipes/ppo_in_one_file.py computes what PPOTrainer computes."""

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path

import ppo_in_one_file as one
import pytest
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn
from torch.testing import assert_close

from helpers.runs import Keep, logged
from helpers.tiny import tiny_gpt2, tiny_model
from hfppo import PPOTrainer, Rollout

# Prompts of several lengths. Two rollouts take more than there are, so that the second one begins a second epoch.
ROWS = [{"prompt": f"请问{a}+{b}=", "answer": ""} for a in (3, 14, 9, 27) for b in (1, 5, 26, 7, 98, 4, 30, 2, 6, 55)]
# These are no defaults. The clip of the ratio and that of the actor's gradient take effect, which the test asserts.
SETTINGS = one.Settings(
    seed=3,
    lora_rank=2,
    lora_alpha=4,
    num_rollouts=2,
    rollout_size=32,
    max_completion_length=16,
    mini_batch_size=16,
    learning_rate=1e-3,
    max_grad_norm=0.22,
    kl_coef=0.1,
    gamma=0.97,
    lam=0.9,
    cliprange=0.03,
    value_coef=0.02,
)
# The name of each column of the recipe's table in hfppo.Rollout.
COLUMNS = {
    "log π_old": "old_logprobs",
    "log π_ref": "ref_logprobs",
    "reward": "rewards",
    "value": "values",
    "return": "returns",
    "advantage": "advantages",
}


def number_of_digits(completions: list[str], **kwargs) -> list[float]:
    return [float(sum(character.isdigit() for character in text)) for text in completions]


def weights_of(*modules: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for module in modules for p in module.parameters() if p.requires_grad]


class Recorder(Keep):
    """Keeps the weights after the optimizer steps on each rollout as well."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_update_end(self, args, state, control, *, model, **kwargs):
        self.weights.append([p.detach().clone() for p in (*model.actor_parameters(), *model.critic_parameters())])


@pytest.fixture(params=[tiny_model, tiny_gpt2])
def folder(request, tmp_path, tokenizer, monkeypatch) -> Path:
    """A tiny base and its prompts where the recipe expects them, with a reward that this base can earn.

    GPT-2 has dropout, and absolute positions, with which padding must not count.
    """
    made = request.param(vocab_size=len(tokenizer), initializer_range=0.15)
    made.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(one, "right_answer", lambda completion, answer: number_of_digits([completion])[0])
    return tmp_path


@pytest.fixture
def trainer(make_trainer, folder) -> PPOTrainer:
    """A trainer with the recipe's settings."""
    s = SETTINGS
    alike = ("seed", "max_completion_length", "learning_rate", "max_grad_norm", "kl_coef", "gamma", "lam", "cliprange")
    config = {name: getattr(s, name) for name in alike} | {
        "max_steps": s.num_rollouts * s.num_epochs * s.rollout_size // s.mini_batch_size,
        "per_device_train_batch_size": s.mini_batch_size,
        "num_mini_batches": s.rollout_size // s.mini_batch_size,
        "num_ppo_epochs": s.num_epochs,
        "vf_coef": s.value_coef,
    }
    return make_trainer(
        config,
        model=str(folder / "base"),
        reward_funcs=number_of_digits,
        processing_class=None,
        train_dataset=Dataset.from_list(ROWS),
        peft_config=LoraConfig(r=s.lora_rank, lora_alpha=s.lora_alpha, target_modules="all-linear"),
    )


def assert_equal(own: Tensor, wanted: Tensor, what: str) -> None:
    """Assert that numbers differ by at most 1e-6, and those above 1 by a millionth of themselves more."""
    assert_close(own, wanted, rtol=1e-6, atol=1e-6, msg=lambda found: f"{what}: {found}")


def assert_same_rollout(own: one.Rollout, wanted: Rollout) -> None:
    """Assert that tokens are the same and numbers equal."""
    lengths = wanted.mask.sum(dim=1).tolist()
    assert own.mask_BS.sum(dim=1).tolist() == lengths
    assert len(set(lengths)) > 3
    assert own.ids_BL[:, 1:][own.mask_BS].tolist() == wanted.completion_ids[wanted.mask].tolist()
    assert_equal(own.scores_B, wanted.scores, "scores")
    for column, name in COLUMNS.items():
        assert_equal(own.tokens[column][own.mask_BS], getattr(wanted, name)[wanted.mask], name)


def test_it_computes_what_the_trainer_computes(trainer, folder):
    """Two rollouts: in the first one the actor is the reference and the critic is 0, in the second one no longer."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    assert sum(logged(trainer, "policy/clip_frac")) > 0
    assert max(logged(trainer, "grad_norm")) > SETTINGS.max_grad_norm > max(logged(trainer, "value/grad_norm"))
    losses = zip(logged(trainer, "policy/loss"), logged(trainer, "value/loss"), strict=True)

    s = replace(SETTINGS, folder=str(folder))
    tokenizer, actor, critic = one.load(s)
    rollouts = one.train(s, tokenizer, actor, critic, ROWS)
    recorded = zip(recorder.rollouts, recorder.transcripts, recorder.weights, strict=True)
    for own, (wanted, transcript, weights) in zip(rollouts, recorded, strict=True):
        assert own.completions == transcript.completions
        assert_same_rollout(own, wanted)
        for step, pair in enumerate(own.losses):
            assert_equal(Tensor(pair), Tensor(next(losses)), f"losses of step {step}")
        for own_weight, weight in zip(weights_of(actor, critic), weights, strict=True):
            assert_equal(own_weight, weight, "weights")
    assert next(losses, None) is None


def test_it_runs_by_itself(folder, monkeypatch, capsys):
    flags = ["--folder", str(folder), "--num_rollouts", "2", "--rollout_size", "8", "--mini_batch_size", "4"]
    monkeypatch.setattr(sys, "argv", ["ppo_in_one_file.py", *flags])
    one.main()
    printed = capsys.readouterr().out
    assert [printed.count(words) for words in ("greedy accuracy", "KL per token", "log π_old")] == [2, 2, 2]


def test_it_is_short_and_imports_only_torch_transformers_and_peft():
    source = Path(one.__file__).read_text()
    assert len(source.splitlines()) <= 300
    nodes = list(ast.walk(ast.parse(source)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in modules} - sys.stdlib_module_names == {"torch", "transformers", "peft"}
