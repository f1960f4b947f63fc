"""Two agents that use the calculator, as you may have them already; docs/your_agent.md explains them.

    pip install openai openai-agents
    accelerate launch recipes/reasoning/calculator.py --config recipes/reasoning/calculator.yaml --played_by openai

`loop` is a loop of the openai client, and `openai_agents` uses the package of that name. Both know nothing of hfppo.
"""

import json
from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from calculator_tool import calc
from openai import AsyncOpenAI, OpenAI
from transformers.utils import get_json_schema

MOST_CALLS = 2  # a question, and the calculator's answer
# A client takes long to make, and copies of one share its connections.
UNKNOWN = {"base_url": "http://127.0.0.1/v1", "api_key": "none"}
CLIENT, ASYNC_CLIENT = OpenAI(**UNKNOWN), AsyncOpenAI(**UNKNOWN)
set_tracing_disabled(True)


def loop(base_url: str, api_key: str, prompt: list[dict[str, Any]], **row: Any) -> str | None:
    """Return the answer to a question."""
    client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), list(prompt)
    for _ in range(MOST_CALLS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[get_json_schema(calc)])
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer(call.function.arguments)})
        if not message.tool_calls:
            break
    return message.content


def answer(arguments: str) -> str:
    """Return what the calculator says to a call."""
    try:
        return calc(**json.loads(arguments))
    except Exception as error:
        return str({"error": str(error)})


async def openai_agents(base_url: str, api_key: str, prompt: list[dict[str, Any]], **row: Any) -> str | None:
    """Return the answer to a question."""
    client = ASYNC_CLIENT.with_options(base_url=base_url, api_key=api_key)
    model = OpenAIChatCompletionsModel("policy", client)
    agent = Agent(name="calculator", tools=[function_tool(calc)], model=model)
    try:
        result = await Runner.run(agent, items(prompt), max_turns=MOST_CALLS)
    except MaxTurnsExceeded:
        return None
    return result.final_output


def items(prompt: list[dict[str, Any]]) -> list[Any]:
    """Return messages as openai-agents takes them."""
    made: list[Any] = []
    for message in prompt:
        for call in message.get("tool_calls") or []:
            arguments = json.dumps(call["function"]["arguments"])
            made.append({"type": "function_call", "call_id": "shown", "name": "calc", "arguments": arguments})
        if message["role"] == "tool":
            made.append({"type": "function_call_output", "call_id": "shown", "output": message["content"]})
        elif message.get("content"):
            made.append({"role": message["role"], "content": message["content"]})
    return made
