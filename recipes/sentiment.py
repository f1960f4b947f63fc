"""Continue the beginnings of film reviews so that a sentiment classifier finds them positive.

    python recipes/build_sentiment.py && accelerate launch recipes/sentiment.py --config recipes/sentiment.yaml
    accelerate launch recipes/sentiment.py --total_episodes 25600 --per_device_train_batch_size 64 \\
        --num_mini_batches 2 --learning_rate 1e-4 --kl_coef 0.2 --max_completion_length 24 --output_dir out/imdb

The first line builds and trains the small size offline, in two minutes on one core. The second trains the real size: a
GPT-2, with a DistilBERT as classifier, both fine-tuned on IMDB's reviews. The reward is the logit of the wanted label;
its probability would saturate. docs/sentiment.md has the results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from dataset import load
from datasets import Dataset
from ppo import RewardArguments, import_function
from run import ActorArguments, RecipeParser, actor_config, evaluate, init_kwargs, run
from transformers import AutoTokenizer, EvalPrediction, PreTrainedTokenizerBase, pipeline

from hfppo import PPOConfig, PPOTrainer
from hfppo.models.loading import load_tokenizer
from hfppo.rewards.loading import load_classifier
from hfppo.rewards.model import RewardModel


@dataclass
class SentimentArguments(RewardArguments):
    """Arguments of this recipe."""

    dataset_name: str = field(default="stanfordnlp/imdb", metadata={"help": "Reviews: an id, path, or format."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the reviews."})
    prompt_tokens: int = field(default=8, metadata={"help": "Length of the prompt: the first tokens of a review."})
    num_test_prompts: int = field(default=512, metadata={"help": "Number of test reviews to evaluate on."})
    classifier: str = field(default="lvwerra/distilbert-imdb", metadata={"help": "Its logit is the reward."})
    label: str = field(default="POSITIVE", metadata={"help": "The classifier's label to reward."})
    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Dotted paths of more reward functions; --reward_weights 1 0 only logs the second."},
    )
    critic: str = field(default="adapter", metadata={"help": "'adapter', 'shared', or a model's id or path."})


@dataclass
class SentimentActor(ActorArguments):
    """The actor's arguments, with a model that writes film reviews."""

    model_name_or_path: str = field(default="lvwerra/gpt2-imdb", metadata={"help": "The model that continues."})


def cut_prompts(reviews: Dataset, tokenizer: PreTrainedTokenizerBase, args: SentimentArguments) -> Dataset:
    """Cut the reviews to their beginnings, in a column "prompt".

    Raises:
        ValueError: there is no column `text_column`.
    """
    if args.text_column not in reviews.column_names:
        raise ValueError(
            f"text_column={args.text_column!r} is no column of {args.dataset_name}, which has "
            f"{', '.join(reviews.column_names)}; set --text_column to the column with the reviews"
        )

    def cut(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        texts = batch[args.text_column]
        encoded = tokenizer(
            texts,
            add_special_tokens=False,
            truncation=True,
            max_length=args.prompt_tokens,
            return_offsets_mapping=True,
        )
        ends = [offsets[-1][1] if offsets else 0 for offsets in encoded["offset_mapping"]]
        return {"prompt": [text[:end] for text, end in zip(texts, ends, strict=True)]}

    return reviews.map(cut, batched=True, remove_columns=reviews.column_names)


def make_label_share(label: str, reward: RewardModel) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a `compute_metrics`: the share of completions that the classifier gives the label."""
    classify = pipeline(
        "text-classification",
        model=reward.model,
        tokenizer=reward.tokenizer,
        device=reward.model.device,
        batch_size=reward.batch_size,
    )

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        texts = [prompt + text for prompt, text in zip(prediction.inputs, prediction.predictions, strict=True)]
        verdicts = [verdict["label"] for verdict in classify(texts, truncation=True)]
        return {label.lower(): verdicts.count(label) / len(verdicts)}

    return metrics


def main(script_args: SentimentArguments, args: PPOConfig, model_args: SentimentActor) -> None:
    if args.device.type == "cpu":
        torch.set_num_threads(1)  # more threads cost such small models more than they save
    train, test = load(script_args)
    tokenizer = load_tokenizer(model_args.model_name_or_path, **init_kwargs(args, model_args))
    train = cut_prompts(train, tokenizer, script_args)
    if test is not None:  # a sample: a test split may be sorted by its labels
        some = range(min(script_args.num_test_prompts, len(test)))
        test = cut_prompts(test.shuffle(seed=0).select(some), tokenizer, script_args)
    reward = RewardModel(
        load_classifier(script_args.classifier).to(args.device),
        AutoTokenizer.from_pretrained(script_args.classifier),
        label=script_args.label,
    )
    args.model_init_kwargs = init_kwargs(args, model_args)
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

    def measure(when: str) -> None:
        evaluate(trainer, when, do_sample=True)
        prompts = test["prompt"][:5]
        rollout = trainer.rollout(prompts)
        for prompt, ids, mask, score in zip(
            prompts, rollout.completion_ids, rollout.mask, rollout.scores.tolist(), strict=True
        ):
            if trainer.is_world_process_zero():
                print(f"{score:6.2f}  {prompt} |{tokenizer.decode(ids[mask], skip_special_tokens=True)}")

    run(trainer, measure)


if __name__ == "__main__":
    main(*RecipeParser((SentimentArguments, PPOConfig, SentimentActor), allow_abbrev=False).parse_args_and_config())
