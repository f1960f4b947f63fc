"""Run by test_processes.py under torchrun: two processes are given different inputs; writes what each says as JSON."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from datasets import Dataset
from peft import get_peft_model

from helpers.processes import freeze_imports
from helpers.runs import count_digits, small_trainer
from helpers.tiny import LORA, tiny_model
from hfppo import PPOTrainer

freeze_imports()
OUT, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
DATASET = Dataset.from_list(ROWS)
OTHER_LABEL = Dataset.from_list([{**row, "answer": "?"} if row["prompt"] == "2+1=" else row for row in ROWS])


def make(config: dict | None = None, **kwargs) -> PPOTrainer:
    given = {"train_dataset": DATASET, "eval_dataset": DATASET, **kwargs}
    return small_trainer(OUT / "same", {"max_steps": 2, **(config or {})}, **given)


def own(first, second):
    """The value of this process."""
    return second if RANK else first


def other_base():
    made = tiny_model()
    with torch.no_grad():
        made.model.layers[0].mlp.down_proj.weight *= own(1.0, 1.05)
    return made


def adapter(trained: float):
    """Drawn by each process for itself, and trained by one of them."""
    made = get_peft_model(tiny_model(), LORA)
    torch.manual_seed(RANK)
    for name, parameter in made.named_parameters():
        if "lora_A" in name:
            torch.nn.init.normal_(parameter)
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, own(0.0, trained))
    return made


def other_reward(completions, **kwargs):
    return count_digits(completions)


UNLIKE = {
    "order": lambda: make(train_dataset=DATASET.shuffle(seed=RANK)),
    "length": lambda: make(train_dataset=DATASET.select(range(own(16, 8)))),
    "label": lambda: make(train_dataset=own(DATASET, OTHER_LABEL)),
    "columns": lambda: make(train_dataset=own(DATASET, DATASET.rename_column("answer", "label"))),
    "evaluation": lambda: make(eval_dataset={"easy": DATASET, "hard": own(DATASET, OTHER_LABEL)}),
    "names": lambda: make(eval_dataset={"easy": DATASET, own("hard", "harder"): DATASET}),
    "number": lambda: make(eval_dataset=own({"easy": DATASET, "hard": DATASET}, {"easy": DATASET})),
    "stream": lambda: make(
        {"max_prompt_length": 9}, train_dataset=DATASET.select(range(RANK, 16)).to_iterable_dataset()
    ),
    "setting": lambda: make({"learning_rate": own(1e-3, 1e-4)}),
    "saves": lambda: make({"save_strategy": own("no", "steps")}),
    "base": lambda: make(model=other_base()),
    "adapter": lambda: make(model=adapter(trained=0.1), peft_config=None),
    "reward": lambda: make(reward_funcs=own(count_digits, other_reward)),
    "versions": lambda: make(),
    "evaluate": lambda: TRAINER.evaluate(own(DATASET, OTHER_LABEL)),
    "evaluate another": lambda: TRAINER.evaluate(own(OTHER_LABEL, OTHER_LABEL.select(range(8)))),
    "rollout": lambda: TRAINER.rollout(["1+1=", "2+2="][: own(2, 1)]),
}
ALIKE = {
    "own folder": lambda: make({"output_dir": str(OUT / str(RANK)), "disable_tqdm": bool(RANK)}),
    "untrained adapter": lambda: make(model=adapter(trained=0.0), peft_config=None),
    "own prompts": lambda: TRAINER.rollout([f"{RANK}+1=", f"{RANK}+2="]),
    "other dataset": lambda: TRAINER.evaluate(OTHER_LABEL),
}
said = {}
TRAINER = make()
for name, attempt in {**UNLIKE, **ALIKE}.items():
    found = {"torch": f"2.{own(13, 14)}"} if name == "versions" else {}
    with mock.patch("hfppo.checks.processes.installed_versions", lambda found=found: found):
        try:
            attempt()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
(OUT / f"result_{RANK}.json").write_text(json.dumps(said))
