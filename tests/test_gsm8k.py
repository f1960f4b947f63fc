"""The problems that ship are right, answers are read as people mean them, and the recipe runs on a tiny base."""

import json
from pathlib import Path

import gsm8k
import problems
import pytest
from datasets import Dataset
from safetensors.torch import load_file
from transformers import EvalPrediction

from helpers.recipes import run_copy

FOLDER = Path(gsm8k.__file__).parent
FILES = {"train": str(FOLDER / "problems.jsonl"), "test": str(FOLDER / "test.jsonl")}
PROBLEMS = {name: [json.loads(line) for line in Path(file).read_text().splitlines()] for name, file in FILES.items()}
# What is written in the place of an answer, by the answer it is.
RIGHT = {
    "72": ["72", "72.", "72.0", "0072", "**72**", "x = 72", "$72$", r"\(72\)", r"\text{72}", r"2 \cdot 36"],
    "35": ["35 apples", r"35\text{ apples}", r"35 \text{ km/h}", "35%", r"35\%"],
    "18": ["$18", r"\$18", "18 dollars", "$18.00 a month"],
    "1,080": ["1080", "1,080", r"1{,}080", r"1,\!080", "$1,080.00"],
    "1234567": ["1234567", "1,234,567"],
    "-11": ["-11", "−11", "-11 degrees"],
    "0.75": ["0.75", ".75", "3/4", r"\frac{3}{4}", r"\dfrac{3}{4}", r"$\frac{3}{4}$ of it"],
}
WRONG = {
    "72": [*(f"#### {x}" for x in ("73", "-72", "7.2", "720", "72, 73", "72\n#### 5")), r"\boxed{72} or \boxed{73}"],
    "5": ["The answer is 5", "5", "", "####", "#### x", "#### many", r"\boxed{5", r"\boxed{}"],
    "-11": ["#### 11"],
    "1,080": ["#### 1", "#### 1.080", "#### 80"],
    "0.75": [r"\boxed{\frac{4}{3}}", "#### 0.7"],
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 5 apples\nNo, wait.\n#### 72\nThat is it.", "72"),
        ("####\n72", "72"),
        (r"So it is \boxed{72}.", "72"),
        (r"\boxed{5}, or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"#### \boxed{72}", "72"),
        ("#### Step 1\n2 + 2 = 4\n" + r"\boxed{4}", "4"),
        (r"\boxed{4}" + "\n#### 5", "5"),
        ("The answer is 72.", None),
        (r"\boxed{7", None),
    ],
)
def test_where_the_final_answer_is_looked_for(text, wanted):
    assert problems.final_answer(text) == wanted


@pytest.mark.parametrize(("gold", "given"), [(gold, given) for gold, forms in RIGHT.items() for given in forms])
@pytest.mark.parametrize("form", ["#### {}", r"\boxed{{{}}}"], ids=["mark", "box"])
def test_right_answers_in_many_forms(gold, given, form):
    completions = [[{"role": "assistant", "content": "Let us see. 5 and 7.\n" + form.format(given)}]]
    assert gsm8k.right_answer(completions=completions, answer=[f"reasoning\n#### {gold}"]) == [1.0]


@pytest.mark.parametrize(("gold", "completion"), [(gold, text) for gold, texts in WRONG.items() for text in texts])
def test_wrong_answers_and_none(gold, completion):
    assert not problems.is_right(completion, f"reasoning\n#### {gold}")


def test_the_shipped_solutions_are_right_by_the_reward_and_others_are_not():
    rows = [*PROBLEMS["train"], *PROBLEMS["test"]]
    answers = [row["answer"] for row in rows]
    said = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert gsm8k.right_answer(said, answers) == [1.0] * len(rows)
    columns = {"answer": answers[:4]}
    prediction = EvalPrediction([said[0], said[1], said[0], [{"role": "assistant", "content": "72"}]], columns)
    assert gsm8k.accuracy(prediction) == {"accuracy": 0.5, "answered": 0.75}


def test_prompts_are_conversations_that_keep_the_columns():
    rows = Dataset.from_list(PROBLEMS["test"])
    args = problems.GSM8KArguments(system_prompt="Be brief.", instruction="End with ####.")
    made = problems.make_conversations(rows, "test", args)
    assert made["answer"] == rows["answer"]
    question = PROBLEMS["test"][0]["question"]
    user = {"role": "user", "content": f"{question}\n\nEnd with ####."}
    assert made[0]["prompt"] == [{"role": "system", "content": "Be brief."}, user]
    made = problems.make_conversations(rows, "test", problems.GSM8KArguments())
    assert [message["role"] for message in made[0]["prompt"]] == ["user"]


@pytest.mark.parametrize("answer", ["It is 3.", None])
def test_an_answer_without_its_mark_is_refused_by_row(answer):
    rows = Dataset.from_dict({"question": ["1+1?", "1+2?"], "answer": ["#### 2", answer]})
    with pytest.raises(ValueError, match=r"test row 1: answer=.* has no #### before its final number"):
        problems.make_conversations(rows, "test", problems.GSM8KArguments())


def test_two_steps_on_the_shipped_problems(tmp_path, tiny_base):
    """An entropy bonus stands in for right answers, which random text lacks, so that there is something to learn."""
    flags = ["--model_name_or_path", tiny_base, "--dtype", "float32", "--bf16", "false", "--entropy_coef", "0.1"]
    flags += ["--dataset_name", "json", "--data_files", '{"train": "problems.jsonl", "test": "test.jsonl"}']
    flags += ["--gradient_accumulation_steps", "1", "--num_mini_batches", "1", "--max_completion_length", "6"]
    flags += ["--num_ppo_epochs", "2", "--eval_steps", "1", "--save_steps", "2"]
    results, out = run_copy("gsm8k/gsm8k.py", tmp_path, *flags), tmp_path / "out"
    assert {"before_accuracy", "before_answered", "after_accuracy", "after_reward", "train_loss"} <= results.keys()
    adapter = load_file(out / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert (out / "critic/critic.safetensors").is_file()
    assert (out / "checkpoint-2/trainer_state.json").is_file()
