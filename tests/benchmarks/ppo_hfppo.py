"""hfppo's side of `ppo.py`, which starts it."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from ppo_workload import (
    WORKLOADS,
    Clock,
    Stopwatch,
    adapter_for,
    common_config,
    load,
    prompts_for,
    report,
    tokenizer_for,
)

from hfppo import PPOConfig, PPOTrainer
from hfppo.callbacks.events import PPOCallback
from hfppo.generation import TransformersSampler
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import Critic
from hfppo.rewards.model import RewardModel


class RolloutClock(PPOCallback, Clock):
    """A clock that counts the completion tokens as well."""

    def on_rollout_end(self, args, state, control, rollout=None, **kwargs):
        self.tokens.append(int(rollout.mask.sum()))


def time_phases(watch: Stopwatch) -> None:
    """Have the stopwatch follow the parts of a rollout and of the updates."""
    forward = ActorCritic.forward

    def name(*args, policy=True, values=True, **kwargs) -> str:
        if torch.is_grad_enabled():
            return "actor forward"
        return "values" if not policy else "old log-probs" if values else "reference"

    def timed_forward(model, *args, completion_mask=None, **kwargs):
        if completion_mask is None:  # a call by `generate`
            return forward(model, *args, completion_mask=completion_mask, **kwargs)
        outputs = watch.timed(forward, name)(model, *args, completion_mask=completion_mask, **kwargs)
        if torch.is_grad_enabled():
            # Autograd takes the last operations first, so the critic's, which came after the log-probs.
            outputs.logprobs.register_hook(lambda grad: watch.rename("actor backward"))
        return outputs

    ActorCritic.forward = timed_forward
    critic = Critic.forward
    Critic.forward = watch.timed(critic, lambda *_, **__: "critic forward" if torch.is_grad_enabled() else "values")
    TransformersSampler.__call__ = watch.timed(TransformersSampler.__call__, "sampling")
    RewardModel.__call__ = watch.timed(RewardModel.__call__, "reward model")
    torch.Tensor.backward = watch.timed(torch.Tensor.backward, "critic backward")
    torch.optim.AdamW.step = watch.timed(torch.optim.AdamW.step, "optimiser")
    PPOTrainer._clip_gradients = watch.timed(PPOTrainer._clip_gradients, "optimiser")


def main(workload_name: str, critic: str, fields: dict, rollouts: int, folder: Path, quantised: bool) -> None:
    workload, watch = WORKLOADS[workload_name], Stopwatch()
    time_phases(watch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = tokenizer_for(workload, pad_beyond=False)
    tokenizer.eos_token = tokenizer.pad_token  # a token that the model knows, until the sampler is told another
    reward_tokenizer = tokenizer_for(workload, pad_beyond=False)
    reward_tokenizer.eos_token = None  # it would be appended, and the reward model does not know it
    clock = RolloutClock(watch, workload.epochs)
    trainer = PPOTrainer(
        model=load(folder, "policy", quantised, device),
        reward_funcs=load(folder, "reward", quantised, device),
        args=PPOConfig(
            **common_config(workload, rollouts, folder),
            max_completion_length=workload.new_tokens,
            logging_steps=workload.epochs,
            **fields,
        ),
        train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(prompts_for(workload))}),
        processing_class=tokenizer,
        peft_config=adapter_for(workload),
        critic=critic,
        callbacks=[clock],
        reward_processing_classes=[reward_tokenizer],
    )
    trainer.collector.sampler.config.eos_token_id = [workload.vocab_size]  # never sampled: every completion is full
    trainer.train()
    report(clock)


if __name__ == "__main__":
    workload_name, critic, fields, rollouts, folder, quantised = sys.argv[1:]
    main(workload_name, critic, json.loads(fields), int(rollouts), Path(folder), quantised == "nf4")
