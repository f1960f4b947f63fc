"""Teach a language model when to pick apples and when to sell them: PPO over the eight turns of a game in plain words.

    accelerate launch recipes/agent/agent.py --config recipes/agent/agent.yaml

The same without the Hub:

    python recipes/build_smollm2.py
    torchrun --nproc_per_node 1 recipes/agent/agent.py --config recipes/agent/agent.yaml --use_cpu true \\
        --model_name_or_path out/smollm2

The best play is known, so the results say how much of the way to it was made. `after_game.md` shows a game, turn by
turn, with the critic's values beside those of the best play. docs/agent_game.md explains game and settings.
"""

from dataclasses import dataclass, field
from pathlib import Path

from agent_game import CHAT_TEMPLATE, OPTIMUM, PROMPT, Orchard, measure_games, show_game, uniform_value
from datasets import Dataset
from transformers import AutoTokenizer

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import ActorArguments, PPOParser, actor_config


@dataclass
class AgentArguments:
    """Arguments of this recipe."""

    critic: str = field(
        default="shared", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )
    num_eval_games: int = field(default=64, metadata={"help": "Games that are played before and after training."})


@dataclass
class AgentActor(ActorArguments):
    """Arguments of the actor."""

    model_name_or_path: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        metadata={"help": "Id or path of a model with ' pick' and ' sell' as tokens."},
    )


def main(script_args: AgentArguments, args: PPOConfig, model_args: AgentActor) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        environment_factory=Orchard,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
        eval_dataset=Dataset.from_dict({"prompt": [PROMPT] * script_args.num_eval_games}),
        processing_class=tokenizer,
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=measure_games,
    )

    def measure(when: str) -> None:
        with trainer.eval_sampling(True):
            metrics = trainer.evaluate(metric_key_prefix=when) | {"optimum": OPTIMUM, "uniform": uniform_value()}
        trainer.log_metrics(when, metrics)
        trainer.save_metrics(when, metrics)
        shown = show_game(trainer)
        if trainer.is_world_process_zero():
            print(shown)
            (Path(args.output_dir) / f"{when}_game.md").write_text(shown + "\n", encoding="utf-8")

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
    main(*PPOParser((AgentArguments, PPOConfig, AgentActor)).parse_args_and_config())
