"""PPO on any task of reasoning-gym, which draws the questions and scores the answers.

    accelerate launch recipes/reasoning/reasoning.py --config recipes/reasoning/reasoning.yaml

The same without the Hub:

    python recipes/build_smollm2.py
    torchrun --nproc_per_node 1 recipes/reasoning/reasoning.py --config recipes/reasoning/reasoning.yaml \\
        --use_cpu true --model_name_or_path out/smollm2

docs/reasoning_gym.md explains the settings, and names the tasks whose scores execute the model's text.
"""

import json
from pathlib import Path

import rich
from reasoning_tasks import (
    Answers,
    ReasoningActor,
    ReasoningArguments,
    answer_table,
    draw_questions,
    make_reward,
    make_rows,
)

from hfppo import PPOConfig, PPOTrainer
from hfppo.cli import PPOParser, actor_config


def main(script_args: ReasoningArguments, args: PPOConfig, model_args: ReasoningActor) -> None:
    train_drawn, test_drawn = draw_questions(script_args)
    train = make_rows(train_drawn, 0, script_args)
    test = make_rows(test_drawn, len(train), script_args)
    reward = make_reward(train_drawn + test_drawn, script_args)
    answers = Answers(reward, script_args.answer_pattern)
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=answers,
    )
    folder = Path(args.output_dir)

    def measure(when: str) -> None:
        table = test.select_columns(["question", "answer"]).to_list()
        for mode, do_sample in (("sampled", True), ("greedy", False)):
            with trainer.eval_sampling(do_sample):
                metrics = trainer.evaluate(metric_key_prefix=f"{when}_{mode}")
            trainer.log_metrics(f"{when}_{mode}", metrics)
            trainer.save_metrics(f"{when}_{mode}", metrics)
            for row, given in zip(table, answers.rows, strict=True):
                row |= {mode: given["completion"], f"{mode}_score": given["score"]}
        if trainer.is_world_process_zero():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
            (folder / f"{when}_answers.jsonl").write_text(lines, encoding="utf-8")
            rich.print(answer_table(test, folder, script_args.num_shown))

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
    main(*PPOParser((ReasoningArguments, PPOConfig, ReasoningActor)).parse_args_and_config())
