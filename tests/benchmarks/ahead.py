"""How long a rollout and its update take with `rollouts_ahead=1`, beside the same without.

    PYTHONPATH=tests:recipes/arithmetic python tests/benchmarks/ahead.py [--sleep 0.6] [--rollouts 20]
    PYTHONPATH=tests:recipes/arithmetic VENV/bin/python tests/benchmarks/ahead.py --vllm [--sleep 0]

Trains the arithmetic recipe's base, one thread. An asynchronous reward waits for `--sleep` seconds, as for a server's
answer. `--vllm` samples on a vLLM server of one thread, in the environment of `tests/helpers/vllm_environment.sh`;
vLLM needs wider heads, so the base is then a random one of four layers. The bound is the longer of two sums: sampling
and rewards, and passes and update. Prints Markdown: medians of seconds over all rollouts but the first three.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from peft import LoraConfig

from helpers.tiny import tiny_model
from hfppo import PPOCallback, PPOConfig, PPOTrainer

SKIPPED = 3
BASE = Path(__file__).parents[2] / "recipes/arithmetic/base"
DATASET = Dataset.from_list([{"prompt": f"请问{a}+{b}="} for a in range(10) for b in range(10)])
PHASES = ("time/generation", "time/rewards", "time/passes", "time/update")


class Clock(PPOCallback):
    """Takes the time from rollout to rollout."""

    def __init__(self):
        self.times = []

    def on_rollout_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter())


def measure(ahead: int, options: argparse.Namespace, model: str, server: dict[str, object]) -> dict[str, float]:
    """Return the median seconds of phases, and of a whole rollout with its update."""

    async def reward(completions: list[str], **columns: object) -> list[float]:
        await asyncio.sleep(options.sleep)
        return [float(len(set(text))) for text in completions]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            folder, **server, rollouts_ahead=ahead, per_device_train_batch_size=32, num_mini_batches=4,
            max_completion_length=options.length, use_cpu=True, disable_tqdm=True, report_to="none",
            save_strategy="no",
        )  # fmt: skip
        args.max_steps = options.rollouts * args.updates_per_rollout
        lora = LoraConfig(r=16, target_modules="all-linear")
        trainer = PPOTrainer(
            model, reward, args, DATASET, processing_class=character_tokenizer(), peft_config=lora, callbacks=[clock]
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "time/rollout" in log][SKIPPED:]
    found = {name: statistics.median(log[name] for log in logs) for name in PHASES}
    between = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    return {**found, "whole": statistics.median(between[SKIPPED:])}


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        model, server = str(BASE), {}
        if options.vllm:
            from helpers.vllm_runs import Server
            from hfppo.generation.vllm_server import serve_command
            from hfppo.models.actor_critic import ActorCritic

            folder = stack.enter_context(tempfile.TemporaryDirectory())
            base = tiny_model(hidden_size=256, num_hidden_layers=4, max_position_embeddings=512)
            base.save_pretrained(folder)
            character_tokenizer().save_pretrained(folder)
            base.config._name_or_path = model = folder
            command = serve_command(ActorCritic(base, LoraConfig(r=16, target_modules="all-linear"), critic=None))
            os.environ["OMP_NUM_THREADS"] = "1"
            started = Server(command, Path(folder) / "log")
            stack.callback(started.kill)
            started.start()
            started.wait()
            server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": started.url}
        found = {ahead: measure(ahead, options, model, server) for ahead in (0, 1)}
    print(f"| rollouts_ahead | {' | '.join(PHASES)} | whole | whole / bound |")
    print("|---" * (len(PHASES) + 3) + "|")
    for ahead, seconds in found.items():
        sampling, rewards, passes, update, whole = seconds.values()
        bound = max(sampling + rewards, passes + update)
        print(f"| {ahead} | {' | '.join(f'{x:.2f}' for x in seconds.values())} | {whole / bound:.2f} |")
    print(f"\nA rollout ahead takes {found[1]['whole'] / found[0]['whole']:.2f} of the time.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", type=float, default=0.6, help="seconds that the reward waits")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--length", type=int, default=12, help="tokens of a completion, at most")
    parser.add_argument("--vllm", action="store_true", help="sample on a vLLM server")
    main(parser.parse_args())
