"""PPO on GSM8K: word problems with a number as the answer; the reward is 1 or 0.

    accelerate launch recipes/gsm8k/gsm8k.py --config recipes/gsm8k/gsm8k.yaml

To try it without the Hub and a GPU, on the 50 shipped problems (the model is random and learns nothing):

    python recipes/gsm8k/build_tiny_base.py --output_dir out/tiny
    torchrun --nproc_per_node 1 recipes/gsm8k/gsm8k.py --config recipes/gsm8k/gsm8k.yaml --use_cpu true \\
        --model_name_or_path out/tiny --dtype float32 --dataset_name json --output_dir out/gsm8k-tiny \\
        --data_files '{"train": "recipes/gsm8k/problems.jsonl", "test": "recipes/gsm8k/test.jsonl"}' \\
        --bf16 false --gradient_accumulation_steps 1 --max_completion_length 32 --max_steps 8

Rows have "question" and "answer", the latter ending with the number after "####". docs/gsm8k.md explains the settings.
"""

from dataclasses import dataclass, field

from problems import GSM8KArguments, final_answer, is_right, make_conversations
from transformers import EvalPrediction

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import ActorArguments, PPOParser, actor_config, load_data


@dataclass
class GSM8KActor(ActorArguments):
    """Arguments of the actor, with an instruction-tuned model as default."""

    model_name_or_path: str = field(default="Qwen/Qwen2.5-0.5B-Instruct", metadata={"help": "The base."})


def right_answer(completions: list[list[dict[str, str]]], answer: list[str], **kwargs) -> list[float]:
    """Return 1 for a completion with the right final answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(is_right(messages[0]["content"], wanted)) for messages, wanted in pairs]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of completions with the right final answer, and with any."""
    right = right_answer(prediction.predictions, prediction.label_ids["answer"])
    answered = [final_answer(messages[0]["content"]) is not None for messages in prediction.predictions]
    return {"accuracy": sum(right) / len(right), "answered": sum(answered) / len(answered)}


def main(script_args: GSM8KArguments, args: PPOConfig, model_args: GSM8KActor) -> None:
    train, test = load_data(script_args)
    train = make_conversations(train, script_args.train_split, script_args)
    test = None if test is None else make_conversations(test, script_args.test_split, script_args)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=right_answer,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=accuracy,
    )

    def measure(when: str) -> None:
        if test is None:
            return
        with trainer.eval_sampling(False):
            metrics = trainer.evaluate(metric_key_prefix=when)
        trainer.log_metrics(when, metrics)
        trainer.save_metrics(when, metrics)

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
    main(*PPOParser((GSM8KArguments, PPOConfig, GSM8KActor)).parse_args_and_config())
