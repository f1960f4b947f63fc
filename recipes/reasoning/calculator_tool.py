"""The calculator, and the chat template and parser with which a model of ChatML calls it."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
        ValueError: the model's own template is not ChatML.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    if "<|im_start|>" not in tokenizer.get_vocab():
        raise ValueError(f"model_name_or_path={path!r} has no token <|im_start|>; this recipe's template is ChatML")
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer
