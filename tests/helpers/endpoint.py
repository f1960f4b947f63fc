"""Agents of a few lines, and a sampler that answers by a function."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import torch

from helpers.agents import EOS, agent_trainer
from hfppo import Sampler, TextEnvironment, Turn


class Saying(Sampler):
    """Answers a prompt by a function of its text; "…" at the end stands for a turn without EOS.

    The log-probs are those of `model`, if it is set.
    """

    model: Any = None

    def __init__(self, tokenizer, say: Callable[[str], str]):
        self.tokenizer, self.say = tokenizer, say
        self.calls: list[list[str]] = []  # the prompts of each batch
        self.seeds: list[int] = []

    def __call__(self, prompts, seeds, budgets=None) -> list[Turn]:
        texts = [self.tokenizer.decode(ids) for ids in prompts]
        self.calls.append(texts)
        self.seeds += seeds or []
        answers = [self.say(text) for text in texts]
        written = [text.removesuffix("…") + EOS * (not text.endswith("…")) for text in answers]
        ids = self.tokenizer(written, add_special_tokens=False)["input_ids"]
        budgets = budgets or [None] * len(ids)
        eos = [self.tokenizer.eos_token_id]
        kept = [x[:most] for x, most in zip(ids, budgets, strict=True)]
        return [Turn.up_to_end(x, self.logprobs(given, x), eos) for given, x in zip(prompts, kept, strict=True)]

    @torch.no_grad()
    def logprobs(self, prompt, ids) -> list[float]:
        if self.model is None:
            return [-0.5] * len(ids)
        read, sampled = torch.tensor([prompt + ids]), torch.tensor([[False] * len(prompt) + [True] * len(ids)])
        return self.model(read, torch.ones_like(read), sampled).logprobs[sampled].tolist()


def chat(
    base_url: str, api_key: str, messages: object, timeout: float = 20, retries: int = 0, **more: Any
) -> httpx2.Response:
    """Ask the policy, as a client without a library does."""
    headers = {"Authorization": f"Bearer {api_key}", "x-stainless-retry-count": str(retries)}
    body = {"model": "policy", "messages": messages, **more}
    return httpx2.post(f"{base_url}/chat/completions", headers=headers, json=body, timeout=timeout)


def said(response: httpx2.Response) -> dict[str, Any]:
    """Return the policy's message."""
    return response.raise_for_status().json()["choices"][0]["message"]


def saying_trainer(output_dir, agent, say: Callable[[str], str] = lambda prompt: "a", **kwargs):
    """A trainer with an agent, and `Saying` in place of the sampler."""
    trainer = agent_trainer(output_dir, agent=agent, **kwargs)
    trainer.collector = replace(trainer.collector, sampler=Saying(trainer.processing_class, say))
    return trainer


def listening(play: Callable[[Any], Any], asynchronous: bool = False):
    """An agent that plays by a function of `ask`, which appends to the conversation; row 1 asks once and gets 1.

    `ask` takes text, messages or None to ask the same again, and returns the response.
    """

    def agent(base_url, api_key, prompt, start, **row):
        messages = list(prompt)

        def ask(more: str | list | None = None, **settings):
            messages.extend([{"role": "user", "content": more}] if isinstance(more, str) else more or [])
            response = chat(base_url, api_key, messages, **settings)
            if response.is_success:
                messages.append(said(response))
            return response

        if start == 1:
            ask()
            return 1.0
        ask.messages, ask.base_url, ask.api_key = messages, base_url, api_key
        return play(ask)

    async def later(**row):
        value = agent(**row)
        return await value if asyncio.iscoroutine(value) else value

    return later if asynchronous else agent


def share_of_vowels(text: str) -> float:
    """Return the share of vowels in a text."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


class Nodding(TextEnvironment):
    """Says "yes" to two turns; the reward is the share of vowels in the last one that has ended."""

    def reset(self, **row):
        self.left, self.reward = 2, 0.0

    def step(self, text):
        self.left -= 1
        self.reward = share_of_vowels(text)
        return "yes", 0.0, self.left == 0, False, {}

    def get_reward(self):
        return self.reward


def nodding(base_url, api_key, prompt, **row) -> float:
    """Play the same as an agent."""
    reward, messages = 0.0, list(prompt)
    for _ in range(2):
        response = chat(base_url, api_key, messages)
        if not response.is_success or response.json()["choices"][0]["finish_reason"] == "length":
            break
        messages += [said(response), {"role": "user", "content": "yes"}]
        reward = share_of_vowels(messages[-2]["content"] or "")
    return reward


def wandering(base_url, api_key, prompt, pause=lambda: None, **row) -> float:
    """Ask a helper, ask twice from one place, or not, and begin again with a summary: three or four conversations."""

    def ask(*messages):
        response = chat(base_url, api_key, messages)
        return (said(response)["content"] or "") if response.is_success else ""

    def user(text):
        return {"role": "user", "content": text}

    first = ask(*prompt)
    main = [*prompt, {"role": "assistant", "content": first}]
    told = ask(user(f"help {first[:3]}"))
    pause()
    second = ask(*main, user(told[:3]))
    if len(first) % 2:
        ask(*main, user("no"))
    pause()
    return share_of_vowels(ask(user(f"so {second[:3]}")))
