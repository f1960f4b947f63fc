"""Teach a small chat model to call a calculator, although its chat template knows no tools.

    accelerate launch recipes/calculator.py --config recipes/calculator.yaml

The same without the Hub:

    python recipes/build_smollm2.py
    accelerate launch --cpu --num_processes 1 recipes/calculator.py --config recipes/calculator.yaml \\
        --model_name_or_path out/smollm2

reasoning-gym draws the questions and scores the last message of each completion. `--use_tool false` asks the same
questions without the calculator. docs/calculator.md explains the template and the parser.
"""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reasoning import Answers, ReasoningActor, ReasoningArguments, draw_questions, make_reward, make_rows
from run import RecipeParser, actor_config, evaluate, init_kwargs, run
from transformers import AutoTokenizer, EvalPrediction, PreTrainedTokenizerBase

from hfppo import PPOConfig, PPOTrainer

OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}
LONGEST = 40  # characters of an expression

# ChatML, with a call as `calc(7 * 8)`. An argument has no name if it is called `expression`.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] }}("
    "{% for name, value in call['function']['arguments'].items() %}"
    "{{ '' if name == 'expression' else name + '=' }}{{ value }}"
    "{% endfor %})"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
# The way back: a turn that is such a call, as a message.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>calc)\(",
            "close_pattern": r"\)(?=<\|im_end\|>)",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": {"expression": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}


@dataclass
class CalculatorArguments(ReasoningArguments):
    """Arguments of this recipe."""

    use_tool: bool = field(default=True, metadata={"help": "Whether the model has the calculator."})


def calc(expression: str) -> str:
    """
    Compute the value of an expression.

    Args:
        expression: of numbers, +, -, * and parentheses
    """
    if len(expression) > LONGEST:
        raise ValueError("too long")

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in OPERATORS:
            parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return OPERATORS[type(node.op)](*map(value, parts))
        raise ValueError("only numbers, +, -, * and ()")

    return str(value(ast.parse(expression.strip(), mode="eval").body))


def demonstration(use_tool: bool) -> list[dict[str, Any]]:
    """Return a conversation that shows what to do: one question and its answer."""
    call = {"type": "function", "function": {"name": "calc", "arguments": {"expression": "7 * 8"}}}
    steps = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": "calc", "content": "56"}]
    question, answer = {"role": "user", "content": "Calculate 7 * 8."}, {"role": "assistant", "content": "56"}
    return [question, *(steps if use_tool else []), answer]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer of ChatML with the template and the parser of this recipe.

    Raises:
        ValueError: the model's own template is no ChatML.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    if "<|im_start|>" not in tokenizer.get_vocab():
        raise ValueError(f"model_name_or_path={path!r} has no token <|im_start|>; this recipe's template is ChatML")
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


class ToolAnswers(Answers):
    """A `compute_metrics` like `Answers`, with the share of completions in which the calculator gave a value."""

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        metrics = super().__call__(prediction)
        replies = [[m["content"] for m in messages if m["role"] == "tool"] for messages in prediction.predictions]
        computed = [any("error" not in reply for reply in of_one) for of_one in replies]
        return metrics | {"computed": sum(computed) / len(computed)}


def main(script_args: CalculatorArguments, args: PPOConfig, model_args: ReasoningActor) -> None:
    train_drawn, test_drawn = draw_questions(script_args)
    shown = demonstration(script_args.use_tool)
    train = make_rows(train_drawn, 0, script_args).map(lambda row: {"prompt": shown + row["prompt"]})
    test = make_rows(test_drawn, len(train), script_args).map(lambda row: {"prompt": shown + row["prompt"]})
    reward = make_reward(train_drawn + test_drawn, script_args)
    args.model_init_kwargs = init_kwargs(args, model_args)
    if not script_args.use_tool:  # the YAML file's limits of turns, which a completion of one turn refuses
        args.max_turn_length = args.max_tool_calling_iterations = None
    trainer = PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=load_tokenizer(model_args.model_name_or_path),
        peft_config=actor_config(model_args),
        critic=script_args.critic,
        compute_metrics=ToolAnswers(reward, script_args.answer_pattern),
        tools=[calc] if script_args.use_tool else None,
    )

    def measure(when: str) -> None:
        for mode, do_sample in (("sampled", True), ("greedy", False)):
            evaluate(trainer, f"{when}_{mode}", do_sample)

    run(trainer, measure)


if __name__ == "__main__":
    main(*RecipeParser((CalculatorArguments, PPOConfig, ReasoningActor), allow_abbrev=False).parse_args_and_config())
