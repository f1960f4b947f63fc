"""The sentiment recipe at its small size: what is built, two steps of PPO on it, and wrong flags."""

import json
import re
from pathlib import Path

import build_sentiment
import pytest
import sentiment_reviews
import torch
from build_sentiment import BuildArguments, well_formed
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction

from helpers.recipes import run_copy
from hfppo import RewardModel


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """What the build writes, barely trained."""
    folder = tmp_path_factory.mktemp("sentiment")
    sizes = {"num_train_reviews": 64, "num_test_reviews": 16, "hidden_size": 32, "num_layers": 1}
    steps = {"lm_steps": 2, "classifier_steps": 2, "batch_size": 8}
    build_sentiment.main(BuildArguments(output_dir=str(folder), **sizes, **steps))
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(built: Path, folder: Path, *flags: str) -> dict:
    """The recipe for two optimizer steps."""
    files = {"train": str(built / "train.jsonl"), "test": str(built / "test.jsonl")}
    given = ["--model_name_or_path", str(built / "model"), "--classifier", str(built / "classifier")]
    given += ["--data_files", json.dumps(files), "--max_completion_length", "8", "--save_strategy", "no"]
    return run_copy("sentiment/sentiment.py", folder, *given, *flags)


def test_recipe_moves_the_adapter_and_reports_before_and_after(built, tmp_path, capsys):
    results, out = run(built, tmp_path), tmp_path / "out"
    for when in ("before", "after"):
        assert 0 <= results[f"{when}_positive"] <= 1
        assert results[f"{when}_reward"] == pytest.approx(results[f"{when}_rewards/classifier/mean"])
        assert 0 <= results[f"{when}_rewards/well_formed/mean"] <= 1  # logged, with weight 0
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert any("kl" in entry for entry in log)
    shown = re.findall(r"^ *-?\d+\.\d\d  (.*) \|", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(shown) == 10
    assert shown[:5] == shown[5:]
    moved = {name: tensor.abs().max() > 0 for name, tensor in load_file(out / "adapter_model.safetensors").items()}
    targets = {name.split(".lora_B")[0].split(".h.0.")[1] for name in moved if "lora_B" in name}
    assert targets == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert all(moved.values()), "lora_B is 0 before training"


def test_prompts_are_the_first_tokens_of_the_reviews(built):
    tokenizer = AutoTokenizer.from_pretrained(built / "model")
    reviews = Dataset.from_list([*rows(built / "test.jsonl"), {"text": "I loved it.", "label": 1}])
    prompts = sentiment_reviews.cut_prompts(reviews, tokenizer, sentiment_reviews.SentimentArguments(prompt_tokens=5))
    assert prompts.column_names == ["prompt"]
    for review, prompt in zip(reviews["text"][:-1], prompts["prompt"][:-1], strict=True):
        assert review.startswith(prompt)
        assert tokenizer(prompt)["input_ids"] == tokenizer(review)["input_ids"][:5]
    assert prompts["prompt"][-1] in "I loved it."
    assert prompts["prompt"][-1].startswith("I lov")


def test_the_share_is_that_of_the_larger_logit_and_the_reward_the_logit(built):
    model = AutoModelForSequenceClassification.from_pretrained(built / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(built / "classifier")
    with torch.no_grad():  # a bias puts the verdict between the texts, a quarter below
        texts = [row["text"] for row in rows(built / "test.jsonl")]
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
        shift = (logits[:, 1] - logits[:, 0]).quantile(0.25)
        model.classifier.bias[0] += shift
        logits[:, 0] += shift
    expected = (logits[:, 1] > logits[:, 0]).float().mean().item()
    assert 0.6 < expected < 0.9
    prompts, completions = [text[:20] for text in texts], [text[20:] for text in texts]
    reward = RewardModel(model, tokenizer, label="POSITIVE")
    metrics = sentiment_reviews.make_label_share("POSITIVE", reward)(EvalPrediction(completions, {}, inputs=prompts))
    assert metrics == {"positive": pytest.approx(expected)}
    assert reward(prompts, completions) == pytest.approx(logits[:, 1].tolist(), abs=1e-5)


def test_a_column_that_is_not_there_is_refused_by_name(built, tmp_path):
    with pytest.raises(ValueError, match=r"text_column='review' is not a column of json, which has text, label; "):
        run(built, tmp_path, "--text_column", "review")


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        (" What a moving film!", 1.0),
        (" What a moving film", 0.0),
        (" It was filmed in Rome!", 0.0),
        (" What a moving film! and so", 0.0),
    ],
)
def test_well_formed(completion, wanted):
    assert well_formed(["I watched this film with my boss last Monday."], [completion]) == [wanted]
