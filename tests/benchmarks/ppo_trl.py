"""The side of TRL's PPOTrainer of `ppo.py`, which starts it with the interpreter of TRL's own environment."""

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
    tokenizer_for,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


def time_phases(watch: Stopwatch, clock: Clock, reward_model: torch.nn.Module) -> None:
    """Have the stopwatch follow the parts of a rollout and of the updates, and count the completion tokens."""
    forward, generation = ppo_trainer.forward, ppo_trainer.batch_generation

    def timed_forward(*args):
        phase = "actor forward" if torch.is_grad_enabled() else "reference"
        returned = watch.timed(forward, phase)(*args)
        if torch.is_grad_enabled():
            # Autograd takes the last operations first, so the policy's, which came after the values.
            returned[1].register_hook(lambda grad: watch.rename("critic backward"))
        return returned

    def counted_generation(model, queries, size, pad_token_id, config):
        sequences, logits = generation(model, queries, size, pad_token_id, config)
        clock.tokens.append(int((sequences[:, queries.shape[1] :] != pad_token_id).sum()))
        return sequences, logits

    ppo_trainer.forward = timed_forward
    ppo_trainer.batch_generation = watch.timed(counted_generation, "sampling")
    ppo_trainer.get_reward = watch.timed(
        ppo_trainer.get_reward, lambda model, *_: "reward model" if model is reward_model else "values"
    )
    torch.Tensor.backward = watch.timed(torch.Tensor.backward, "actor backward")
    torch.optim.AdamW.step = watch.timed(torch.optim.AdamW.step, "optimizer")


def main(workload_name: str, rollouts: int, folder: Path, quantized: bool) -> None:
    workload, watch = WORKLOADS[workload_name], Stopwatch()
    clock, reward_model = Clock(watch, 1), load(workload, folder, "reward", quantized)
    time_phases(watch, clock, reward_model)
    trainer = PPOTrainer(
        args=PPOConfig(
            **common_config(workload, rollouts, folder),
            response_length=workload.new_tokens,
            num_sample_generations=0,
            logging_steps=1,
        ),
        processing_class=tokenizer_for(workload, pad_beyond=True),
        model=load(workload, folder, "policy", quantized),
        ref_model=None,
        reward_model=reward_model,
        value_model=load(workload, folder, "value", quantized),
        train_dataset=Dataset.from_dict({"input_ids": prompts_for(workload)}),
        callbacks=[clock],
        peft_config=adapter_for(workload),
    )
    backbone = trainer.model.critic_backbone
    backbone.forward = watch.timed(
        backbone.forward, lambda *_, **__: "critic forward" if torch.is_grad_enabled() else watch.names[-1]
    )
    trainer.train()
    print(json.dumps(clock.measured()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "nf4")
