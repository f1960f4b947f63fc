"""hfppo on a workload of `ppo_workload`; the GPU kit runs it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from ppo_workload import Clock, Stopwatch, Workload, adapter_for, common_config, prompts_for, tokenizer_for
from transformers import PreTrainedModel, TrainerCallback

from hfppo import PPOConfig, PPOTrainer
from hfppo.callbacks import PPOCallback
from hfppo.generation.generate import TransformersSampler
from hfppo.models.actor_critic import EVERYTHING, ActorCritic, Want
from hfppo.models.critic import Critic
from hfppo.rewards.model import RewardModel


class RolloutClock(PPOCallback, Clock):
    """A clock that counts the completion tokens as well."""

    def on_rollout_end(self, args, state, control, rollout=None, **kwargs):
        self.tokens.append(int(rollout.mask.sum()))


@contextmanager
def timed_phases(watch: Stopwatch) -> Iterator[None]:
    """Have the stopwatch follow the parts of a rollout and of the updates, for the block."""
    forward = ActorCritic.forward

    def name(want: Want) -> str:
        if torch.is_grad_enabled():
            return "actor forward" if want.policy else "critic forward"
        return "values" if not want.policy else "old log-probs" if want.values else "reference"

    def timed_forward(
        model, input_ids=None, attention_mask=None, completion_mask=None, want=EVERYTHING, *more, **kwargs
    ):
        inputs = (model, input_ids, attention_mask, completion_mask)
        if completion_mask is None:  # a call by `generate`
            return forward(*inputs, want, *more, **kwargs)
        outputs = watch.timed(partial(forward, *inputs, want, *more), lambda **_: name(want))(**kwargs)
        if torch.is_grad_enabled() and outputs.logprobs is not None:
            # Autograd takes the last operations first, so the critic's, which came after the log-probs.
            outputs.logprobs.register_hook(lambda grad: watch.rename("actor backward"))
        return outputs

    phases = [
        (Critic, "forward", lambda *_, **__: "critic forward" if torch.is_grad_enabled() else "values"),
        (TransformersSampler, "__call__", "sampling"),
        (RewardModel, "__call__", "reward model"),
        (PPOTrainer, "training_step", "loss"),  # with what follows inside it on clocks of its own
        (torch.Tensor, "backward", "critic backward"),
        (torch.optim.AdamW, "step", "optimizer"),
        (PPOTrainer, "_clip_grad_norm", "optimizer"),
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.object(ActorCritic, "forward", timed_forward))
        for owner, method, phase in phases:
            stack.enter_context(patch.object(owner, method, watch.timed(getattr(owner, method), phase)))
        yield


def build(
    workload: Workload,
    folder: Path,
    fields: dict[str, Any],
    model: PreTrainedModel,
    reward: Any,
    critic: str = "adapter",
    rollouts: int = 1,
    callbacks: Sequence[TrainerCallback] = (),
) -> PPOTrainer:
    """Return the trainer for a workload.

    Args:
        folder: outputs go into a new folder inside it.
        fields: of PPOConfig; they replace the workload's.
        reward: a function or a model.
    """
    tokenizer = tokenizer_for(workload)
    tokenizer.eos_token = tokenizer.pad_token  # a token that the model knows, until the sampler is told another
    reward_tokenizer = tokenizer_for(workload)
    reward_tokenizer.eos_token = None  # it would be appended, and the reward model does not know it
    own = {"max_completion_length": workload.new_tokens, "max_prompt_length": None, "logging_steps": workload.steps}
    args = PPOConfig(**{**common_config(workload, rollouts, folder), **own, **fields})
    prompts = prompts_for(workload)[: workload.prompts // args.num_generations]
    trainer = PPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(prompts)}),
        processing_class=tokenizer,
        peft_config=adapter_for(workload),
        critic=critic,
        callbacks=list(callbacks),
        reward_processing_classes=[reward_tokenizer if isinstance(reward, PreTrainedModel) else None],
    )
    end_with(trainer, [workload.vocab_size])  # never sampled: every completion is full
    return trainer


def end_with(trainer: PPOTrainer, eos_ids: list[int]) -> None:
    """Let these tokens, and no others, end completions."""
    sampler = trainer.collector.sampler
    assert isinstance(sampler, TransformersSampler)
    sampler.sampling = replace(sampler.sampling, eos_ids=eos_ids)


def measure(
    workload: Workload,
    folder: Path,
    fields: dict[str, Any],
    model: PreTrainedModel,
    reward: Any,
    critic: str,
    rollouts: int,
) -> dict[str, Any]:
    """Train for some rollouts, and return what the clock measured after the first."""
    watch = Stopwatch()
    clock = RolloutClock(watch, workload.steps)
    with timed_phases(watch):
        trainer = build(workload, folder, fields, model, reward, critic, rollouts, [clock])
        trainer.train()
    rates = [log["time/update_tflops"] for log in trainer.state.log_history if "time/update_tflops" in log]
    return {**clock.measured(), "TFLOP/s": rates[1:]}
