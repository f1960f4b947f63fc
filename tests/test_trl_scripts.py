"""Scripts written for TRL's GRPOTrainer, as its documentation has them: they run here with two changes."""

import copy

import pytest
import torch
from datasets import Dataset

from helpers.agents import VOCAB_SIZE, calling_tokenizer
from helpers.tiny import LORA, tiny_model

# TRL's configuration still passes transformers' old name on.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

PLAIN = '''
from trl import GRPOConfig, GRPOTrainer

def digits(completions, **kwargs):
    """Reward completions with many digits."""
    return [float(sum(c.isdigit() for c in completion)) for completion in completions]

def near_length(completions, **kwargs):
    return [-abs(8 - len(completion)) / 8 for completion in completions]

training_args = GRPOConfig(
    output_dir=out,
    learning_rate=1e-4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=8,
    steps_per_generation=4,
    num_iterations=2,
    beta=0.04,
    epsilon=0.2,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    reward_weights=[1.0, 0.5],
    temperature=0.9,
    top_p=1.0,
    mask_truncated_completions=False,
    num_train_epochs=1,
    max_steps=4,
    logging_steps=1,
    bf16=False,
    use_cpu=True,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=[digits, near_length],
    args=training_args,
    train_dataset=Dataset.from_dict({"prompt": ["go 1 ", "go 2 ", "go 3 ", "go 4 "]}),
    processing_class=tokenizer,
    peft_config=peft_config,
)
trainer.train()
'''

WITH_TOOLS = '''
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b

async def negate(a: int) -> int:
    """
    Negates an integer.

    Args:
        a: The integer.
    """
    return -a

def right(completions, answer, **kwargs):
    return [float(str(x) in c[-1]["content"]) + 0.1 * len(c) for c, x in zip(completions, answer)]

rows = [{"prompt": [{"role": "user", "content": f"{n}*3?"}], "answer": 3 * n} for n in range(4)]
training_args = GRPOConfig(
    output_dir=out,
    per_device_train_batch_size=4,
    num_generations=2,
    max_completion_length=60,
    max_tool_calling_iterations=2,
    chat_template_kwargs={"enable_thinking": False},
    loss_type="grpo",
    shuffle_dataset=True,
    log_completions=True,
    num_completions_to_print=1,
    max_steps=2,
    bf16=False,
    use_cpu=True,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model,
    args=training_args,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    reward_funcs=right,
    tools=[multiply, negate],
    peft_config=peft_config,
)
trainer.train()
'''

WITH_AN_ENVIRONMENT = '''
from trl import GRPOConfig, GRPOTrainer

class Counter:
    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.count, self.done = start, False
        return f"count {start}"

    def increment(self, by: int) -> str:
        """
        Adds to the counter.

        Args:
            by: How much to add.

        Returns:
            The new value.
        """
        if self.done:
            raise ValueError("The game is over.")
        self.count += by
        self.done = self.count > 9
        return str(self.count)

def reached(environments, **kwargs):
    return [float(environment.count) for environment in environments]

def brief(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]

rows = [{"prompt": [{"role": "user", "content": "go"}], "start": n} for n in range(4)]
trainer = GRPOTrainer(
    model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    reward_funcs=[reached, brief],
    environment_factory=Counter,
    peft_config=peft_config,
    args=GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=4,
        num_generations=4,
        generation_batch_size=8,
        gradient_accumulation_steps=2,
        max_completion_length=60,
        epsilon_high=5.0,
        loss_type="cispo",
        multi_objective_aggregation="normalize_then_sum",
        max_steps=2,
        bf16=False,
        use_cpu=True,
        report_to="none",
    ),
)
trainer.train()
'''


def run(script, out):
    """Run a script, and return its trainer."""
    base = tiny_model(vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    base.save_pretrained(out / "base")
    names = {"out": str(out / "run"), "model": str(out / "base"), "tokenizer": calling_tokenizer()}
    names |= {"Dataset": Dataset, "peft_config": copy.deepcopy(LORA)}
    exec(script, names)
    return names["trainer"]


def changed(script):
    """Return the script with hfppo's classes, and with the algorithm's name."""
    classes = "from hfppo import PPOConfig as GRPOConfig, PPOTrainer as GRPOTrainer"
    script = script.replace("from trl import GRPOConfig, GRPOTrainer", classes)
    return script.replace("GRPOConfig(\n", 'GRPOConfig(\n    advantage_estimator="grpo",\n')


SCRIPTS = {
    "plain": (
        PLAIN,
        {"num_mini_batches": 2, "num_ppo_epochs": 2, "kl_loss_coef": 0.04, "kl_coef": 0.0, "cliprange_high": 0.28},
    ),
    "tools": (WITH_TOOLS, {"loss_reduction": "seq-mean-token-mean", "num_completions_to_print": 1}),
    "environment": (WITH_AN_ENVIRONMENT, {"policy_loss": "cispo", "num_mini_batches": 1, "cliprange_high": 5.0}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_trl_runs_with_two_changes(tmp_path, name, caplog):
    script, fields = SCRIPTS[name]
    trainer = run(changed(script), tmp_path)
    assert {field: getattr(trainer.args, field) for field in fields} == fields
    assert len([text for text in caplog.messages if text.startswith("fields of TRL: ")]) == 1
    assert trainer.state.global_step == trainer.args.max_steps
    moved = [p.count_nonzero() for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert torch.stack(moved).sum() > 0
    assert trainer.model.critic is None


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_script_runs_in_trl(tmp_path, name):
    trainer = run(SCRIPTS[name][0].replace("bf16=False,", "bf16=False, gradient_checkpointing=False,"), tmp_path)
    assert trainer.state.global_step == trainer.args.max_steps
