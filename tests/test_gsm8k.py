"""The problems that ship are right, answers are read as people mean them, and the recipe runs on a tiny base."""

import importlib.util
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import gsm8k
import problems
import pytest
from build_tiny_base import build
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, EvalPrediction

from helpers.recipes import run_copy
from hfppo import PPOConfig
from hfppo.cli import PPOParser

FOLDER = Path(gsm8k.__file__).parent
FILES = {"train": str(FOLDER / "problems.jsonl"), "test": str(FOLDER / "test.jsonl")}
PROBLEMS = {name: [json.loads(line) for line in Path(file).read_text().splitlines()] for name, file in FILES.items()}
NUMBER = r"\d*\.?\d+"
# Numbers that a question gives in words, and those that its units stand for.
WORDS = {"half": 2, "third": 3, "quarter": 4, "twice": 2, "two": 2, "dozen": 12, "hours": 60, "%": 100}
WORDS |= {"kilometers": 1000}
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


def value(calculation: str) -> Fraction:
    """What a calculation gives, exactly."""
    assert re.fullmatch(r"[\d.+\-*/]+", calculation), calculation
    return eval(re.sub(NUMBER, lambda number: f"Fraction('{number[0]}')", calculation))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny"))
    build(folder)
    return folder


@pytest.mark.parametrize("problem", [*PROBLEMS["train"], *PROBLEMS["test"]], ids=lambda p: p["question"][:30])
def test_a_shipped_problem_adds_up(problem):
    """Each step is right and uses what the question, its units or an earlier step gives; the last is the answer."""
    question, (reasoning, final) = problem["question"], problem["answer"].split("\n#### ")
    known = {Fraction(n) for n in re.findall(NUMBER, question.replace(",", ""))}
    known |= {Fraction(n) for word, n in WORDS.items() if word in question.lower()}
    steps = re.findall(r"(\S+) = \$?<<([^=]+)=([^>]+)>>(-?[\d.]*\d)", reasoning)
    assert len(steps) == reasoning.count("<<") == reasoning.count("\n") + 1 >= 2
    for written, calculation, result, shown in steps:
        assert written == calculation
        assert result == shown
        assert value(calculation) == Fraction(result)
        assert {Fraction(n) for n in re.findall(NUMBER, calculation)} <= known
        known.add(abs(Fraction(result)))
    assert final.replace(",", "") == steps[-1][2]
    assert re.fullmatch(r"-?\d{1,3}(,\d{3})*(\.\d+)?", final)


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
        ("####", None),
        (r"\boxed{7", None),
        (r"\boxed{}", None),
        ("", None),
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


def test_answers_are_compared_outside_of_the_main_thread():
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert pool.submit(problems.is_right, r"\boxed{\frac{144}{2}}", "#### 72").result()


def test_an_answer_that_takes_for_ever_is_wrong(monkeypatch):
    limits = []
    monkeypatch.setattr(problems, "verify", lambda *_, timeout_seconds: limits.append(timeout_seconds) or False)
    assert not problems.is_right("#### 9^9^9^9", "#### 72")
    assert limits == [5]


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


def test_other_columns_are_refused_by_name():
    rows = Dataset.from_list([{"prompt": "1+1?", "answer": "#### 2"}])
    with pytest.raises(ValueError, match="train has the columns prompt, answer; GSM8K's are question and answer"):
        problems.make_conversations(rows, "train", problems.GSM8KArguments())


@pytest.mark.parametrize("answer", ["It is 3.", None])
def test_an_answer_without_its_mark_is_refused_by_row(answer):
    rows = Dataset.from_dict({"question": ["1+1?", "1+2?"], "answer": ["#### 2", answer]})
    with pytest.raises(ValueError, match=r"test row 1: answer=.* has no #### before its final number"):
        problems.make_conversations(rows, "test", problems.GSM8KArguments())


def test_two_steps_on_the_shipped_problems(tmp_path, tiny):
    """An entropy bonus stands in for right answers, which random text lacks, so that there is something to learn."""
    flags = ["--model_name_or_path", tiny, "--dtype", "float32", "--bf16", "false", "--entropy_coef", "0.1"]
    flags += ["--dataset_name", "json", "--data_files", '{"train": "problems.jsonl", "test": "test.jsonl"}']
    flags += ["--gradient_accumulation_steps", "1", "--num_mini_batches", "1", "--max_completion_length", "6"]
    flags += ["--num_ppo_epochs", "2", "--eval_steps", "1", "--save_steps", "2"]
    results, out = run_copy("gsm8k/gsm8k.py", tmp_path, *flags), tmp_path / "out"
    assert {"before_accuracy", "before_answered", "after_accuracy", "after_reward", "train_loss"} <= results.keys()
    adapter = load_file(out / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert (out / "critic/critic.safetensors").is_file()
    assert (out / "checkpoint-2/trainer_state.json").is_file()


@pytest.mark.parametrize(("file", "rollouts"), [("gsm8k.yaml", 15 * 29), ("gsm8k_afternoon.yaml", 174)])
def test_the_yaml_has_the_sizes_it_speaks_of(file, rollouts):
    parser = PPOParser((gsm8k.GSM8KArguments, PPOConfig, gsm8k.GSM8KActor))
    flags = ["--config", str(FOLDER / file), "--use_cpu", "true"]
    script_args, args, model_args = parser.parse_args_and_config(flags)
    assert args.num_train_epochs * (7473 // args.rollout_size_per_process) == rollouts
    assert (script_args.dataset_name, script_args.dataset_config) == ("openai/gsm8k", "main")
    assert (script_args.train_split, script_args.test_split) == ("train", "test")
    assert args.rollout_size_per_process == 256
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 64
    assert (args.num_mini_batches, args.num_ppo_epochs, args.updates_per_rollout) == (4, 1, 4)
    assert (args.learning_rate, args.critic_learning_rate) == (5e-5, 2.5e-4)
    assert (args.cliprange, args.gamma, args.lam, args.kl_coef) == (0.2, 1.0, 1.0, 0.001)
    assert args.max_prompt_length == 512
    assert args.max_tokens_per_micro_batch == 8 * (args.max_prompt_length + args.max_completion_length)
    assert args.bf16
    assert args.eval_steps % args.updates_per_rollout == args.save_steps % args.updates_per_rollout == 0
    assert model_args.model_name_or_path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (model_args.use_peft, model_args.lora_dropout, model_args.lora_target_modules) == (True, 0.0, "all-linear")


def test_without_math_verify_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    spec = importlib.util.spec_from_file_location("without_math_verify", FOLDER / "problems.py")
    with pytest.raises(ImportError, match="pip install math-verify"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_tiny_base_is_a_chat_model_that_takes_any_text(tiny, tmp_path):
    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    text = "<<48/2=24>>24\n\t naïve 请问 — 🙂  $5 "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown == "system: S<eos>\nuser: Q<eos>\nassistant: "
    build(str(tmp_path))
    for file in ("tokenizer.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (Path(tiny) / file).read_bytes()
