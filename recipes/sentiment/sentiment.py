"""Continue the beginnings of film reviews so that a sentiment classifier finds them positive.

    python recipes/sentiment/build_sentiment.py
    accelerate launch recipes/sentiment/sentiment.py --config recipes/sentiment/sentiment.yaml
    accelerate launch recipes/sentiment/sentiment.py --total_episodes 25600 --per_device_train_batch_size 64 \\
        --num_mini_batches 2 --learning_rate 1e-4 --kl_coef 0.2 --max_completion_length 24 --output_dir out/imdb

The first two lines build and train the small size offline, in two minutes on one core. The third trains the real
size: a GPT-2, with a DistilBERT as classifier, both fine-tuned on IMDB's reviews. The reward is the logit of the
wanted label; its probability would saturate. docs/sentiment.md has the results.
"""

from dataclasses import dataclass, field

import torch
from sentiment_reviews import SentimentArguments, cut_prompts, make_label_share
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hfppo import PPOConfig, PPOTrainer, RewardModel
from hfppo.cli import ActorArguments, PPOParser, actor_config, import_function, load_data


@dataclass
class SentimentActor(ActorArguments):
    """The actor's arguments, with a model that writes film reviews."""

    model_name_or_path: str = field(default="lvwerra/gpt2-imdb", metadata={"help": "The model that continues."})


def main(script_args: SentimentArguments, args: PPOConfig, model_args: SentimentActor) -> None:
    train, test = load_data(script_args)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, padding_side="left"
    )
    train = cut_prompts(train, tokenizer, script_args)
    if test is not None:  # a sample: a test split may be sorted by its labels
        some = range(min(script_args.num_test_prompts, len(test)))
        test = cut_prompts(test.shuffle(seed=0).select(some), tokenizer, script_args)
    reward = RewardModel(
        AutoModelForSequenceClassification.from_pretrained(script_args.classifier).to(args.device),
        AutoTokenizer.from_pretrained(script_args.classifier),
        label=script_args.label,
    )
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[reward, *(import_function(name) for name in script_args.reward_funcs)],
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=make_label_share(script_args.label, reward),
    )
    if sum(weight.numel() for weight in trainer.model.parameters()) < 10**7:
        torch.set_num_threads(1)  # more threads cost such a small model more than they save

    def measure(when: str) -> None:
        if test is None:
            return
        with trainer.eval_sampling(True):
            metrics = trainer.evaluate(metric_key_prefix=when)
        trainer.log_metrics(when, metrics)
        trainer.save_metrics(when, metrics)
        prompts = test["prompt"][:5]
        rollout = trainer.rollout(prompts)
        for prompt, ids, mask, score in zip(
            prompts, rollout.completion_ids, rollout.mask, rollout.scores.tolist(), strict=True
        ):
            if trainer.is_world_process_zero():
                print(f"{score:6.2f}  {prompt} |{tokenizer.decode(ids[mask], skip_special_tokens=True)}")

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
    main(*PPOParser((SentimentArguments, PPOConfig, SentimentActor)).parse_args_and_config())
