"""Teach a small chat model to call a calculator, although its chat template knows no tools.

    accelerate launch recipes/reasoning/calculator.py --config recipes/reasoning/calculator.yaml

The same without the Hub:

    python recipes/build_smollm2.py
    torchrun --nproc_per_node 1 recipes/reasoning/calculator.py --config recipes/reasoning/calculator.yaml \\
        --use_cpu true --model_name_or_path out/smollm2

reasoning-gym draws the questions and scores the last message of each completion. `--use_tool false` asks the same
questions without the calculator. docs/calculator.md explains the template and the parser. With `--played_by openai` or
`--played_by openai-agents` an agent of your_agent.py asks the model, as docs/your_agent.md explains.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from calculator_tool import calc, demonstration, load_tokenizer
from reasoning_tasks import Answers, ReasoningActor, ReasoningArguments, draw_questions, make_reward, make_rows
from transformers import EvalPrediction

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import PPOParser, actor_config


@dataclass
class CalculatorArguments(ReasoningArguments):
    """Arguments of this recipe."""

    use_tool: bool = field(default=True, metadata={"help": "Whether the model has the calculator."})
    played_by: Literal["tools", "openai", "openai-agents"] = field(
        default="tools", metadata={"help": "'tools', or the agent that asks the model."}
    )


def players(script_args: CalculatorArguments, args: PPOConfig) -> dict[str, Any]:
    """Return the trainer's arguments that play the episodes, and set the limits that they need."""
    if not script_args.use_tool:  # the YAML file's limits of turns, which are errors without tools
        args.max_turn_length = args.max_tool_calling_iterations = None
        return {}
    if script_args.played_by == "tools":
        return {"tools": [calc]}
    import your_agent  # needs openai and openai-agents

    args.max_tool_calling_iterations = your_agent.MOST_CALLS
    return {"agent": your_agent.loop if script_args.played_by == "openai" else your_agent.openai_agents}


class ToolAnswers(Answers):
    """A `compute_metrics` like `Answers`, with the share of completions in which the calculator gave a value."""

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        metrics = super().__call__(prediction)
        replies = [[m["content"] for m in messages if m["role"] == "tool"] for messages in prediction.predictions]
        computed = [any("error" not in reply for reply in of_one) for of_one in replies]
        return metrics | {"computed": sum(computed) / len(computed)}


def main(script_args: CalculatorArguments, args: PPOConfig, model_args: ReasoningActor) -> None:
    train_drawn, test_drawn = draw_questions(script_args)
    shown = demonstration(script_args.use_tool)
    train = make_rows(train_drawn, 0, script_args).map(lambda row: {"prompt": shown + row["prompt"]})
    test = make_rows(test_drawn, len(train), script_args).map(lambda row: {"prompt": shown + row["prompt"]})
    reward = make_reward(train_drawn + test_drawn, script_args)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=load_tokenizer(model_args.model_name_or_path),
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=ToolAnswers(reward, script_args.answer_pattern),
        **players(script_args, args),
    )

    def measure(when: str) -> None:
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
    main(*PPOParser((CalculatorArguments, PPOConfig, ReasoningActor)).parse_args_and_config())
