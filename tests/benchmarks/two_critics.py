"""Compare two critics on disjoint halves of the rows with one critic on all rows, on the same rollouts of PPO.

    python tests/benchmarks/two_critics.py --tasks lake sums --seeds 0 1 2
    python tests/benchmarks/two_critics.py --report

AsyPPO (arXiv:2510.01656) averages critics that learn from disjoint prompts. Here PPO runs once, and its rollouts are
kept. Then each critic reads the rollouts in their order: it predicts a rollout's values first, and learns from the
rollout afterwards, in as many steps as PPO's own critic. So a critic is judged by rows that it has not learned from.
Returns are the sums of later rewards, which depend on no critic. The sums are those of `candidates.py`, each prompt
once. The lake has one prompt, so its halves are halves of the games. The report also has PPO's own critic, which
learned λ-returns on the lake.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from candidates import CRITIC, BuildArguments, build_base, draw_rows, right_answer, split_pairs
from datasets import Dataset
from estimator_critics import sum_later_rewards
from estimator_tasks import TASKS, recipe_settings
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModel, HfArgumentParser, get_scheduler, set_seed

from hfppo import PPOCallback, PPOConfig, PPOTrainer, Rollout
from hfppo.models.critic import ValueHead

ROWS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
CRITICS = {"first": "all", "second": "all", "even": "even", "odd": "odd"}  # each, and the rows it learns from
FORMS = {  # each, and the critics whose mean it is
    "one critic": ("first",),
    "one critic, half of the rows": ("even",),
    "two critics, halves": ("even", "odd"),
    "two critics, all rows": ("first", "second"),
}
COMPLETIONS = {"lake": 3072, "sums": 3072}


@dataclass
class BenchmarkArguments:
    """Arguments of this script."""

    output_dir: str = field(default="out/two_critics", metadata={"help": "Folder of the results."})
    tasks: list[str] = field(default_factory=lambda: list(COMPLETIONS), metadata={"help": "Names in COMPLETIONS."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    report: bool = field(default=False, metadata={"help": "Print the results as a table instead of measuring."})


class Keeper(PPOCallback):
    """Keeps the rollouts of a run."""

    def __init__(self):
        self.rollouts: list[Rollout] = []

    def on_rollout_end(self, args, state, control, *, rollout, **kwargs):
        self.rollouts.append(rollout)


class LoraCritic(nn.Module):
    """A value head on a LoRA of the base, as hfppo's own but by itself."""

    def __init__(self, base: str, lora: LoraConfig):
        super().__init__()
        self.trunk = get_peft_model(AutoModel.from_pretrained(base), lora)
        self.head = ValueHead(self.trunk.config.hidden_size)

    def forward(self, rollout: Rollout) -> Tensor:
        """Return V(s_t), (B, T)."""
        mask = torch.cat([rollout.prompt_mask, rollout.real], dim=1).long()
        states = self.trunk(
            input_ids=torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        ).last_hidden_state
        return self.head(states[:, rollout.prompt_ids.shape[1] - 1 : -1])


def arguments_of(task: str, folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a task's recipe, its settings where they are not the recipe's, and the trainer's arguments."""
    if task == "lake":
        return "lake", {}, TASKS["lake"].arguments(1)
    pairs, _ = split_pairs(BuildArguments.largest, BuildArguments.held_out, BuildArguments.seed)
    base = folder / "base"
    if not base.exists():
        build_base(base, pairs)
    rows = list({row["prompt"]: row for row in draw_rows(pairs, 8192, seed=1)}.values())
    settings = CRITIC | {"per_device_train_batch_size": 32, "lr_scheduler_type": "constant"}
    given = {"model": str(base), "reward_funcs": right_answer, "train_dataset": Dataset.from_list(rows)}
    return "arithmetic", settings, given


def record(task: str, seed: int, folder: Path) -> tuple[PPOConfig, LoraConfig, str, list[Rollout]]:
    """Train once with PPO, and return its settings, its adapter's, its base and its rollouts."""
    name, settings, arguments = arguments_of(task, folder)
    config, lora = recipe_settings(name)
    config |= {
        "output_dir": str(folder / f"run_{task}_{seed}"),
        "total_episodes": COMPLETIONS[task],
        "seed": seed,
        **settings,
    }
    keeper, args = Keeper(), PPOConfig(**config)
    PPOTrainer(args=args, peft_config=lora, callbacks=[keeper], **arguments).train()
    return args, lora, arguments["model"], keeper.rollouts


def learn(critic: LoraCritic, rows: slice, config: PPOConfig, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Return a critic's values of each rollout, before it learns from some of the rollout's rows."""
    rate, steps = config.critic_learning_rate or config.learning_rate, config.updates_per_rollout
    parameters = [x for x in critic.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=config.weight_decay)
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, 0, steps * len(rollouts))
    found = []
    for number, rollout in enumerate(rollouts):
        with torch.no_grad():
            found.append(critic(rollout))
        own = rollout.select(torch.arange(len(rollout))[rows])
        for step in range(steps):
            epoch, index = divmod(step, config.num_mini_batches)
            batch = own.mini_batch(index, config.num_mini_batches, (config.seed, number, epoch))
            errors = (critic(batch) - sum_later_rewards(batch))[batch.mask]
            (errors.square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return found


def measure(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train once, and return the variances of each rollout's returns, and of each form's errors."""
    config, lora, base, rollouts = record(task, seed, folder)
    values = {}
    for number, (name, rows) in enumerate(CRITICS.items()):
        set_seed(1000 * seed + number)
        values[name] = learn(LoraCritic(base, lora), ROWS[rows], config, rollouts)

    forms = {
        form: [torch.stack(of).mean(dim=0) for of in zip(*(values[name] for name in names), strict=True)]
        for form, names in FORMS.items()
    }
    forms["PPO's own critic"] = [rollout.values for rollout in rollouts]
    returns = [sum_later_rewards(rollout)[rollout.mask] for rollout in rollouts]
    errors = {
        form: [float((r - v[rollout.mask]).var()) for v, r, rollout in zip(of, returns, rollouts, strict=True)]
        for form, of in forms.items()
    }
    return {"task": task, "seed": seed, "errors": errors, "returns": [float(r.var()) for r in returns]}


def explained(run: dict[str, Any], form: str) -> float:
    """Return 1 − ΣVar(R − V)/ΣVar(R) over the second half of a run's rollouts."""
    half = len(run["returns"]) // 2
    return 1 - sum(run["errors"][form][half:]) / sum(run["returns"][half:])


def report(runs: list[dict[str, Any]]) -> None:
    """Print the mean explained variance of the second half of the rollouts, and what each form gains on one critic."""
    runs = sorted(runs, key=lambda run: (run["task"], run["seed"]))
    print("| task | form | explained, by seed | mean | gain | its standard error |\n|---|---|---|---|---|---|")
    for task, group in groupby(runs, key=lambda run: run["task"]):
        some = list(group)
        late = {form: np.array([explained(run, form) for run in some]) for form in some[0]["errors"]}
        for form, means in late.items():
            gains = means - late["one critic"]
            error = f"{gains.std(ddof=1) / len(gains) ** 0.5:.3f}" if len(gains) > 1 else "–"
            by_seed = ", ".join(f"{x:.3f}" for x in means)
            print(f"| {task} | {form} | {by_seed} | {means.mean():.3f} | {gains.mean():.3f} | {error} |")


def main(args: BenchmarkArguments) -> None:
    torch.set_num_threads(1)  # more cost such small models more than they save
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if args.report:
        report([json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))])
        return
    for task, seed in product(args.tasks, args.seeds):
        file = folder / f"{task}_{seed}.json"
        if not file.exists():
            file.write_text(json.dumps(measure(task, seed, folder)))


if __name__ == "__main__":
    main(HfArgumentParser(BenchmarkArguments, allow_abbrev=False).parse_args_into_dataclasses()[0])
