"""Unmodified clients, each of which plays the same episode in one conversation; pip install ".[test-agents]"."""

import asyncio
import json
import subprocess
from functools import partial
from types import SimpleNamespace

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


def chat_loop(create):
    """A tutorial's loop; `create` returns the message that follows."""
    messages = [{"role": "user", "content": QUESTION}]
    while calls := getattr(message := create(model="policy", messages=messages, tools=[SCHEMA]), "tool_calls", None):
        messages.append(message)
        for one in calls:
            result = add(**json.loads(one.function.arguments))
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    return message.content


def openai_loop(base_url, api_key, stream=False):
    chat = pytest.importorskip("openai").OpenAI(base_url=base_url, api_key=api_key).chat.completions

    def create(**given):
        if not stream:
            return chat.create(**given).choices[0].message
        with chat.stream(**given) as events:
            return events.get_final_completion().choices[0].message

    return chat_loop(create)


def curl(base_url, api_key, stream=False):
    ask = ["curl", "-s", f"{base_url}/chat/completions", "-H", f"Authorization: Bearer {api_key}", "-d", "@-"]

    def create(**given):
        body = json.dumps({**given, "stream": stream}, default=vars)
        said = subprocess.run(ask, input=body, capture_output=True, text=True).stdout
        first = said.partition("\n")[0].removeprefix("data: ")
        (choice,) = json.loads(first, object_hook=lambda found: SimpleNamespace(**found)).choices
        return choice.delta if stream else choice.message

    return chat_loop(create)


def litellm(base_url, api_key, stream=False):
    found = pytest.importorskip("litellm")

    def create(model, **given):
        answer = found.completion(f"openai/{model}", api_base=base_url, api_key=api_key, stream=stream, **given)
        return (found.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message

    return chat_loop(create)


async def agents_of(base_url, api_key, kind="OpenAIChatCompletionsModel", stream=False):
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)("policy", openai.AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = agents.Agent(name="adder", instructions="add", tools=[agents.function_tool(add)], model=model)
    if not stream:
        return (await agents.Runner.run(agent, QUESTION)).final_output
    result = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def pydantic_of(base_url, api_key, kind="OpenAIChatModel", stream=False, **more):
    pydantic_ai, models = pytest.importorskip("pydantic_ai"), pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=base_url, api_key=api_key)
    model = getattr(models, kind)("policy", provider=provider)
    agent = pydantic_ai.Agent(model, instructions="add", tools=[add], **more)

    async def read(context, events):
        return [event async for event in events]

    return (await agent.run(QUESTION, event_stream_handler=read if stream else None)).output


def langchain(base_url, api_key, stream=False, **more):
    found = pytest.importorskip("langchain_openai")
    model = found.ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, streaming=stream, **more)
    agent = pytest.importorskip("langchain.agents").create_agent(model, [add])
    return agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text


def anthropic_loop(base_url, api_key, stream=False):
    client = pytest.importorskip("anthropic").Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    function = SCHEMA["function"]
    tools = [{"name": "add", "description": function["description"], "input_schema": function["parameters"]}]
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


# Each also with `stream`.
CLIENTS = {
    "openai": openai_loop,
    "curl": curl,
    "openai-agents, chat": agents_of,
    "openai-agents, responses": partial(agents_of, kind="OpenAIResponsesModel"),
    "pydantic-ai, chat": pydantic_of,
    "pydantic-ai, responses": partial(pydantic_of, kind="OpenAIResponsesModel"),
    "langchain, chat": langchain,
    "langchain, responses": partial(langchain, use_responses_api=True),
    "litellm": litellm,
    "anthropic": anthropic_loop,
}


def played(tmp_path, client, say=say, **kwargs):
    """Return what the client returns, and the trainer with its rollout; the sampler's log-probs are the model's."""
    found = []

    def agent(base_url, api_key, **row):
        value = client(base_url, api_key)
        found.append(asyncio.run(value) if asyncio.iscoroutine(value) else value)
        return 1.0

    trainer = saying_trainer(tmp_path, agent, say, **kwargs)
    trainer.collector.sampler.model = trainer.model
    return found, trainer, collect(trainer, 1, training=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_an_unmodified_client_has_one_conversation(tmp_path, monkeypatch, client, stream):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    found, trainer, (rollout, transcript, metrics) = played(tmp_path, partial(CLIENTS[client], stream=stream))
    assert metrics["agent/failed_frac"] == 0
    assert found == [ANSWER]
    turns = [f"{CALLS[0]}{EOS}<tool>5{EOS}", f"{CALLS[1]}{EOS}<tool>11{EOS}", f"{ANSWER}{EOS}"]
    assert text_of(trainer, rollout) == "<assistant>".join(turns)
    assert text_of(trainer, rollout, 0, rollout.mask) == f"{CALLS[0]}{EOS}{CALLS[1]}{EOS}{ANSWER}{EOS}"
    assert [message["role"][0] for message in transcript.completions[0]] == list("atata")
    assert metrics["mismatch/max"] < 1e-4


def test_typed_output_is_a_call(tmp_path):
    typed = [CALLS[0], call("final_result", response=11)]
    found, _, (*_, metrics) = played(
        tmp_path,
        lambda base_url, api_key: pydantic_of(base_url, api_key, output_type=int),
        lambda prompt: typed["<tool>" in prompt],
    )
    assert found == [11]
    assert (metrics["agent/conversations"], metrics["turns/mean"]) == (1.0, 2.0)


@pytest.mark.parametrize("kind", ["ToolCallingAgent", "CodeAgent"])
def test_a_client_that_rewrites_the_models_messages_begins_conversations(tmp_path, kind):
    smolagents = pytest.importorskip("smolagents")

    def client(base_url, api_key):
        model = smolagents.OpenAIModel("policy", api_base=base_url, api_key=api_key)
        agent = getattr(smolagents, kind)([smolagents.tool(add)], model, verbosity_level=0, max_steps=3)
        return agent.run(QUESTION)

    # smolagents' own prompt is longer than the model.
    _, _, (*_, metrics) = played(tmp_path, client, positions=20_000, config={"max_prompt_length": None})
    assert metrics["agent/conversations"] == metrics["turns/mean"] > 1
    assert metrics["mismatch/max"] < 1e-4


def test_litellm_knows_that_a_conversation_is_too_long(tmp_path):
    found = pytest.importorskip("litellm")

    def client(base_url, api_key):
        ask = partial(found.completion, "openai/policy", api_base=base_url, api_key=api_key)
        with pytest.raises(found.exceptions.ContextWindowExceededError):
            ask(messages=[{"role": "user", "content": "a" * 500}])
        return ask(messages=[{"role": "user", "content": "a"}]).choices[0].message.content

    assert played(tmp_path, client, lambda prompt: ANSWER)[0] == [ANSWER]


def test_a_coding_harness_has_one_conversation(tmp_path, monkeypatch):
    """mini-swe-agent asks through litellm; its last command prints a line that it knows."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    agents = pytest.importorskip("minisweagent.agents.default")
    environments = pytest.importorskip("minisweagent.environments.local")
    models = pytest.importorskip("minisweagent.models.litellm_model")
    (tmp_path / "end").write_text("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 11")  # the policy has no capitals
    commands = ["expr 2 + 3", "sh end"]

    def client(base_url, api_key):
        reached = {"api_base": base_url, "api_key": api_key}
        model = models.LitellmModel(model_name="openai/policy", model_kwargs=reached, cost_tracking="ignore_errors")
        templates = {"system_template": "Use bash.", "instance_template": "{{task}}"}
        agent = agents.DefaultAgent(model, environments.LocalEnvironment(cwd=str(tmp_path)), **templates)
        return agent.run(QUESTION)["submission"]

    # Its observations are longer than the model.
    long = {"positions": 20_000, "config": {"max_prompt_length": None, "max_completion_length": 2_000}}
    found, trainer, (rollout, _, metrics) = played(
        tmp_path, client, lambda prompt: call("bash", command=commands[prompt.count("<tool>")]), **long
    )
    assert found == ["11\n"]
    assert (metrics["agent/conversations"], metrics["turns/mean"]) == (1.0, 2.0)
    assert "<returncode>0</returncode>" in text_of(trainer, rollout)
    assert metrics["mismatch/max"] < 1e-4
