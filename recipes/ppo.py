"""PPO on any prompts with any reward functions: the last of three steps.

    accelerate launch recipes/ppo.py --config recipes/ppo.yaml
    accelerate launch recipes/ppo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name org/prompts \\
        --reward_funcs org/reward-model trl.rewards.think_format_reward --output_dir out/ppo

Rows have "prompt", as text or messages; other columns reach the reward functions. docs/rlhf.md has all three steps.
"""

from dataclasses import dataclass, field

import torch

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import ActorArguments, PPOParser, RewardArguments, actor_config, import_function, load_data, load_reward


@dataclass
class PPOArguments(RewardArguments):
    """Arguments of this recipe."""

    compute_metrics: str | None = field(
        default=None, metadata={"help": "Dotted path of a function from an EvalPrediction to metrics."}
    )
    critic: str = field(
        default="adapter",
        metadata={"help": "'adapter', 'shared', 'shared_detached', a model's id, or a saved critic."},
    )
    ref_model: str | None = field(default=None, metadata={"help": "The reference; default: the start of training."})


def main(script_args: PPOArguments, args: PPOConfig, model_args: ActorArguments) -> None:
    train, test = load_data(script_args)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_reward(name) for name in script_args.reward_funcs],
        args=args,
        train_dataset=train,
        eval_dataset=test,
        peft_config=actor_config(model_args),
        ref_model=script_args.ref_model,
        critic=script_args.critic,
        compute_metrics=import_function(script_args.compute_metrics) if script_args.compute_metrics else None,
    )
    if sum(weight.numel() for weight in trainer.model.parameters()) < 10**7:
        torch.set_num_threads(1)  # more threads cost such a small model more than they save

    def measure(when: str) -> None:
        if test is None:
            return
        for mode, do_sample in (("sampled", True), ("greedy", False)):
            with trainer.eval_sampling(do_sample):
                metrics = trainer.evaluate(metric_key_prefix=f"{when}_{mode}")
            trainer.log_metrics(f"{when}_{mode}", metrics)
            trainer.save_metrics(f"{when}_{mode}", metrics)

    if args.resume_from_checkpoint is None:
        measure("before")
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    measure("after")
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*PPOParser((PPOArguments, PPOConfig, ActorArguments)).parse_args_and_config())
