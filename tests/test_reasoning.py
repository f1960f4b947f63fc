"""The recipe for reasoning-gym's tasks, on a stand-in for it: questions, answers, scores, a run, and wrong flags."""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import EvalPrediction

from helpers import fake_reasoning_gym
from helpers.processes import run_python
from helpers.recipes import run_copy

MIXTURE = {"datasets": [{"name": "sums", "weight": 3, "config": {"largest": 50}}, {"name": "letters"}]}


@pytest.fixture(scope="module")
def reasoning():
    with pytest.MonkeyPatch.context() as patch:
        fake_reasoning_gym.install(patch)
        yield importlib.import_module("reasoning")
        del sys.modules["reasoning"], sys.modules["reasoning_tasks"]


@pytest.fixture(scope="module")
def tasks(reasoning):
    return sys.modules["reasoning_tasks"]


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def answers(folder: Path, when: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{when}_answers.jsonl").read_text().splitlines()]


def test_a_run_leaves_answers_before_and_after_and_resumes(tmp_path, tiny_base, reasoning, capsys):
    flags = [
        *("--model_name_or_path", tiny_base, "--task", "letters", "--task_config", "{}", "--answer_pattern", "(?s).+"),
        *("--strict", "false", "--num_test_questions", "4", "--save_steps", "1"),
    ]
    straight, resumed = tmp_path / "straight/out", tmp_path / "resumed/out"
    results = run_copy("reasoning/reasoning.py", straight.parent, *flags)
    for when in ("before", "after"):
        rows = answers(straight, when)
        assert [row["question"] for row in rows] == [row["question"] for row in answers(straight, "before")]
        assert len(rows) == 4
        for mode in ("sampled", "greedy"):
            scores = [row[f"{mode}_score"] for row in rows]
            assert results[f"{when}_{mode}_rewards/answer_score/mean"] == pytest.approx(sum(scores) / 4)
            assert results[f"{when}_{mode}_accuracy"] == sum(score >= 1 for score in scores) / 4
            assert 0 <= results[f"{when}_{mode}_answered"] <= 1
    shown = capsys.readouterr().out
    assert "before, greedy" in shown
    assert "after, greedy" in shown
    assert "Write" in shown
    moved = load_file(straight / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in moved.items() if "lora_B" in name)

    resumed.mkdir(parents=True)
    (straight / "checkpoint-1").rename(resumed / "checkpoint-1")
    run_copy("reasoning/reasoning.py", resumed.parent, *flags, "--resume_from_checkpoint", "true")
    assert not list(resumed.glob("before_*"))
    assert answers(resumed, "after") == answers(straight, "after")
    again = load_file(resumed / "adapter_model.safetensors")
    assert all((moved[name] == again[name]).all() for name in moved)


def test_no_training_question_is_one_of_the_test(tasks):
    args = tasks.ReasoningArguments(task="sums", num_train_questions=300, num_test_questions=30)
    train, test = tasks.draw_questions(args)
    held_out = {entry["question"] for _, entry in test}
    assert len(test) == 30
    assert 20 <= len(held_out) <= 30
    assert 0 < len(train) < 300, "some of 300 draws of 100 questions are among the 30"
    assert not held_out & {entry["question"] for _, entry in train}
    assert [entry for _, entry in tasks.draw_questions(args)[0]] == [entry for _, entry in train]
    other = tasks.ReasoningArguments(task="sums", num_train_questions=300, train_seed=5000)
    assert tasks.draw_questions(other)[0][0][1] != train[0][1]


def test_rows_are_conversations_with_the_number_of_their_entry(tasks):
    args = tasks.ReasoningArguments(task="sums", num_train_questions=5, system_prompt="Be brief.")
    train, _ = tasks.draw_questions(args)
    rows = tasks.make_rows(train, 7, args)
    assert rows["entry"] == list(range(7, 7 + len(train)))
    assert rows["answer"] == [entry["answer"] for _, entry in train]
    user = {"role": "user", "content": f"{train[0][1]['question']}\n\nAnswer with just the result."}
    assert rows[0]["prompt"] == [{"role": "system", "content": "Be brief."}, user]


def test_a_mixture_scores_each_answer_by_its_own_task(tasks):
    args = tasks.ReasoningArguments(task="composite", task_config=json.dumps(MIXTURE), num_train_questions=200)
    train, _ = tasks.draw_questions(args)
    sources = [entry["metadata"]["source_dataset"] for _, entry in train]
    assert 0.65 < sources.count("sums") / len(sources) < 0.85, "weights are 3 to 1, a missing one is 1"
    assert max(int(e["answer"]) for _, e in train if e["answer"].isdigit()) > 18, "numbers go to 50"
    reward = tasks.make_reward(train, args)
    a_sum, some_letters = sources.index("sums"), sources.index("letters")
    right = train[a_sum][1]["answer"]
    assert reward(said(right, right, "ab", "ab"), [a_sum, some_letters] * 2) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("pattern", "completion", "wanted"),
    [
        (None, " 7.\n", "7."),
        (r"-?\d+", "2 + 5 = 7", "7"),
        (r"-?\d+", "It is -4, I think.", "-4"),
        (r"-?\d+", "seven", None),
        (r"(?s)<answer>(.*?)</answer>", "<answer>5</answer> no, <answer>\n 7 </answer>", "7"),
        (r"(?s)<answer>(.*?)</answer>", "<answer>7", None),
    ],
)
def test_where_the_answer_is_found(tasks, pattern, completion, wanted):
    assert tasks.find_answer(completion, pattern) == wanted


@pytest.mark.parametrize(("strict", "wanted"), [(False, [1.0, 0.5, 0.0, 0.0]), (True, [1.0, 0.0, 0.0, 0.0])])
def test_partial_scores_and_strict_ones(tasks, strict, wanted):
    args = tasks.ReasoningArguments(task="sums", strict=strict, answer_pattern=r"\d+")
    task = tasks.create_task("sums", {}, 1, 0)
    drawn = [(task, {"question": "2 + 5?", "answer": "7", "metadata": {}})]
    reward = tasks.make_reward(drawn, args)
    texts = said("2 + 5 = 7", "It is 17", "8", "seven")
    assert reward(completions=texts, entry=[0] * 4, prompts=[""] * 4) == wanted
    measure = tasks.Answers(reward, args.answer_pattern)
    assert measure(EvalPrediction(texts, {"entry": [0] * 4})) == {"accuracy": 0.25, "answered": 0.75}
    assert measure.rows[1] == {"completion": "It is 17", "score": wanted[1]}


def test_the_table_cannot_be_broken_by_what_the_model_writes(tmp_path, tasks):
    row = {"question": "2 + 5?", "answer": "7", "greedy": "\x1b[31m[bold]7", "greedy_score": 0.5}
    (tmp_path / "after_answers.jsonl").write_text(json.dumps(row) + "\n")
    args = tasks.ReasoningArguments(task="sums", num_test_questions=3)
    test = tasks.make_rows(tasks.draw_questions(args)[1], 0, args)
    table = tasks.answer_table(test, tmp_path, 1)
    cells = [next(iter(column.cells)).plain for column in table.columns]
    assert cells == [test[0]["question"], test[0]["answer"], "<U+001B>[31m[bold]7", "0.50"]


def mixture(part: dict) -> dict:
    return {"task": "composite", "task_config": {"datasets": [part]}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"task": "sum"}, "task='sum' is not a task of reasoning-gym; it has sums; "),
        ({"task_config": '{"largst": 3}'}, "task='sums' cannot be made with task_config={'largst': 3}: .*largst"),
        ({"task_config": {"largest": 0}}, "task_config={'largest': 0}: largest must be positive"),
        ({"task_config": '{"seed": 3}'}, "task_config sets seed, which would be the same for training and test; set "),
        (mixture({"name": "sums", "config": {"size": 3}}), "task_config sets size"),
        ({"test_seed": 2048}, "train_seed=0 and test_seed=2048 would draw the same questions; set them at least 2049"),
        ({"answer_pattern": "(7"}, r"answer_pattern='\(7' is not a regular expression: missing \)"),
        ({"task_config": {"largest": 1}}, "num_test_questions=96 holds out every question that task='sums' has drawn"),
    ],
)
def test_wrong_arguments_are_refused_by_name(tasks, given, wanted):
    with pytest.raises(ValueError, match=wanted):
        tasks.draw_questions(tasks.ReasoningArguments(**{"task": "sums", **given}))


@pytest.mark.slow
def test_the_real_tasks_are_drawn_and_scored_as_the_stand_ins_are():
    """In another process: this one has the stand-in."""
    try:
        importlib.metadata.distribution("reasoning-gym")  # an import would find the stand-in
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("reasoning-gym is not installed; one of its dependencies needs a C compiler")
    code = """
import reasoning_tasks as tasks
config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
mixture = {"datasets": [{"name": "chain_sum", "weight": 2, "config": config}, {"name": "spell_backward"}]}
args = tasks.ReasoningArguments(task="composite", task_config=mixture, num_train_questions=50)
train, test = tasks.draw_questions(args)
assert {entry["metadata"]["source_dataset"] for _, entry in train} == {"chain_sum", "spell_backward"}
rows = tasks.make_rows(train, 0, args)
said = [[{"role": "assistant", "content": f" {answer}\\n"}] for answer in rows["answer"]]
assert tasks.make_reward(train, args)(said, rows["entry"]) == [1.0] * len(rows)
"""
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr[-3000:]
