"""TRL's GRPOTrainer on the game of `orchard.py`, with the settings of hfppo's runs.

TRL's environments are read through tool calls. This game is read as text, so it is played by a `rollout_func`, which
samples one token a turn with the key-values of earlier turns, and masks the environment's words out of the loss.
"""

import time
from typing import Any

import numpy as np
import torch
from agent_game import OPTIMUM, PROMPT, RULES, Orchard, regret
from datasets import Dataset
from estimators_trl import SAME
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer


@torch.no_grad()
def play_games(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, games: list[Orchard], first: list[str]
) -> dict[str, Any]:
    """Play games to their end, and return what GRPOTrainer wants of a `rollout_func`.

    Args:
        games: environments after `reset`.
        first: their first observations.
    """
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    rules = encode(RULES)
    cache = DynamicCache()
    model(torch.tensor([rules]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(games))
    attended = torch.ones(len(games), len(rules), dtype=torch.long)
    new = [encode(text) for text in first]
    prompts = [rules + ids for ids in new]
    completions: list[list[int]] = [[] for _ in games]
    masks: list[list[int]] = [[] for _ in games]
    totals, done = [0.0] * len(games), False
    while not done:  # all games have the same number of turns
        ids = pad_sequence([torch.tensor(x) for x in new], batch_first=True, padding_side="left")
        real = pad_sequence([torch.ones(len(x), dtype=torch.long) for x in new], batch_first=True, padding_side="left")
        attended = torch.cat([attended, real], dim=1)
        positions = (attended.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            ids,
            attention_mask=attended,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens = torch.multinomial(logits.float().softmax(-1), 1)[:, 0].tolist()
        for i, (game, token) in enumerate(zip(games, tokens, strict=True)):
            observation, reward, done, *_ = game.step(tokenizer.decode([token], skip_special_tokens=True))
            answer = [] if done else encode(observation)
            completions[i] += [token, *answer]
            masks[i] += [1] + [0] * len(answer)
            totals[i] += reward
            new[i] = [token, *answer]
    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": masks,
        "total": totals,
    }


def returns(total: list[float], **columns: Any) -> list[float]:
    """Return the sum of each game's rewards: TRL knows no rewards of turns."""
    return total


def make_trl_trainer(
    settings: dict[str, Any],
    model: str,
    processing_class: PreTrainedTokenizerBase,
    peft_config: LoraConfig,
    points: list[dict[str, Any]],
) -> GRPOTrainer:
    """Return the trainer.

    Args:
        points: gets an entry for each rollout, as from `orchard.Probe`.
    """
    mini_batches, epochs = settings["num_mini_batches"], settings["num_ppo_epochs"]
    rollout = settings["per_device_train_batch_size"] * mini_batches
    clock = time.process_time()

    def rollout_func(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        nonlocal clock
        seconds, clock = time.process_time() - clock, time.process_time()
        games = [Orchard() for _ in prompts]
        seeds = np.random.SeedSequence([settings["seed"], len(points)]).generate_state(2 * len(games)).tolist()
        groups = range(0, len(games), settings["num_generations"])
        starts = [seed for seed in seeds[: len(groups)] for _ in range(settings["num_generations"])]
        first = [
            game.reset(seed=start, episode_seed=luck)
            for game, start, luck in zip(games, starts, seeds[len(games) :], strict=True)
        ]
        played = play_games(trainer.accelerator.unwrap_model(trainer.model), processing_class, games, first)
        texts = processing_class.batch_decode(played["completion_ids"], skip_special_tokens=True)
        points.append(
            {
                "expected_return": OPTIMUM - float(np.mean([regret(text) for text in texts])),
                "reward": float(np.mean(played["total"])),
                "explained_variance": None,
                "cpu_seconds": seconds,
            }
        )
        print(points[-1], flush=True)
        return played

    args = GRPOConfig(
        **{name: settings[name] for name in SAME},
        lr_scheduler_type=settings.get("lr_scheduler_type", "linear"),  # the default of both trainers
        steps_per_generation=mini_batches,
        num_iterations=epochs,
        max_steps=settings["total_episodes"] // rollout * mini_batches * epochs,
        beta=0.0,
        logging_steps=mini_batches * epochs,
        bf16=False,
        gradient_checkpointing=False,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=returns,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * settings["total_episodes"]}),
        processing_class=processing_class,
        peft_config=peft_config,
        rollout_func=rollout_func,
    )
