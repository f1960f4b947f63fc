"""The beginnings of film reviews as prompts, and the share of completions that a classifier gives a label."""

from collections.abc import Callable
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, pipeline

from hfppo import RewardModel
from hfppo.cli import RewardArguments


@dataclass
class SentimentArguments(RewardArguments):
    """Arguments of recipes/sentiment/sentiment.py."""

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
    critic: str = field(
        default="adapter", metadata={"help": "'adapter', 'shared', 'shared_detached', an id or a path."}
    )


def cut_prompts(reviews: Dataset, tokenizer: PreTrainedTokenizerBase, args: SentimentArguments) -> Dataset:
    """Cut the reviews to their beginnings, in a column "prompt".

    Raises:
        ValueError: there is no column `text_column`.
    """
    if args.text_column not in reviews.column_names:
        raise ValueError(
            f"text_column={args.text_column!r} is not a column of {args.dataset_name}, which has "
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
