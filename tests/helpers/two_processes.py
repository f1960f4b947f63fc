"""Run by test_two_processes.py under torchrun or on a second device: trains and resumes; writes JSON."""

import atexit
import json
import math
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset

from helpers.agents import TALK, talking_trainer
from helpers.endpoint import wandering
from helpers.processes import freeze_imports
from helpers.runs import SMALL, count_digits, final_state, size_of, stops_at_kl, untimed_logs
from helpers.tiny import LORA, ragged_model
from hfppo import AdaptiveKLCallback, PPOConfig, PPOTrainer, TokenTraceCallback
from hfppo.checks.engine import end_group
from hfppo.collect import candidates
from hfppo.reporting.run_page import RunPageCallback
from hfppo.reporting.traces import read_traces, trace_file

freeze_imports()
OUT = Path(sys.argv[1])
CONFIG = {
    **SMALL,
    "use_cpu": "ACCELERATE_TORCH_DEVICE" not in os.environ,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4 // int(os.environ["WORLD_SIZE"]),  # the same rollouts, however many share them
    "num_mini_batches": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_tokens_per_micro_batch": 14,
}
VARIANTS = [
    {
        "advantage_estimator": "grpo",
        "num_generations": 2,
        "policy_mode": "token_truncate",
        "mask_truncated_completions": True,
    },
    {
        "rollouts_ahead": 1,
        "advantage_estimator": "reinforce_plus_plus",
        "kl_loss_coef": 0.1,
        "missing_eos_penalty": 1.0,
    },
    {
        "policy_mode": "bypass",
        "bootstrap_truncated": True,
        "critic_layers": 1,
        "value_range": [-1.0, 3.0],
        "value_loss": "bce",
        "kl_coef": 0.0,
        "critic_update": "policy_aligned",
        "lam_critic": 1.0,
        "stop_at": 1e-3,
        "entropy_coef": 0.01,
    },
    {"privileged": True, "bootstrap_truncated": True},
    {"talks": True, "gamma_turn": 0.9, "max_completion_length": 40, "max_tokens_per_micro_batch": 100},
    {"agent": wandering, "lam_turn": 1.0, "max_completion_length": 40, "loss_reduction": "seq-mean-token-mean"},
]
DATASET = Dataset.from_list([{"prompt": f"请问{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(3, 7)])
TOLD = DATASET.map(lambda row: {"critic_prompt": f"{row['answer']}！{row['prompt']}"})


def make(
    name: str, talks: bool = False, privileged: bool = False, stop_at: float = math.inf, agent=None, **config
) -> PPOTrainer:
    config = {**CONFIG, **config}
    callbacks = [stops_at_kl(stop_at)]
    if config.get("kl_coef") != 0:
        callbacks.append(AdaptiveKLCallback(target=0.01, horizon=100))
    if talks or agent:
        played = {"environment_factory": None, "agent": agent} if agent else {}
        rows = TALK.select(range(7))
        trainer = talking_trainer(OUT / name, config, eval_dataset=rows, callbacks=callbacks, **played)
    else:
        trainer = PPOTrainer(
            model=ragged_model(),
            reward_funcs=count_digits,
            args=PPOConfig(**config, output_dir=str(OUT / name)),
            train_dataset=TOLD if privileged else DATASET,
            eval_dataset=DATASET.select(range(7)),  # does not divide by two
            processing_class=character_tokenizer(),
            peft_config=LORA,
            callbacks=callbacks,
        )
    trainer.remove_callback(RunPageCallback)  # half of the time of so small a run
    return trainer


def weights(trainer: PPOTrainer) -> dict[str, list[float]]:
    """The trained weights, and the optimiser's moments."""
    return {name: tensor.flatten().tolist() for name, tensor in final_state(trainer).items()}


def logs(trainer: PPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in untimed_logs(trainer) if "loss" in entry or "eval_reward" in entry]


def gradients(trainer: PPOTrainer) -> dict[str, list[float]]:
    """Of one step on 8 given completions, of which each process holds its share."""
    everything = trainer.rollout([f"{n}+{n}=" for n in range(8)])
    share = torch.arange(8).chunk(trainer.args.world_size)[trainer.args.process_index]
    size = size_of(everything)
    model = trainer.model_wrapped
    model.zero_grad()
    micro_batches = list(everything.select(share).micro_batches(2))
    for i, micro in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        trainer.accelerator.gradient_state._set_sync_gradients(last)
        with trainer.accelerator.no_sync(model) if not last else torch.enable_grad():
            trainer.accelerator.backward(trainer.compute_loss(model, {"batch": micro}, num_items_in_batch=size))
    return {n: p.grad.flatten().tolist() for n, p in trainer.model.named_parameters() if p.requires_grad}


at_exit = mock.patch("atexit.register", wraps=atexit.register).start()
straight = make("straight")
straight.train()
resumed = [make(f"resumed-{step}") for step in (3, 4)]  # within a rollout, and between two
for trainer, step in zip(resumed, (3, 4), strict=True):
    trainer.train(resume_from_checkpoint=str(OUT / "straight" / f"checkpoint-{step}"))
variants = [make(f"variant-{i}", max_steps=3, **fields) for i, fields in enumerate(VARIANTS)]
for trainer in variants:
    trainer.train()
candidates.EXPLAINED = 0.0  # the critic chooses whatever little it knows
CHOSEN = {"prompt_candidates": 2, "num_ppo_epochs": 1, "max_steps": 8}
chosen = [make(f"chosen-{i}", **CHOSEN) for i in range(2)]
chosen[0].train()
chosen[1].train(resume_from_checkpoint=str(OUT / "chosen-0" / "checkpoint-4"))
critic_first = make("critic-first", max_steps=3, critic_pretraining_completions=24, num_critic_epochs=3)
critic_first.train()
probe = make("probe", max_steps=1, learning_rate=0.0)
probe.add_callback(TokenTraceCallback(trainer=probe, prompts=["1+1=", "请问2+3="]))
probe.train()
result = {
    "processes": straight.args.world_size,
    "device": str(straight.args.device),
    "ends_at_exit": sum(call.args[0] is end_group for call in at_exit.call_args_list),
    "straight": weights(straight),
    "straight_logs": logs(straight),
    "resumed": [weights(trainer) for trainer in resumed],
    "resumed_logs": [logs(trainer) for trainer in resumed],
    "variants_logs": [logs(trainer) for trainer in variants],
    "chosen": [weights(trainer) for trainer in chosen],
    "chosen_logs": [logs(trainer) for trainer in chosen],
    "critic_first": weights(critic_first),
    "pretraining": critic_first.ppo_state.pretraining_results,
    "gradients": gradients(probe),
    "evaluation": {k: v for k, v in probe.evaluate().items() if k.startswith(("eval_reward", "eval_completions"))},
    "traces": [vars(trace) for trace in read_traces(trace_file(probe.args.output_dir, 1, "prompts"))],
    "completions": probe.predict(probe.eval_dataset).predictions,
}
(OUT / f"result_{straight.args.process_index}.json").write_text(json.dumps(result))
straight.end()
