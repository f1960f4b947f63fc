"""A reward model from preference pairs, as a LoRA adapter, with TRL's RewardTrainer: the second of three steps.

    accelerate launch recipes/reward_model.py --config recipes/reward_model.yaml

Rows have "prompt", "chosen" and "rejected". An adapter trained on PPO's base shares that base in memory.
docs/rlhf.md describes the three steps.
"""

from transformers import AutoTokenizer
from trl import ModelConfig, RewardConfig, RewardTrainer, get_peft_config

from hfppo.cli import DataArguments, PPOParser, load_data


def main(data_args: DataArguments, args: RewardConfig, model_args: ModelConfig) -> None:
    train, test = load_data(data_args)
    if not {"chosen", "rejected"} <= set(train.column_names):
        raise ValueError(
            f"{data_args.dataset_name} has the columns {', '.join(train.column_names)}, and no pairs; "
            "rename the columns with the better and the worse completion to chosen and rejected"
        )
    model_args.lora_task_type = "SEQ_CLS"
    trainer = RewardTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=AutoTokenizer.from_pretrained(
            model_args.model_name_or_path, revision=model_args.model_revision
        ),
        peft_config=get_peft_config(model_args),
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    if test is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*PPOParser((DataArguments, RewardConfig, ModelConfig)).parse_args_and_config())
