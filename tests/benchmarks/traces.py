"""What TokenTraceCallback costs: its share of the processor time of the arithmetic run.

    PYTHONPATH=recipes/arithmetic python tests/benchmarks/traces.py --every 10

The time inside the callback is compared with that of `train`, both as processor time of this process, so that what
else the machine does is not counted.
"""

import argparse
import functools
import tempfile
import time
from pathlib import Path

import torch
from arithmetic import FOLDER, right_answer
from datasets import load_dataset
from peft import LoraConfig

from hfppo import PPOConfig, PPOTrainer, TokenTraceCallback

EVENTS = ("on_train_begin", "on_rollout_end", "on_update_end", "on_train_end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=10, help="rollouts from one traced one to the next")
    parser.add_argument("--max_steps", type=int, default=160, help="optimiser steps, 4 per rollout")
    parser.add_argument("--prompt", action="store_true", help="trace a chosen prompt instead of the run's own rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder,
            max_steps=options.max_steps,
            per_device_train_batch_size=64,
            num_mini_batches=2,
            num_ppo_epochs=2,
            max_completion_length=12,
            learning_rate=1e-3,
            kl_coef=0.02,
            vf_coef=1.0,
            cliprange_value=None,
            local_rollout_forward_batch_size=128,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = PPOTrainer(
            model=str(FOLDER / "base"),
            reward_funcs=right_answer,
            args=args,
            train_dataset=load_dataset("json", data_files=str(FOLDER / "train.jsonl"))["train"],
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        chosen = (
            {"trainer": trainer, "prompts": ["请问1+1=2？"], "answer": ["是的，等于2！"]} if options.prompt else {}
        )
        callback, spent = TokenTraceCallback(every=options.every, **chosen), []
        for event in EVENTS:
            setattr(callback, event, timed(getattr(callback, event), spent))
        trainer.add_callback(callback)
        start = time.process_time()
        trainer.train()
        total = time.process_time() - start
        traced = len(list(Path(folder).glob("_traces/*.jsonl")))
        size = sum(path.stat().st_size for path in Path(folder).glob("_traces/*"))
    share = sum(spent) / total
    print(f"{traced} traced rollouts, {size / 1024:.0f} KiB: {sum(spent):.3f} s of {total:.1f} s, {share:.2%}")


def timed(method, spent: list[float]):
    """The method, noting the processor seconds of each call."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        start = time.process_time()
        method(*args, **kwargs)
        spent.append(time.process_time() - start)

    return wrapper


if __name__ == "__main__":
    main()
