"""Credit from one conversation of an agent's game to the next, beside what others do with an episode of several.

    python tests/benchmarks/compaction.py --seeds 0 1 2      # a minute a run; a line of JSON each

The lake until the chest is found, played by an agent that forgets its history every few calls. A score of 1 or 0 comes
at the end. The state is in each observation, so no knowledge is lost.
"""

import argparse
import json
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor

from hfppo import PPOConfig, PPOTrainer
from hfppo import functional as F
from hfppo.collect import credit
from hfppo.functional.advantages import whitened

LAKE = Path(__file__).parents[2] / "recipes" / "lake"
sys.path.append(str(LAKE))
import lake_game as lake  # noqa: E402

TURNS, KEPT, EVALUATED = 32, 4, 256  # most calls of a game, calls of a conversation, games at the end
FOUND = f"{lake.FOUND_CHEST} "


def play(base_url: str, api_key: str, seed: int, episode_seed: int, **row) -> float:
    """Play a game, and return whether the chest was found."""
    game, messages = lake.Lake(TURNS), []
    seen = f"{lake.MOVED} {game.reset(seed, episode_seed)}"
    address = urlsplit(base_url)
    connection = HTTPConnection(address.hostname, address.port)
    for turn in range(TURNS):
        messages = [*(messages if turn % KEPT else []), {"role": "user", "content": seen}]
        body, headers = json.dumps({"messages": messages}), {"Authorization": f"Bearer {api_key}"}
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        messages.append(json.load(connection.getresponse())["choices"][0]["message"])
        seen = game.step(messages[-1]["content"] or "")[0]
        if seen.startswith(FOUND):
            return 1.0
    return 0.0


def alone(score: Tensor, values: Tensor, mask: Tensor, conversation: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """GAE within each conversation, as if the score, (E,), stood at its end. All tensors have sampled tokens first."""
    ends = torch.nn.functional.pad(conversation.diff() != 0, (0, 1)) & mask
    ends |= mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return F.gae(score[:, None] * ends, values, mask, gamma=1.0 - ends.double(), lam=lam)


@whitened
def copied(rewards: Tensor, values: Tensor, mask: Tensor, conversation: Tensor, lam: float):
    """Each conversation is an episode of its own with the score of all."""
    return alone(rewards.sum(dim=1), values, mask, conversation, lam)


@whitened
def factor(rewards: Tensor, values: Tensor, mask: Tensor, conversation: Tensor, lam: float):
    """CompactionRL's advantages: those of `copied`, times λ to the number of tokens in later conversations."""
    advantages, returns = copied(rewards, values, mask, conversation, lam)
    later = (mask[:, None, :] & (conversation[:, None, :] > conversation[:, :, None])).sum(dim=2)
    return advantages * lam**later, returns


def chance(best: bool) -> float:
    """Return the probability of finding the chest, by the best policy or by uniform play."""
    values = np.zeros(len(lake.STATES))
    starts = lake.start_distribution()
    for _ in range(TURNS):
        table = np.zeros((len(lake.STATES), len(lake.MOVES)))
        for s, state in enumerate(lake.STATES):
            for a, move in enumerate(lake.MOVES):
                for p, step in lake.directions(move):
                    word, _, after = lake.slide(state, step)
                    later = starts @ values if after is None else values[lake.STATES.index(after)]
                    table[s, a] += p * (1.0 if word == lake.FOUND_CHEST else later)
        values = table.max(axis=1) if best else table.mean(axis=1)
    return float(starts @ values)


def run(method: str, lam: float, lam_critic: float | None, seed: int, rollouts: int, rate: float) -> dict:
    """Train once, and return what was measured."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder, max_steps=8 * rollouts, per_device_train_batch_size=8, num_mini_batches=4,
            num_ppo_epochs=2, max_completion_length=64, max_turn_length=2, learning_rate=rate, lam=lam, kl_coef=0.0,
            critic_learning_rate=rate, lam_critic=lam_critic, vf_coef=1.0, advantage_estimator=method, seed=seed,
            per_device_eval_batch_size=64, local_rollout_forward_batch_size=256, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = PPOTrainer(
            model=str(LAKE / "base"),
            agent=play,
            args=args,
            train_dataset=Dataset.from_dict({"game": [0]}),
            eval_dataset=Dataset.from_dict({"game": list(range(EVALUATED))}),
            peft_config=LoraConfig(r=16, lora_alpha=32),
        )
        trainer.train()
        with trainer.eval_sampling(True):
            found = trainer.evaluate()
    curve = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    used = {"after": found["eval_reward"], "conversations": found["eval_agent/conversations"]}
    return {"method": method, "lam": lam, "seed": seed, **used, "seconds": time.process_time() - start, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=["gae", "copied", "factor"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lam", type=float, default=0.95)
    parser.add_argument("--lam_critic", type=float)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = credit.settings_of_estimators
    credit.settings_of_estimators = lambda sequences, args: {
        **settings(sequences, args),
        "conversation": sequences.conversation,
    }
    F.ADVANTAGE_ESTIMATORS.update(copied=copied, factor=factor)
    print(f"uniform {chance(False):.3f}, best {chance(True):.3f}", flush=True)
    for seed in given.seeds:
        for method in given.methods:
            print(json.dumps(run(method, given.lam, given.lam_critic, seed, given.rollouts, given.rate)), flush=True)


if __name__ == "__main__":
    main()
