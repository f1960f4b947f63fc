"""The endpoint of an agent: its contract line by line, exact tokens, failures, commands, resuming."""

import asyncio
import json
import math
import subprocess
import sys
import threading
import time

import httpx2
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers.utils import get_json_schema

from helpers.agents import EOS, TALK, add, agent_trainer, call, collect, count_messages, talking_trainer, text_of
from helpers.endpoint import Nodding, chat, listening, nodding, said, saying_trainer, wandering
from helpers.runs import assert_same_tensors
from hfppo import Command, TokenTraceCallback
from hfppo.checks.engine import deepspeed_faults, whole_faults
from hfppo.endpoint.anthropic import read_anthropic
from hfppo.endpoint.chat import logger
from hfppo.endpoint.command import KEPT
from hfppo.environments import episodes
from hfppo.reporting.traces import read_traces, trace_file
from hfppo.state import stream_seed

pytest.importorskip("uvicorn")
LONG = "abc " * 200


def raising(error: BaseException):
    raise error


def refused(response, code: str | None = None):
    """Raise as a client does; return a number that no test expects if the error is another one."""
    if response.status_code != 400 or response.json()["error"]["code"] != code:
        return 99.0
    raise RuntimeError(response.json()["error"]["message"])


async def sleeps(ask):
    ask()
    await asyncio.sleep(60)


# What an agent does, the configuration, and its episode: score, whether the agent failed, limit, calls. The limits of
# those that hang leave the other row its time on a busy machine.
OUTCOMES = {
    "a number": (lambda ask: (ask(), ask("more"), 0.25)[-1], {}, (0.25, 0, "", 2)),
    "None": (lambda ask: (ask(), None)[-1], {}, (None, 0, "", 1)),
    "raises": (lambda ask: (ask(), raising(ValueError("boom"))), {}, (None, 1, "", 1)),
    "exits": (lambda ask: (ask(), sys.exit(3)), {}, (None, 1, "", 1)),
    "no number": (lambda ask: (ask(), "good")[-1], {}, (None, 1, "", 1)),
    "not finite": (lambda ask: (ask(), math.nan)[-1], {}, (None, 1, "", 1)),
    "no call": (lambda ask: 0.5, {}, (None, 0, "", 0)),
    "too many calls": (
        lambda ask: (ask(), refused(ask("more"), "too_many_calls")),
        {"max_tool_calling_iterations": 1},
        (0.0, 0, "unfinished", 1),
    ),
    "too many calls, and a number": (
        lambda ask: (ask(), ask("more"), 0.25)[-1],
        {"max_tool_calling_iterations": 1},
        (0.25, 0, "unfinished", 1),
    ),
    "no room for the next call": (
        lambda ask: (ask(), refused(ask("more"), "context_length_exceeded")),
        {"max_completion_length": 9, "max_prompt_length": 10},
        (0.0, 0, "dropped_result", 1),
    ),
    "a prompt that is too long": (
        lambda ask: refused(ask(LONG), "context_length_exceeded"),
        {"max_prompt_length": 20},
        (None, 1, "", 0),
    ),
    "a cut answer": (lambda ask: (ask(max_tokens=1), 0.25)[-1], {}, (0.25, 0, "cut", 1)),
    "hangs": (lambda ask: (ask(), time.sleep(60)), {"tool_timeout": 2.0}, (0.0, 0, "unfinished", 1)),
    "hangs before its call": (lambda ask: time.sleep(60), {"tool_timeout": 5.0}, (None, 1, "unfinished", 0)),
    "hangs in a coroutine": (sleeps, {"tool_timeout": 2.0}, (0.0, 0, "unfinished", 1)),
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_outcomes_of_agents(tmp_path, caplog, kind):
    play, config, (score, failed, limit, calls) = OUTCOMES[kind]
    agent = listening(play, asynchronous=asyncio.iscoroutinefunction(play))
    trainer = saying_trainer(tmp_path, agent, config=config)
    rollout, _, metrics = collect(trainer, 2, training=True)
    assert rollout.scores[1] == 1.0  # the other row does not notice
    if score is None:
        assert not rollout.loss_mask[0].any()
    else:
        assert rollout.scores[0] == score
        assert rollout.loss_mask[0].any()
    assert metrics["unscorable_frac"] == (score is None) / 2
    assert metrics["agent/failed_frac"] == failed / 2
    assert [name for name in ("cut", "unfinished", "dropped_result") if metrics[f"turns/{name}_frac"]] == (
        [limit] if limit else []
    )
    assert metrics["turns/mean"] == (calls + 1) / 2
    assert ("the agent has failed in 1 of 2 episodes" in caplog.text) == bool(failed)


def test_an_agent_that_always_fails_ends_the_run_with_its_first_error(tmp_path):
    trainer = saying_trainer(tmp_path, lambda **row: raising(KeyError("no such column")))
    with pytest.raises(RuntimeError, match=r"failed in 4 of 4 episodes; the first error: KeyError\('no such column"):
        collect(trainer, training=True)


MESSAGES = [{"role": "user", "content": "go"}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
# Method, path, body (bytes or JSON) and headers of a request, and its status.
REQUESTS = {
    "malformed": ("POST", "chat/completions", b"{", {}, 400),
    "no object": ("POST", "chat/completions", [1], {}, 400),
    "no messages": ("POST", "chat/completions", {"model": "x"}, {}, 400),
    "empty messages": ("POST", "chat/completions", {"messages": []}, {}, 400),
    "a message without a role": ("POST", "chat/completions", {"messages": [{"content": "do not log"}]}, {}, 400),
    "calls that are not JSON": (
        "POST",
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
        {},
        400,
    ),
    "a text that is no object": ("POST", "responses", {"input": "go", "text": "json"}, {}, 400),
    "a tool without a schema": ("POST", "messages", {"messages": MESSAGES, "tools": [{"name": "a"}]}, {}, 400),
    "several answers": ("POST", "chat/completions", {"messages": MESSAGES, "n": 2}, {}, 400),
    "a picture": ("POST", "chat/completions", {"messages": PICTURE}, {}, 400),
    "too large": ("POST", "chat/completions", b" " * (2**24 + 1), {}, 413),
    "another key": ("POST", "chat/completions", {"messages": MESSAGES}, {"Authorization": "Bearer sk-x"}, 401),
    "an unknown path": ("POST", "embeddings", {}, {}, 404),
    "another method": ("GET", "chat/completions", {}, {}, 405),
    "the models": ("GET", "models", {}, {}, 200),
    "a good one": ("POST", "chat/completions", {"messages": [{"role": "user", "content": "do not log"}]}, {}, 200),
}


def test_requests_and_their_status(tmp_path, caplog, capfd):
    caplog.set_level("DEBUG")
    found, forms = {}, []

    def play(ask):
        for name, (method, path, body, headers, _) in REQUESTS.items():
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            headers = {"Authorization": f"Bearer {ask.api_key}", **headers}
            response = httpx2.request(method, f"{ask.base_url}/{path}", headers=headers, **given)
            found[name] = response.status_code
            if not response.is_success:
                forms.append(response.json()["error"].keys())
        return 1.0

    rollout, *_ = collect(saying_trainer(tmp_path, listening(play)), 2)
    assert found == {name: status for name, (*_, status) in REQUESTS.items()}
    assert all(form == {"message", "type", "param", "code"} for form in forms)
    assert rollout.scores.tolist() == [1.0, 1.0]
    assert "do not log" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (
            {"tool_choice": {"type": "any"}, "top_k": 5, "thinking": {"type": "enabled"}},
            ["top_k", "tool_choice", "thinking"],
        ),
        ({"tool_choice": {"type": "auto"}, "temperature": 1.0, "thinking": {"type": "disabled"}}, []),
    ],
)
def test_settings_of_anthropic_that_are_ignored_warn(caplog, given, names):
    logger.warning_once.cache_clear()
    read_anthropic({"messages": [{"role": "user", "content": "go"}], "max_tokens": 5, **given})
    assert [record.args[0] for record in caplog.records] == names


def test_what_an_answer_says(tmp_path, caplog):
    answers = {}
    logger.warning_once.cache_clear()

    def play(ask):
        answers["first"] = ask(temperature=0.2, seed=3).json()
        answers["same"] = ask("go", temperature=0.1, top_p=1).json()
        answers["stopped"] = ask("go", stop=["c"]).json()
        answers["stream"] = chat(
            ask.base_url, ask.api_key, [*ask.messages, *MESSAGES], stream=True, stream_options={"include_usage": True}
        ).text
        return 1.0

    say = lambda prompt: "ab" if "<assistant>ab" not in prompt else "abcd"  # noqa: E731
    trainer = saying_trainer(tmp_path, listening(play), say)
    rollout, transcript, _ = collect(trainer, 2)
    first = answers["first"]
    (choice,) = first["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab"}
    assert (first["object"], first["model"], choice["finish_reason"]) == ("chat.completion", "policy", "stop")
    prompt = len(trainer.processing_class("<user>go 0 <eos><assistant>")["input_ids"])
    assert first["usage"] == {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
    assert answers["stopped"]["choices"][0]["message"]["content"] == "ab"
    # Cut after the token that completes the text, which is trained; the end of the turn is context.
    assert text_of(trainer, rollout, 0).startswith(
        f"ab{EOS}<user>go{EOS}<assistant>abcd{EOS}<user>go{EOS}<assistant>abc"
    )
    assert text_of(trainer, rollout, 0, rollout.mask) == f"ab{EOS}abcd{EOS}abcabcd{EOS}"
    chunks = [json.loads(line.removeprefix("data: ")) for line in answers["stream"].split("\n\n")[:-2]]
    assert answers["stream"].endswith("data: [DONE]\n\n")
    assert chunks[0]["choices"][0]["delta"]["content"] == "abcd"
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"]["completion_tokens"] == 5
    ignored = [record.args[0] for record in caplog.records if "which is ignored" in record.getMessage()]
    assert ignored == ["temperature", "seed"]  # once each
    assert [m["role"][0] for m in transcript.completions[0]] == list("auauaua")
    assert transcript.prompts[0] == [{"role": "user", "content": "go 0 "}]


def test_a_template_may_make_no_tokens_of_an_empty_message(tmp_path):
    options = {"chat_template_kwargs": {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}}
    status = []

    def play(ask):
        status.append(chat(ask.base_url, ask.api_key, [{"role": "user", "content": ""}]).status_code)
        return 1.0

    trainer = saying_trainer(tmp_path, listening(play), config=options)
    rollout, *_ = collect(trainer, 2)
    assert status == [400]
    assert rollout.loss_mask.any(dim=1).tolist() == [False, True]


def test_control_tokens_in_messages_are_text(tmp_path):
    def play(ask):
        ask("x<eos><assistant>y")
        ask("<tool>z")
        return 1.0

    trainer = saying_trainer(tmp_path, listening(play))
    rollout, *_ = collect(trainer, 1)
    prompt = trainer.processing_class.decode(rollout.prompt_ids[0])
    assert prompt == "<user>go 0 <eos><user>x< eos>< assistant>y<eos><assistant>"
    assert text_of(trainer, rollout) == "a<eos><user>< tool>z<eos><assistant>a<eos>"


def calculating(base_url, api_key, prompt, **row):
    """A tutorial's loop with one tool."""
    messages = list(prompt)
    while True:
        message = said(chat(base_url, api_key, messages, tools=[get_json_schema(add)]))
        messages.append({**message, "content": (message["content"] or "") + " "})  # outer spaces do not matter
        if not message.get("tool_calls"):
            return float(len(messages) - len(prompt))
        for one in message["tool_calls"]:
            result = add(**json.loads(one["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})


def test_the_episodes_are_those_of_tools(tmp_path):
    script = [[call("add", a=1, b=2), "x" + call("add", a=3, b=4) * 2, "7"], ["9"]]
    by_tools, text, of_tools = collect(
        agent_trainer(tmp_path, *script, tools=[add], reward_funcs=count_messages), 2, True
    )
    by_agent, same, of_agent = collect(agent_trainer(tmp_path, *script, agent=calculating), 2, True)
    for name in ("prompt_ids", "completion_ids", "mask", "context", "rewards", "scores", "truncated"):
        assert getattr(by_agent, name).equal(getattr(by_tools, name)), name
    assert [[m["role"] for m in of_one] for of_one in same.completions] == [
        [m["role"] for m in of_one] for of_one in text.completions
    ]
    assert of_agent["turns/mean"] == of_tools["turns/mean"] == 2


async def slowly_nodding(base_url, **row):
    await asyncio.sleep(0.01 * (row["prompt"][0]["content"][-1] in "13579"))
    return await asyncio.to_thread(nodding, base_url, **row)


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_training_is_that_of_an_environment_and_resumes(tmp_path, monkeypatch):
    """To the bit, with the seeds of calls: whatever their order; rollouts ahead, and a run that goes on."""

    def sample_turns(self, sample, waiting, greedy):
        prompts = [one.row.prompt_ids + one.ids for one in waiting]
        seeds = [stream_seed(one.row.seed, *ids, 0) for one, ids in zip(waiting, prompts, strict=True)]
        return sample(prompts, seeds, [self.budget(one) for one in waiting])

    monkeypatch.setattr(episodes.EpisodePlayer, "sample_turns", sample_turns)
    monkeypatch.setattr(episodes, "PATIENCE", 5.0)  # the same batches; others round otherwise
    config = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}

    def train(name, resume=None, more=(), **player):
        given = {"environment_factory": None, **player}
        trainer = talking_trainer(tmp_path / name, {**config, **dict(more)}, **given)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return trainer, adapter(tmp_path / name)

    def same(one, other):
        return all(one[name].equal(other[name]) for name in one)

    _, by_environment = train("environment", environment_factory=Nodding)
    played, by_agent = train("agent", agent=nodding)
    assert same(by_agent, by_environment)
    assert same(by_agent, train("coroutine", agent=slowly_nodding)[1])
    assert same(by_agent, train("resumed", tmp_path / "agent/checkpoint-4", agent=nodding)[1])
    logs = [log for log in played.state.log_history if "mismatch/max" in log]
    assert max(log["mismatch/max"] for log in logs) < 1e-4
    assert any(log["turns/mean"] > 1 for log in logs)
    ahead = {"rollouts_ahead": 1}
    _, straight = train("straight", more=ahead, agent=nodding)
    _, resumed = train("resumed ahead", tmp_path / "straight/checkpoint-4", more=ahead, agent=nodding)
    assert same(straight, resumed)
    assert not same(straight, by_agent)


def conversations(trainer, rollout) -> list[str]:
    """The text of each conversation, prompt included."""
    read = rollout.by_conversation().joined()
    shown = zip(read["input_ids"], read["attention_mask"], strict=True)
    return [trainer.processing_class.decode(ids[mask]) for ids, mask in shown]


def test_requests_that_do_not_append_begin_conversations(tmp_path):
    """A helper, a branch, other tools, and a conversation that is full."""

    def play(ask):
        ask()
        start = [*ask.messages]
        chat(ask.base_url, ask.api_key, [{"role": "user", "content": "help"}])
        ask("more")
        chat(ask.base_url, ask.api_key, [*start, {"role": "user", "content": "no"}])
        chat(ask.base_url, ask.api_key, start + ask.messages[2:3], tools=[get_json_schema(add)])
        ask("full" * 5)
        return 1.0

    trainer = saying_trainer(tmp_path, listening(play), config={"max_completion_length": 24})
    rollout, transcript, metrics = collect(trainer, 1, training=True)
    first, end = "<user>go 0 <eos><assistant>a<eos>", "<eos><assistant>a<eos>"
    full = f"{first}<user>more{end}<user>{'full' * 5}{end}"
    assert conversations(trainer, rollout) == [
        f"{first}<user>more{end}", f"<user>help{end}", f"{first}<user>no{end}", f"[add]{first}<user>more{end}", full
    ]  # fmt: skip
    assert text_of(trainer, rollout, 0, rollout.mask) == f"a{EOS}" * 6, "each token once"
    assert (metrics["agent/conversations"], metrics["turns/mean"]) == (5.0, 6.0)
    roles = "".join(message["role"][0] for message in transcript.completions[0])
    assert roles == "a" + "ua" + "ua" + "uaua" + "uaua" + "uauaua"


def test_parallel_calls_get_the_same_answers_in_any_order(tmp_path):
    """Also two of one conversation, and two of one prompt, which get answers of their own."""
    orders = iter([(0, 1, 2, 3), (3, 1, 0, 2)])

    async def agent(base_url, api_key, prompt, **row):
        first = await asyncio.to_thread(chat, base_url, api_key, prompt)
        main = [*prompt, said(first)]
        asked = [[*main, {"role": "user", "content": text}] for text in "bc"] + [
            [{"role": "user", "content": "d"}]
        ] * 2
        calls = []
        for number in next(orders):
            calls.append(asyncio.create_task(asyncio.to_thread(chat, base_url, api_key, asked[number])))
            await asyncio.sleep(0.05)
        return float(len([said(call) for call in await asyncio.gather(*calls)]))

    found = []
    for _ in range(2):
        trainer = talking_trainer(tmp_path, environment_factory=None, agent=agent)
        rollout = trainer.rollout([[{"role": "user", "content": "hi"}]])
        found.append(sorted(conversations(trainer, rollout)))
        assert rollout.scores.tolist() == [4.0]
        assert len(found[-1]) == 4
    assert {*found[0][:2]} == {*found[1][:2]}
    assert len({*found[0]}) == 4


def test_numbers_of_each_conversation_are_those_of_its_own_forward(tmp_path):
    """Log-probs, the sampler's too, and values; after an update that changes nothing, those of a trace."""
    config = {"max_steps": 2, "critic_layers": 1, "bootstrap_truncated": True, "learning_rate": 0.0}
    trace = TokenTraceCallback(num_completions=2)
    trainer = talking_trainer(tmp_path, config, environment_factory=None, agent=wandering, callbacks=[trace])
    torch.manual_seed(0)
    for parameter in trainer.model.critic_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    trainer.train()
    rollout = trainer._run.rollout
    read = rollout.by_conversation()
    assert 3 * len(rollout) < len(read) < 4 * len(rollout)
    assert read.mask.sum() == rollout.mask.sum()
    for row in (read.select(torch.tensor([i])) for i in range(len(read))):
        ids = row.joined()["input_ids"][row.joined()["attention_mask"]][None]
        sampled = F.pad(row.mask, (ids.shape[1] - row.mask.shape[1], 0))
        with torch.no_grad():
            found = trainer.model(ids, torch.ones_like(ids), sampled)
        for name in ("old_logprobs", "rollout_logprobs", "values"):
            expected = found.values if name == "values" else found.logprobs
            assert_close(getattr(row, name)[row.mask], expected[sampled], atol=1e-4, rtol=0)
    assert read.values[read.mask].std() > 1e-2
    for traced in read_traces(trace_file(tmp_path, 1)):
        tokens = [row for row in traced.rows if row.logprob is not None]
        assert max(abs(row.logprob - row.new_logprob) for row in tokens) < 1e-4


GROUPS = {"advantage_estimator": "grpo", "num_generations": 2, "gamma_turn": None, "lam_turn": None}


@pytest.mark.parametrize("config", [{"rollouts_ahead": 1}, {**GROUPS, "loss_reduction": "seq-mean-token-mean"}])
def test_training_on_conversations_resumes_to_the_bit(tmp_path, monkeypatch, config):
    monkeypatch.setattr(episodes, "PATIENCE", 5.0)
    given = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, **config}
    for name, checkpoint in (("straight", None), ("resumed", tmp_path / "straight/checkpoint-2")):
        trainer = talking_trainer(tmp_path / name, given, environment_factory=None, agent=wandering)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
    assert_same_tensors(adapter(tmp_path / "resumed"), adapter(tmp_path / "straight"))
    assert trainer.evaluate(TALK.select(range(3)))["eval_completions/mean_length"] > 0


def test_a_client_that_asks_again_gets_the_answer_it_has_missed(tmp_path):
    """Recorded once; an answer that nobody reads is not recorded."""
    slow = threading.Event()

    def say(prompt):
        slow.wait(20)
        return "b" if "more" in prompt else "a"

    def play(ask):
        for _ in range(2):
            with pytest.raises(httpx2.ReadTimeout):
                ask(timeout=0.3)
        slow.set()
        ask(retries=2)
        ask.messages.pop()
        ask(retries=3)  # as if the answer had been lost on its way
        slow.clear()
        with pytest.raises(httpx2.ReadTimeout):
            ask("more", timeout=0.3)
        time.sleep(0.2)  # the server notices
        slow.set()
        return 0.5

    trainer = saying_trainer(tmp_path, listening(play), say)
    rollout, *_ = collect(trainer, 1)
    assert text_of(trainer, rollout) == f"a{EOS}"
    assert [len(batch) for batch in trainer.collector.sampler.calls] == [1, 1]


def test_a_call_whose_client_has_left_is_not_sampled(tmp_path):
    """The sampler answers row 1 meanwhile."""
    begun, slow = threading.Event(), threading.Event()

    def say(prompt):
        begun.set()
        slow.wait(20)
        return "a"

    def play(ask):
        begun.wait(20)
        with pytest.raises(httpx2.ReadTimeout):
            ask(timeout=0.3)
        time.sleep(0.2)  # the server notices
        slow.set()
        ask.messages[:] = [{"role": "user", "content": "b"}]
        return float(ask().is_success)

    trainer = saying_trainer(tmp_path, listening(play), say, config={"max_tool_calling_iterations": 1})
    rollout, *_ = collect(trainer, 2)
    assert rollout.scores.tolist() == [1.0, 1.0]
    assert trainer.collector.sampler.calls == [["<user>go 1 <eos><assistant>"], ["<user>b<eos><assistant>"]]


def test_the_key_ends_with_the_episode(tmp_path):
    kept = []
    trainer = saying_trainer(tmp_path, listening(lambda ask: kept.append(ask) or float(ask().is_success)))
    rollout, *_ = collect(trainer, 1)
    assert kept[0]().status_code == 401
    assert rollout.scores.tolist() == [1.0]
    assert kept[0].base_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_rewards_by_the_ids_of_answers(tmp_path, path):
    def play(ask):
        first = ask().json()
        body = {"model": "policy", "max_tokens": 5, "messages": MESSAGES, "input": MESSAGES}
        headers = {"Authorization": f"Bearer {ask.api_key}"}
        second = httpx2.post(f"{ask.base_url}/{path}", json=body, headers=headers, timeout=20).json()
        ask("go")
        return {first["id"]: 0.5, second["id"]: 2}

    trainer = saying_trainer(tmp_path, listening(play), lambda prompt: "abc", config={"kl_coef": 0.0})
    rollout, *_ = collect(trainer, 2)
    assert rollout.scores.tolist() == [2.5, 1.0]
    ends = (rollout.completion_ids[0] == trainer.processing_class.eos_token_id) & rollout.mask[0]
    assert rollout.rewards[0][ends].tolist() == [0.5, 2.0, 0.0]
    assert float(rollout.rewards[0].sum()) == 2.5


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (lambda name: {"chatcmpl-1": 1.0}, "a reward to 'chatcmpl-1', which is the id of no answer in its episode"),
        (lambda name: {name: "good"}, "the reward 'good'; return a finite number"),
        (lambda name: {name: math.nan}, "the reward nan; return a finite number"),
    ],
)
def test_rewards_by_id_that_cannot_be_used_fail_the_episode(tmp_path, caplog, rewards, message):
    trainer = saying_trainer(tmp_path, listening(lambda ask: rewards(ask().json()["id"])))
    rollout, _, metrics = collect(trainer, 2, training=True)
    assert rollout.scores.tolist() == [0.0, 1.0]
    assert metrics["agent/failed_frac"] == 0.5
    assert f"agent gave {message}" in caplog.text
    assert all(math.isfinite(x) for name, x in metrics.items() if "turn" in name)


def test_seeds_and_other_outputs(tmp_path):
    """Rows of a prompt share `seed`; what is no number reaches the reward functions, of evaluation and rollout too."""
    seen, given = [], []

    def agent(base_url, api_key, word, seed, episode_seed, **row):
        seen.append((word, seed, episode_seed, sorted(row)))
        chat(base_url, api_key, [{"role": "user", "content": word}])
        return {"word": word}

    def reward(prompts, completions, outputs, **columns):
        given.append((prompts, completions, outputs))
        return [float(len(output["word"])) for output in outputs]

    words = Dataset.from_dict({"word": ["a", "bb", "ccc", "dddd"]})
    config = {"num_generations": 2, "max_steps": 1, "save_strategy": "no"}
    trainer = saying_trainer(tmp_path, agent, dataset=words, eval_dataset=words, reward_funcs=reward, config=config)
    trainer.train()
    assert len({number for *_, number, _ in seen}) == 4  # episodes
    assert len({(word, seed) for word, seed, *_ in seen}) == 2
    assert trainer.evaluate()["eval_reward"] == 2.5
    assert trainer.rollout(word=["bb", "ccc"]).scores.tolist() == [2.0, 3.0]
    assert given[-1] == (
        [[{"role": "user", "content": word}] for word in ("bb", "ccc")],
        [[{"role": "assistant", "content": "a"}]] * 2,
        [{"word": "bb"}, {"word": "ccc"}],
    )


ROW = Dataset.from_dict({"prompt": ["go"], "start": [0]})
# Arguments that cannot be used, the error and its words.
REFUSED = {
    "tools too": ({"tools": [add]}, ValueError, "leave tools and environment_factory out"),
    "a class": ({"agent": dict}, TypeError, "cannot be called; pass a function, or a Command"),
    "a narrow function": ({"agent": lambda base_url, api_key: 0}, TypeError, "unexpected keyword"),
    "a column of its own": (
        {"dataset": ROW.rename_column("start", "api_key")},
        ValueError,
        "column 'api_key', which the trainer",
    ),
    "outputs": ({"dataset": ROW.rename_column("start", "outputs")}, ValueError, "column 'outputs', which the trainer"),
    "candidates": ({"config": {"prompt_candidates": 2}}, ValueError, "an agent writes its prompt later"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_refused(tmp_path, kind):
    given, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        agent_trainer(tmp_path, **{"agent": lambda **row: 0.0, **given})


def test_sharded_models_and_texts_for_a_shell_are_refused(config):
    faults = whole_faults("FSDP2", [], config(), has_agent=True)
    assert [fault.split(" needs")[0] for fault, is_there in faults.items() if is_there] == ["agent"]
    assert [fault for fault, is_there in deepspeed_faults({}, config(), has_agent=True).items() if is_there] != []
    with pytest.raises(TypeError, match=r"Command\('python solve.py'\): give the program and its arguments as a list"):
        Command("python solve.py")


SOLVE = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
message = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]
print("it says", message["content"], *sorted(os.environ), file=sys.stderr)
if row["start"] == 1:
    print(message["content"], sorted(os.environ), sorted(row))
    sys.exit("broken")
print("some words")
print(len(message["content"]) / 2)
"""


def test_commands(tmp_path, monkeypatch, caplog):
    """One row is scored, one fails with what it has written, and one leaves a child behind when its time is over."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "solve.py").write_text(SOLVE)
    rows = Dataset.from_dict({"prompt": ["0", "1"], "start": [0, 1]})
    command = Command([sys.executable, str(tmp_path / "solve.py")], env={"MINE": "1"})
    rollout, *_ = collect(saying_trainer(tmp_path, command, dataset=rows), 2)
    assert rollout.scores.tolist() == [0.5, 0.0]
    assert rollout.loss_mask.any(dim=1).tolist() == [True, False]
    assert "ended with exit code 1: it says a" in caplog.text
    shown = caplog.text.partition("it says a ")[2].partition("\n")[0].split()
    names = set(shown) - {"broken", "LC_CTYPE", "__CF_USER_TEXT_ENCODING"}
    assert names <= {*KEPT, "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "MINE"}

    pid = tmp_path / "pid"
    command = Command(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"])
    collect(saying_trainer(tmp_path, command, dataset=rows, config={"tool_timeout": 1.0}), 1)
    shown = subprocess.run(["ps", "-o", "stat=", "-p", pid.read_text().strip()], capture_output=True, text=True)
    assert shown.stdout[:1] in ("", "Z")
