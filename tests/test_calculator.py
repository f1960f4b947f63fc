"""The recipe that gives a calculator to a model without tools: template, parser, tool, and a short run."""

import calculator_tool
import pytest
from build_arithmetic_base import small_llama
from build_tiny_base import byte_tokenizer
from transformers import set_seed
from transformers.utils import get_json_schema

from helpers import fake_reasoning_gym
from helpers.recipes import run_copy
from hfppo.environments.chat_format import make_chat_format, parse_turn

QUESTION = {"role": "user", "content": "Calculate 5 + 9."}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory) -> str:
    """A tiny model with ChatML's tokens, as SmolLM2 has them."""
    folder = str(tmp_path_factory.mktemp("chatml"))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]})
    set_seed(0)
    small_llama(tokenizer, hidden_size=64, num_layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def token_ids(chat_format, messages, **options):
    return chat_format.rendered(messages, tokenize=True, return_dict=True, **options)["input_ids"]


def test_template_and_parser_are_inverse(chatml):
    tokenizer = calculator_tool.load_tokenizer(chatml)
    chat_format = make_chat_format(tokenizer, {}, with_tools=True)
    before = [*calculator_tool.demonstration(True), QUESTION]
    call = {"type": "function", "function": {"name": "calc", "arguments": {"expression": "(5 + 9) * 2"}}}
    for message in (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "14"},
    ):
        prefix = token_ids(chat_format, before, add_generation_prompt=True)
        turn = token_ids(chat_format, [*before, message])[len(prefix) :]
        turn = turn[: turn.index(tokenizer.eos_token_id) + 1]
        assert parse_turn(tokenizer, turn, prefix, [get_json_schema(calculator_tool.calc)]) == (message, False)
    text = tokenizer.decode(chat_format.reply_ids([{"role": "tool", "name": "calc", "content": "28"}]))
    assert text == "\n<|im_start|>tool\n28<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("expression", "value"), [("7 * 8", "56"), (" (2 - -3) * 4 ", "20")])
def test_values_of_expressions(expression, value):
    assert calculator_tool.calc(expression) == value


@pytest.mark.parametrize("expression", ["2 ** 9", "1 / 2", "a", "f(1)", "'a' * 9", "True", "9" * 50, "1.5", "007 - 9"])
def test_other_expressions_are_refused(expression):
    with pytest.raises((ValueError, SyntaxError), match=r"only numbers|too long|leading zeros"):
        calculator_tool.calc(expression)


def test_a_model_without_chatml_is_refused(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_name_or_path=.* has no token <\|im_start\|>"):
        calculator_tool.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("player", ["tools", "nothing", "openai", "openai-agents"])
def test_the_recipe_in_small(monkeypatch, chatml, tmp_path, player):
    if player.startswith("openai"):
        pytest.importorskip("uvicorn")
        pytest.importorskip("agents")
    chosen = ["--use_tool", "false"] if player == "nothing" else ["--played_by", player]
    fake_reasoning_gym.install(monkeypatch)
    flags = ["--model_name_or_path", chatml, "--task", "sums", "--task_config", "{}", *chosen]
    results = run_copy("reasoning/calculator.py", tmp_path, *flags, "--num_test_questions", "4")
    assert 0 <= results["after_sampled_accuracy"] <= results["after_sampled_answered"] <= 1
    assert results["after_greedy_computed"] <= 1
    assert ("after_greedy_tools/call_frequency" in results) == (player != "nothing")
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
