"""Recipes with and without a critic on tasks with known values, at equal completions and at equal compute, with seeds.

    python tests/benchmarks/critic_bench.py                  # all runs that docs/notes/critic_bench.jsonl lacks
    python tests/benchmarks/critic_bench.py --tasks delayed --methods "PPO 1" --seeds 1
    python tests/benchmarks/critic_bench.py --quick          # one row of docs/which_critic.md, again
    python tests/benchmarks/critic_bench.py --report         # the table and the figure of that page

A run appends one line to the file. Seed 0 chose the learning rates; seeds 1 to 5 are reported.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, product
from statistics import mean, stdev
from typing import Any, NamedTuple

import pandas
import torch
import yaml
from critic_tasks import REPOSITORY, TASKS, build_base, datasets
from peft import LoraConfig
from transformers import PrinterCallback

from hfppo import PPOCallback, PPOConfig, PPOTrainer
from hfppo import functional as F

RESULTS = REPOSITORY / "docs" / "notes" / "critic_bench.jsonl"
HEADS = REPOSITORY / "docs" / "notes" / "critic_heads.jsonl"
FIGURE = REPOSITORY / "docs" / "images" / "which_critic.svg"
BASES = REPOSITORY / "out" / "critic_bench"
EXPLAINED = "ev", "ev_first", "ev_middle", "ev_last"
PARTS = 10  # of a run, whose means are kept

RECIPES = {x.stem: yaml.safe_load(x.read_text()) for x in (REPOSITORY / "recipes" / "critics").glob("*.yaml")}
WARMUP = {"critic_warmup": 10}  # in percent of the rollouts; the papers have 10 and 15 rollouts of many more
GROUPS = {"num_generations": 8}
DR_GRPO = {"advantage_estimator": "grpo", "scale_rewards": "none", "loss_reduction": "seq-mean-token-sum-norm"}

# Fields of PPOConfig by method. All take log π_old from the sampler, have no KL, and for the critic a learning rate of
# three times the actor's, or of `critic_rate` times.
METHODS: dict[str, dict[str, Any]] = {
    "PPO .95": {"lam": 0.95},
    "PPO 1": {"lam": 1.0},
    "PPO .9": {"lam": 0.9},  # the lake's λ
    "BPCO": {**RECIPES["bpco"], **WARMUP},
    "PACT": RECIPES["pact"],
    "SAO": {**RECIPES["sao"], **WARMUP},
    "Dr. GRPO": {**DR_GRPO, **GROUPS},
    "RLOO": {"advantage_estimator": "rloo", **GROUPS},
    "REINFORCE++": {"advantage_estimator": "reinforce_plus_plus"},
    "PACT without ratio": {**RECIPES["pact"], "critic_update": "after_actor"},
    "VAPO": {"lam_alpha": 0.05, "lam_critic": 1.0, "cliprange_high": 0.28, **WARMUP},
    "BPCO + answer": {**RECIPES["bpco"], **WARMUP},
    # As many operations as a method with a critic has for half of the completions.
    "Dr. GRPO, twice": {**DR_GRPO, **GROUPS, "total_episodes": 5120},
    "REINFORCE++, twice": {"advantage_estimator": "reinforce_plus_plus", "total_episodes": 5120},
    # One part of the recipes alone.
    "PPO, α 1.5": {"lam_alpha": 1.5},
    "PPO 1, bounded": {"lam": 1.0, "value_range": [0.0, 1.0]},
    "PPO 1, dppo": {"lam": 1.0, "policy_loss": "dppo"},
    "PPO 1, dis": {"lam": 1.0, "policy_loss": "dis", "cliprange": 0.3, "cliprange_high": 5.0},
    "PPO 1, two critic epochs": {"lam": 1.0, "num_critic_epochs": 2},
    "PPO 1, no attention": {"lam": 1.0},
    "PPO, α 0.4": {"lam_alpha": 0.4},
    "PPO .95, critic's 1": {"lam": 0.95, "lam_critic": 1.0},
    "PPO 1, raw": {"lam": 1.0, "whiten_advantages": False},
    "PPO 1, KL": {"lam": 1.0, "kl_coef": 0.05},
}
for n in (1, 10):
    METHODS[f"PPO 1, bounded, critic's rate × {n}"] = {**METHODS["PPO 1, bounded"], "critic_rate": n}
for name, n in product(["PACT", "PACT without ratio"], [1, 8, 32]):
    METHODS[f"{name}, steps × {n}"] = {**METHODS[name], "num_mini_batches": n, "per_device_train_batch_size": 64 // n}
LORA = {"r": 16, "lora_alpha": 32}
MLP = ["gate_proj", "up_proj", "down_proj"]
NO_ATTENTION = {"SAO": MLP, "PPO 1, no attention": MLP}  # the layers that a critic adapts, if not all

# Methods without runs of seed 0 take the rate of another: "PPO 1, …" that of "PPO 1", and these:
LIKE = {"PACT without ratio": "PACT", "VAPO": "PPO .95", "BPCO + answer": "BPCO", "RLOO": "Dr. GRPO"}
LIKE |= dict.fromkeys(["PPO, α 1.5", "PPO, α 0.4"], "PPO 1")
BASELINE = "REINFORCE++"  # which the report compares the others with
CLAIMS = [("PPO 1", "PPO .95"), ("BPCO", "PPO 1"), ("PACT", "PPO 1"), ("SAO", "PPO 1"), ("SAO", "PPO .9")]
CLAIMS += [("PPO 1", "PPO .9"), ("VAPO", "PPO .95"), ("VAPO", "PPO 1"), ("Dr. GRPO", "PPO 1"), ("RLOO", "Dr. GRPO")]
CLAIMS += [("BPCO + answer", "BPCO"), ("PACT", "PACT without ratio"), ("PPO, α 1.5", "PPO 1"), ("PPO, α 0.4", "PPO 1")]
CLAIMS += [("REINFORCE++, twice", "PPO 1"), ("REINFORCE++, twice", "PACT"), ("Dr. GRPO, twice", "PPO 1")]
CLAIMS += [(name, whole) for name in METHODS if (whole := name.split(",")[0]) in METHODS and whole != name]
# On the page, in the order of the colors.
SHOWN = ["PPO .95", "PPO 1", "PPO .9", "BPCO", "PACT", "SAO", "Dr. GRPO", "REINFORCE++", "REINFORCE++, twice"]
TINY = ["sums", "chain", "delayed"]
QUICK = "sums", "REINFORCE++"


class Key(NamedTuple):
    """What a run is known by."""

    task: str
    method: str
    seed: int
    rate: float = 1.0  # multiplies the task's learning rate
    staleness: int = 0  # rollouts by which the sampler's policy is older


def operations(args: PPOConfig, sizes: tuple[int, int], tokens: dict[str, int], rollouts: int) -> float:
    """Return the operations of a run: 2 per weight and token forward, as much again for a frozen weight's backward.

    Args:
        sizes: weights of the trunk without embeddings, and of the output head.
        tokens: "prompt", "critic_prompt", "completion" and of these "sampled" of the whole run; a prompt counts per
            completion.
        rollouts: their number, warm-up included.
    """
    actor, critic = (2 * sizes[0] * (tokens[p] + tokens["completion"]) for p in ("prompt", "critic_prompt"))
    actor += 2 * sizes[1] * tokens["sampled"]
    has_critic, steps = args.advantage_estimator == "gae", 1 - args.critic_warmup / rollouts
    passes = 1 + (args.policy_mode != "bypass") + 2 * args.num_ppo_epochs * steps
    passes += args.critic_update == "policy_aligned"
    critic_passes = 1 + 2 * (args.num_critic_epochs or args.num_ppo_epochs)
    return passes * actor + has_critic * critic_passes * critic


class Measure(PPOCallback):
    """Keeps numbers of each rollout by name."""

    def __init__(self, exact: Any, bounded: bool):
        self.exact, self.bounded = exact, bounded
        self.tokens = dict.fromkeys(("prompt", "critic_prompt", "completion", "sampled"), 0)
        self.found: dict[str, list[float]] = defaultdict(list)

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, **kwargs):
        mask = rollout.mask
        self.tokens["prompt"] += int(rollout.prompt_mask.sum())
        self.tokens["critic_prompt"] += int(rollout.read_by_critic[1].sum())
        self.tokens["completion"] += int(rollout.real.sum())
        self.tokens["sampled"] += int(mask.sum())
        numbers = {"reward": float(rollout.scores.mean()), "advantage_max": float(rollout.advantages.abs().max())}
        parts = {x: f"value/explained_variance{x.removeprefix('ev')}" for x in EXPLAINED}
        numbers |= {name: metrics[key] for name, key in parts.items() if key in metrics}
        if rollout.values is not None and self.bounded:
            outside = (rollout.values < -1e-4) | (rollout.values > 1 + 1e-4)
            numbers["outside"] = float(outside[mask].float().mean())
        if rollout.values is not None:
            numbers["ev_of_returns"] = F.explained_variance(rollout.values, rollout.returns, mask)
        if rollout.values is not None and self.exact is not None:
            texts = [f"{p}{c}" for p, c in zip(transcript.prompts, transcript.completions, strict=True)]
            exact, where = self.exact(rollout, texts)
            numbers["v_error"] = float((rollout.values - exact)[where].square().mean())
            numbers["v_var"] = float(exact[where].var())
        for name, x in numbers.items():
            self.found[name].append(x)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, key in (("kl", "policy/approx_kl"), ("clipped", "policy/clip_frac")):
            if logs and key in logs:
                self.found[name].append(logs[key])

    def summary(self) -> dict[str, list[float]]:
        """Return the means of `PARTS` parts of the run; a NaN is left out."""
        pieces = {name: torch.tensor(x).tensor_split(PARTS) for name, x in self.found.items()}
        return {name: [float(f"{x.nanmean():.4g}") for x in parts] for name, parts in pieces.items()}


class StaleSampler:
    """Samples with the actor's adapter of `age` rollouts ago, or the first one."""

    def __init__(self, sampler: Any, model: Any, age: int):
        self.sampler, self.model, self.fresh = sampler, model, False
        self.past: deque[list[torch.Tensor]] = deque(maxlen=age + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.sampler(*args, **kwargs)

    @contextmanager
    def ready(self) -> Iterator[None]:
        parameters = self.model.actor_parameters()
        now = [p.detach().clone() for p in parameters]
        if not self.fresh:
            self.past.append(now)
            put(parameters, self.past[0])
        try:
            with self.sampler.ready():
                yield
        finally:
            put(parameters, now)


@torch.no_grad()
def put(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


class BenchTrainer(PPOTrainer):
    """A trainer whose sampler may be old."""

    age = 0

    def create_sampler(self, eos_ids):
        return StaleSampler(super().create_sampler(eos_ids), self.model, self.age)

    def accuracy(self) -> dict[str, float]:
        self.collector.sampler.fresh, found = True, {}
        for name in ("sampled", "greedy"):
            with self.eval_sampling(name == "sampled"):
                found[name] = round(self.evaluate()["eval_reward"], 4)
        return found


def base_of(name: str) -> str:
    if TASKS[name].draw is None:
        return str(TASKS[name].base)
    if not (BASES / name / "config.json").exists():
        build_base(TASKS[name], BASES / name)
    return str(BASES / name)


def config_of(key: Key, folder: str) -> PPOConfig:
    """Return the run's settings."""
    fields = {**TASKS[key.task].fields, "policy_mode": "bypass", "kl_coef": 0.0, **METHODS[key.method]}
    rate, size = fields["learning_rate"] * key.rate, fields["per_device_train_batch_size"] * fields["num_mini_batches"]
    of_critic = fields.pop("critic_rate", 3) * rate
    fields["critic_warmup"] = fields.get("critic_warmup", 0) * fields["total_episodes"] // size // 100
    own = {"output_dir": folder, "seed": key.seed, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return PPOConfig(**{**fields, "learning_rate": rate, "critic_learning_rate": of_critic, **own})


def run(key: Key) -> dict[str, Any]:
    """Train once, and return the line of the run."""
    task, layers = TASKS[key.task], NO_ATTENTION.get(key.method)
    train, test = datasets(task, with_answer="answer" in key.method)
    measure = Measure(task.exact, bounded=task.score is not None)
    with tempfile.TemporaryDirectory() as folder:
        args = config_of(key, folder)
        trainer_type = type("Trainer", (BenchTrainer,), {"age": key.staleness})
        trainer = trainer_type(
            model=base_of(key.task),
            reward_funcs=task.score,
            environment_factory=task.environment,
            args=args,
            train_dataset=train,
            eval_dataset=test,
            peft_config=LoraConfig(**LORA, target_modules="all-linear"),
            critic_peft_config=LoraConfig(**LORA, target_modules=layers) if layers else None,
            callbacks=[measure],
        )
        trainer.remove_callback(PrinterCallback)
        sizes = sizes_of(trainer.model.causal_lm)
        before = trainer.accuracy()
        trainer.collector.sampler.fresh, began = False, time.process_time()
        trainer.train()
        seconds = time.process_time() - began
        rollouts = len(measure.found["reward"])
        return {
            **key._asdict(),
            "completions": rollouts * args.rollout_size_per_process,
            "tokens": measure.tokens["sampled"],
            "operations": float(f"{operations(args, sizes, measure.tokens, rollouts):.4g}"),
            "seconds": round(seconds, 1),
            "before": before,
            "after": trainer.accuracy(),
            **measure.summary(),
        }


def sizes_of(model: torch.nn.Module) -> tuple[int, int]:
    """Return the weights of the layers' matrices, and of the output head."""
    matrices = [x for x in model.named_parameters() if x[1].ndim == 2 and ".layers." in x[0] and "lora_" not in x[0]]
    return sum(p.numel() for _, p in matrices), model.config.hidden_size * model.config.vocab_size


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def key_of(line: dict[str, Any]) -> Key:
    return Key(*(line[name] for name in Key._fields))


def chosen_rate(lines: list[dict[str, Any]], task: str, method: str) -> float:
    """Return the rate whose run with seed 0 had the highest mean score in its second half; 1 without such runs."""
    whole = LIKE.get(method, method.split(",")[0])
    chosen = task, LIKE.get(whole, whole), 0
    found = {x["rate"]: sum(x["reward"][PARTS // 2 :]) for x in lines if key_of(x)[:3] == chosen}
    return max(found, key=lambda rate: (found[rate], rate == 1)) if found else 1.0


def p_value(a: list[float], b: list[float]) -> float:
    """Return the share of all ways to divide the numbers whose means differ at least as much: a permutation test."""
    total, observed = sum(a) + sum(b), abs(mean(a) - mean(b))
    parts = [sum(chosen) for chosen in combinations([*a, *b], len(a))]
    return mean(abs(x / len(a) - (total - x) / len(b)) >= observed - 1e-12 for x in parts)


def with_error(numbers: list[float], digits: int = 3) -> str:
    """Return mean and standard error."""
    error = f" ± {stdev(numbers) / len(numbers) ** 0.5:.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{error}"


def reported(lines: list[dict[str, Any]], staleness: int = 0) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the runs of each task and method with seeds from 1 on, at the rate that seed 0 chose."""
    found = defaultdict(list)
    for x in lines:
        if x["seed"] and x["staleness"] == staleness and x["rate"] == chosen_rate(lines, x["task"], x["method"]):
            found[x["task"], x["method"]].append(x)
    return found


def score_at(line: dict[str, Any], budget: float) -> float:
    """Return the mean score of the part of the run in which it reaches so many operations, or of its last part."""
    return line["reward"][min(int(budget / line["operations"] * PARTS), PARTS - 1)]


def report(lines: list[dict[str, Any]]) -> str:
    """Return the table, in Markdown."""
    runs = reported(lines)
    head = ["task", "method", "rate", "seeds", "sampled", "p", "greedy", "at equal compute", "operations, 1e11"]
    head += ["processor s", "EV of thirds", "outside", "error to V"]
    rows = [head]
    for task in TASKS:
        ours = {method: runs[task, method] for method in METHODS if runs[task, method]}
        budget = min((x["operations"] for found in ours.values() for x in found), default=0.0)
        against = [x["after"]["sampled"] for x in ours.get(BASELINE, [])]
        rows += [row_of(task, method, found, budget, against) for method, found in ours.items()]
    return table(rows)


def table(rows: list[list[str]]) -> str:
    """Return rows of cells in Markdown; the first is the header."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([lines[0], f"|{'---|' * len(rows[0])}\n", *lines[1:]])


def claims(lines: list[dict[str, Any]]) -> str:
    """Return the differences of `CLAIMS` in the share right after the run, with their permutation tests."""
    rows = [["task", "staleness", "first − second", "difference", "p"]]
    for staleness in sorted({x["staleness"] for x in lines}):
        runs = reported(lines, staleness)
        for task, pair in product(TASKS, CLAIMS):
            a, b = ([x["after"]["sampled"] for x in runs[task, method]] for method in pair)
            if a and b:
                difference = f"{mean(a) - mean(b):+.3f}"
                rows.append([task, f"{staleness}", " − ".join(pair), difference, f"{p_value(a, b):.3f}"])
    return table(rows)


def short_report(lines: list[dict[str, Any]]) -> str:
    """Return the page's two tables, of tiny and of larger tasks, with the methods of `SHOWN`."""
    cells = {tuple(x.strip("| ").split(" | ")[:2]): x.strip("| ").split(" | ") for x in report(lines).splitlines()}
    tables = []
    for tasks in (TINY, [x for x in TASKS if x not in TINY]):
        rows = [["method", *(f"{task}, {x}" for task in tasks for x in ("end (p)", "equal compute"))]]
        for method in SHOWN:
            found = [cells.get((task, method)) for task in tasks]
            if any(found):
                rows.append([method, *(cell for x in found for cell in short_cells(x or ["–"] * 8))])
        tables.append(table(rows))
    return "\n".join(tables)


def short_cells(row: list[str]) -> tuple[str, str]:
    """Return the end of a row of the report, with its p in brackets, and its score at equal compute."""
    sampled, p, equal = (row[column].replace(" ", "") for column in (4, 5, 7))
    return sampled if p == "–" else f"{sampled} ({p})", equal


def row_of(task: str, method: str, found: list[dict[str, Any]], budget: float, against: list[float]) -> list[str]:
    """Return the cells of a method's row."""

    def whole(name: str) -> str:
        return f"{mean(mean(x[name]) for x in found):.2g}" if name in found[0] else "–"

    sampled = [x["after"]["sampled"] for x in found]
    p = "–" if method == BASELINE or not against else f"{p_value(sampled, against):.3f}"
    cells = [task, method, f"{found[0]['rate']:g}", f"{len(found)}", with_error(sampled), p]
    cells += [with_error([x["after"]["greedy"] for x in found]), with_error([score_at(x, budget) for x in found])]
    cells += [f"{mean(x['operations'] for x in found) / 1e11:.1f}", f"{mean(x['seconds'] for x in found):.0f}"]
    return [*cells, " ".join(map(whole, EXPLAINED[1:])), whole("outside"), whole("v_error")]


def draw(lines: list[dict[str, Any]]) -> None:
    """Draw the scores by operations, a panel per task, and the errors of the heads."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "critics"  # the same file each time
    from matplotlib import pyplot

    runs = reported(lines)
    figure, grid = pyplot.subplots(2, 4, figsize=(16, 8))
    *panels, of_heads, legend = list(grid.flat)
    for task, panel in zip(TASKS, panels, strict=True):
        for color, method in enumerate(SHOWN):
            if found := runs[task, method]:
                step = mean(x["operations"] for x in found) / PARTS
                scores = [mean(x["reward"][part] for x in found) for part in range(PARTS)]
                style = f"C{color % 10}{'--' if METHODS[method].get('advantage_estimator') else '-'}"
                panel.plot([step * (n + 1) for n in range(PARTS)], scores, style, label=method)
        panel.set(title=task, xlabel="operations", ylabel="mean score of sampled completions")
    names = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    legend.legend(names.values(), names.keys(), loc="center")
    legend.axis("off")
    heads = pandas.read_json(HEADS, lines=True).query("start == 'package'")
    heads.pivot_table("error", "rate", "head").plot(ax=of_heads, loglog=True, style="o-")
    of_heads.set(title="heads", xlabel="learning rate, 1e-3", ylabel="mean squared error to V")
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=[*TASKS])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0], help="times the task's; 0: chosen by seed 0")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0], help="rollouts")
    parser.add_argument("--quick", action="store_true", help="print one row again, beside the recorded one")
    parser.add_argument("--report", action="store_true", help="print the table, and draw the figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.report:
        print(short_report(read()), report(read()), claims(read()), sep="\n")
        draw(read())
        return
    if options.quick:
        again = [run(Key(*QUICK, seed, chosen_rate(read(), *QUICK))) for seed in options.seeds]
        print(report([x for x in read() if key_of(x)[:2] == QUICK]), report(again), sep="\n")
        return
    for task, seed, rate, age, method in product(
        options.tasks, options.seeds, options.rates, options.staleness, options.methods
    ):
        key = Key(task, method, seed, rate or chosen_rate(read(), task, method), age)
        if key in map(key_of, read()):
            continue
        line = run(key)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(time.strftime("%H:%M"), *key, line["before"], line["after"], line["seconds"], flush=True)


if __name__ == "__main__":
    main()
