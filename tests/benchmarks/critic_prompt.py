"""How much of the outcome a critic explains that reads the answer, beside a critic that reads the prompt only.

    PYTHONPATH=recipes/arithmetic python tests/benchmarks/critic_prompt.py --seeds 0 1 2
    … --settings "{learning_rate: 0.0, critic_learning_rate: 5.0e-3, lam_critic: 1.0, …}"      # the policy stays

Runs recipes/arithmetic, plain and with the answer in `critic_prompt`. Prints Markdown: the explained variance by
thirds of the completions' tokens, 1 − Σ Var(R − V)/Σ Var(R) over rollouts, with R the sum of all later rewards.
"""

import argparse
import tempfile
from itertools import product
from pathlib import Path

import arithmetic
import torch
import yaml
from datasets import load_dataset
from peft import LoraConfig

from hfppo import PPOCallback, PPOConfig, PPOTrainer

CRITICS = {
    "prompt": lambda row: {},
    "answer, prompt": lambda row: {"critic_prompt": row["answer"] + row["prompt"]},
    "prompt, answer": lambda row: {"critic_prompt": row["prompt"] + row["answer"]},
}


class Explained(PPOCallback):
    """Keeps, of each rollout, Var(R − V) and Var(R) over all tokens and over each third, and the mean score."""

    def __init__(self) -> None:
        self.variances: list[torch.Tensor] = []  # (2, 4) each
        self.scores: list[float] = []

    def on_rollout_end(self, args, state, control, *, rollout, **kwargs):
        outcomes, mask = rollout.rewards.flip(1).cumsum(dim=1).flip(1), rollout.mask
        third = 3 * (mask.cumsum(dim=1) - 1) // mask.sum(dim=1, keepdim=True)
        masks = [mask, *(mask & (third == n) for n in range(3))]
        found = [[x[m].var() for m in masks] for x in (outcomes - rollout.values, outcomes)]
        self.variances.append(torch.tensor(found))
        self.scores.append(float(rollout.scores.mean()))


def train(critic: str, seed: int, settings: dict) -> Explained:
    folder, explained = Path(arithmetic.__file__).parent, Explained()
    recipe = yaml.safe_load((folder / "arithmetic.yaml").read_text())
    lora = LoraConfig(r=recipe.pop("lora_r"), lora_alpha=recipe.pop("lora_alpha"), target_modules="all-linear")
    own = {"output_dir": tempfile.mkdtemp(), "seed": seed, "save_strategy": "no", "disable_tqdm": True}
    PPOTrainer(
        model=str(folder / "base"),
        reward_funcs=arithmetic.right_answer,
        args=PPOConfig(**{**recipe, **own, **settings}),
        train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train").map(CRITICS[critic]),
        peft_config=lora,
        callbacks=[explained],
    ).train()
    return explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--critics", choices=CRITICS, nargs="+", default=CRITICS)
    parser.add_argument("--settings", type=yaml.safe_load, default={}, help="of PPOConfig, as YAML")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| critic reads | seed | rollouts | all | first | second | last third | score |\n|{'---|' * 8}", flush=True)
    for seed, critic in product(options.seeds, options.critics):
        found = train(critic, seed, options.settings)
        for part in torch.arange(len(found.scores)).tensor_split(2):
            of_error, of_outcome = sum(found.variances[i] for i in part)
            numbers = [*(1 - of_error / of_outcome).tolist(), sum(found.scores[i] for i in part) / len(part)]
            row = [critic, seed, f"{part[0] + 1} to {part[-1] + 1}", *(f"{x:.2f}" for x in numbers)]
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
