"""Unmodified clients, each of which plays the same episode in one conversation; pip install ".[test-agents]"."""

import asyncio
import json

import pytest
from transformers.utils import get_json_schema

from helpers.agents import EOS, add, call, collect, text_of
from helpers.endpoint import saying_trainer

pytest.importorskip("uvicorn")
CALLS = [call("add", a=2, b=3), "i add " + call("add", a=7, b=4)]
ANSWER = "the  answer is 11"
SCHEMA = get_json_schema(add)
QUESTION = "2+3, then 7+4?"


def say(prompt: str) -> str:
    return [*CALLS, ANSWER][prompt.count("<tool>")]


def openai_loop(base_url, api_key, stream=False):
    client = pytest.importorskip("openai").OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        given = {"model": "policy", "messages": messages, "tools": [SCHEMA]}
        if stream:
            with client.chat.completions.stream(**given) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**given).choices[0].message
        messages.append(
            {key: value for key, value in message.model_dump().items() if key in ("role", "content", "tool_calls")}
        )
        if not message.tool_calls:
            return message.content
        for one in message.tool_calls:
            result = add(**json.loads(one.function.arguments))
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})


def openai_stream(base_url, api_key):
    return openai_loop(base_url, api_key, stream=True)


def agents_of(base_url, api_key, kind):
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)("policy", openai.AsyncOpenAI(base_url=base_url, api_key=api_key))
    return agents, agents.Agent(name="adder", instructions="add", tools=[agents.function_tool(add)], model=model)


async def agents_chat(base_url, api_key):
    agents, agent = agents_of(base_url, api_key, "OpenAIChatCompletionsModel")
    return (await agents.Runner.run(agent, QUESTION)).final_output


async def agents_responses(base_url, api_key):
    agents, agent = agents_of(base_url, api_key, "OpenAIResponsesModel")
    return (await agents.Runner.run(agent, QUESTION)).final_output


async def streamed(base_url, api_key, kind):
    agents, agent = agents_of(base_url, api_key, kind)
    result = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def agents_chat_stream(base_url, api_key):
    return await streamed(base_url, api_key, "OpenAIChatCompletionsModel")


async def agents_responses_stream(base_url, api_key):
    return await streamed(base_url, api_key, "OpenAIResponsesModel")


async def pydantic_of(base_url, api_key, kind):
    pydantic_ai, models = pytest.importorskip("pydantic_ai"), pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = pydantic_ai.Agent(getattr(models, kind)("policy", provider=provider), instructions="add", tools=[add])
    return (await agent.run(QUESTION)).output


async def pydantic_chat(base_url, api_key):
    return await pydantic_of(base_url, api_key, "OpenAIChatModel")


async def pydantic_responses(base_url, api_key):
    return await pydantic_of(base_url, api_key, "OpenAIResponsesModel")


def langchain(base_url, api_key, **more):
    model = pytest.importorskip("langchain_openai").ChatOpenAI(
        model="policy", base_url=base_url, api_key=api_key, **more
    )
    agent = pytest.importorskip("langchain.agents").create_agent(model, [add])
    return agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text


def langchain_responses(base_url, api_key):
    return langchain(base_url, api_key, use_responses_api=True)


def litellm(base_url, api_key):
    completion = pytest.importorskip("litellm").completion
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        given = {"api_base": base_url, "api_key": api_key, "messages": messages, "tools": [SCHEMA]}
        message = completion("openai/policy", **given).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for one in message.tool_calls:
            result = add(**json.loads(one.function.arguments))
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})


def anthropic_loop(base_url, api_key, stream=False):
    client = pytest.importorskip("anthropic").Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    function = SCHEMA["function"]
    tools = [
        {"name": "add", "description": function["description"], "input_schema": function["parameters"]},
    ]
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        given = {"model": "policy", "max_tokens": 99, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**given) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**given)
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return message.content[0].text
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": add(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def anthropic_stream(base_url, api_key):
    return anthropic_loop(base_url, api_key, stream=True)


CLIENTS = [
    openai_loop, openai_stream, agents_chat, agents_chat_stream, agents_responses, agents_responses_stream,
    pydantic_chat, pydantic_responses, langchain, langchain_responses, litellm, anthropic_loop, anthropic_stream,
]  # fmt: skip
NEEDS = {"agents": "agents", "pydantic": "pydantic_ai", "langchain": "langchain_openai"}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_an_unmodified_client_has_one_conversation(tmp_path, monkeypatch, client):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    first = client.__name__.partition("_")[0]
    pytest.importorskip(NEEDS.get(first, first))
    found = []

    def agent(base_url, api_key, **row):
        value = client(base_url, api_key)
        found.append(asyncio.run(value) if asyncio.iscoroutine(value) else value)
        return 1.0

    trainer = saying_trainer(tmp_path, agent, say)
    rollout, transcript, metrics = collect(trainer, 1, training=True)
    assert metrics["agent/failed_frac"] == 0
    assert found == [ANSWER]
    turns = [f"{CALLS[0]}{EOS}<tool>5{EOS}", f"{CALLS[1]}{EOS}<tool>11{EOS}", f"{ANSWER}{EOS}"]
    assert text_of(trainer, rollout) == "<assistant>".join(turns)
    assert text_of(trainer, rollout, 0, rollout.mask) == f"{CALLS[0]}{EOS}{CALLS[1]}{EOS}{ANSWER}{EOS}"
    assert [message["role"][0] for message in transcript.completions[0]] == list("atata")


def test_a_client_that_rewrites_the_models_messages_begins_conversations(tmp_path):
    smolagents = pytest.importorskip("smolagents")

    def agent(base_url, api_key, **row):
        model = smolagents.OpenAIModel("policy", api_base=base_url, api_key=api_key)
        tool = smolagents.tool(add)
        return float(bool(smolagents.ToolCallingAgent([tool], model, verbosity_level=0, max_steps=3).run(QUESTION)))

    # smolagents' own prompt is longer than the model.
    trainer = saying_trainer(tmp_path, agent, say, positions=20_000, config={"max_prompt_length": None})
    _, _, metrics = collect(trainer, 1, training=True)
    assert metrics["agent/conversations"] == metrics["turns/mean"] > 1
