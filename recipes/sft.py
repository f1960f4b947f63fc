"""Supervised fine-tuning of a LoRA adapter on demonstrations, with TRL's SFTTrainer: the first of three steps.

    accelerate launch recipes/sft.py --config recipes/sft.yaml

Rows have "prompt" and "completion", or "messages", as for `trl.SFTTrainer`. docs/rlhf.md describes the three steps.
"""

from transformers import AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from hfppo.cli import DataArguments, PPOParser, load_data


def main(data_args: DataArguments, args: SFTConfig, model_args: ModelConfig) -> None:
    train, test = load_data(data_args)
    trainer = SFTTrainer(
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
        trainer.save_metrics("eval", trainer.evaluate())
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*PPOParser((DataArguments, SFTConfig, ModelConfig)).parse_args_and_config())
