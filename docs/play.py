"""Put two completions of the arithmetic run into docs/play.html, the page that computes their update again.

    python docs/play.py

It trains as recipes/arithmetic/arithmetic.yaml says, with seed 0, until the seventh rollout is used.
`TokenTraceCallback` records the log-probs of actor, reference and updated actor, and the values.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import yaml
from datasets import load_dataset

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "play.html"
ROLLOUT = 7
PROMPTS = {"请问1+1=2？": "是的，等于2！", "请问29+7=26？": "不对，等于36！"}

sys.path.insert(0, str(ROOT / "recipes/arithmetic"))
from arithmetic import FOLDER, right_answer  # noqa: E402

from hfppo import PPOCallback, PPOConfig, PPOTrainer, TokenTraceCallback  # noqa: E402


class StopAfter(PPOCallback):
    """Ends the training when a rollout has been used."""

    def on_update_end(self, args, state, control, *, model, rollout, ppo_state, **kwargs):
        control.should_training_stop = ppo_state.rollouts == ROLLOUT


def record(folder: str) -> list[dict]:
    """Train up to the rollout, and return the traces of the prompts."""
    settings = yaml.safe_load((ROOT / "recipes/arithmetic/arithmetic.yaml").read_text())
    fields = {name: value for name, value in settings.items() if not name.startswith("lora_")}
    args = PPOConfig(**{**fields, "output_dir": folder, "save_strategy": "no", "use_cpu": True})
    train = load_dataset("json", data_files=str(FOLDER / "train.jsonl"), split="train")
    trainer = PPOTrainer(str(FOLDER / "base"), right_answer, args, train)
    traces = TokenTraceCallback(ROLLOUT - 1, trainer=trainer, prompts=list(PROMPTS), answer=list(PROMPTS.values()))
    trainer.add_callback(traces)
    trainer.add_callback(StopAfter())
    trainer.train()
    lines = (Path(folder) / f"_traces/prompts-{ROLLOUT:06}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    """Write the data into the page."""
    columns = ("token", "logprob", "ref_logprob", "new_logprob", "value")
    with tempfile.TemporaryDirectory() as folder:
        traces = record(folder)
    found = [
        {"prompt": t["prompt"], "score": t["score"], **{name: t["columns"][name] for name in columns}} for t in traces
    ]
    data = json.dumps(found, ensure_ascii=False).replace("<", "\\u003c")
    page = re.sub(r"(?<=const completions = ).*?(?=;\n)", lambda _: data, PAGE.read_text(), count=1)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
