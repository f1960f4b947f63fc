"""A server that answers as vLLM's, in a thread."""

import json
import threading
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from helpers.http_server import Server


class FakeVLLM:
    """A server with one adapter at a time, whose completions follow from prompt and seed.

    Args:
        seconds: that it takes for a completion.
        life: after so many completions it is killed; None: it lives.
        port: on loopback; 0: a free one.
    """

    def __init__(self, seconds: float = 0.0, life: int | None = None, port: int = 0):
        self.seconds, self.life = seconds, life
        self.adapter: str | None = "that of another run"
        self.loaded: list[str] = []
        self.completed: list[tuple[str, tuple[int, ...]]] = []  # with which adapter, which prompts
        self.server = Server(self.answer, port=port)
        self.port = self.server.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, body: dict) -> tuple[int, bytes]:
        status, found = self.found(body)
        return status, json.dumps(found).encode()

    def found(self, body: dict) -> tuple[int, object]:
        if "lora_path" in body:
            self.load(body["lora_path"])
            self.adapter = body["lora_name"]
            self.loaded.append(self.adapter)
        if "prompt" not in body:
            return 200, {"data": [{"id": "base"}]}
        if body["top_k"] == 1:
            return 200, {"choices": [{"logprobs": {"token_logprobs": [0.0]}}]}
        if body["model"] != self.adapter:
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        time.sleep(self.seconds)
        if self.life is not None and len(self.completed) >= self.life:
            self.kill()
        self.completed.append((body["model"], tuple(body["prompt"])))
        ids, logprobs = self.sample(body)
        return 200, {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}

    def load(self, folder: str) -> None:
        """Load an adapter."""

    def sample(self, body: dict) -> tuple[list[int], list[float]]:
        """Return a completion's tokens, and their log-probs."""
        return [3 + (body["seed"] + sum(body["prompt"]) + n) % 9 for n in range(4)], [-1.0] * 4

    def kill(self) -> None:
        """Close all connections, that of the present request too."""
        self.life = None
        threading.Thread(target=self.server.stop, daemon=True).start()
        time.sleep(0.2)

    def start_again(self) -> None:
        """Listen again at the same address, without an adapter."""
        self.adapter = None
        self.server = Server(self.answer, port=self.port)

    def prompts(self, adapter: str) -> set[tuple[int, ...]]:
        """Prompts that it has completed with an adapter."""
        return {prompt for name, prompt in self.completed if name == adapter}


class PeftVLLM(FakeVLLM):
    """Samples by a plain PEFT model, token by token, from the folder of each adapter.

    Args:
        base: the base's folder.
        port: see `FakeVLLM`.
    """

    def __init__(self, base: Path, port: int = 0):
        super().__init__(port=port)
        self.base, self.lock = base, threading.Lock()

    def load(self, folder: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(self.base)
        self.model = PeftModel.from_pretrained(base, folder).eval()

    @torch.no_grad()
    def sample(self, body: dict) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        logprobs: list[float] = []
        greedy = body["temperature"] == 0
        random = torch.Generator().manual_seed(0 if greedy else body["seed"] % 2**63)
        while len(ids) < body["max_tokens"] and not set(ids[-1:]) & {*body["stop_token_ids"]}:
            with self.lock:
                logits = self.model(torch.tensor([body["prompt"] + ids])).logits[0, -1]
            log_softmax = (logits / (1.0 if greedy else body["temperature"])).log_softmax(dim=-1)
            chosen = log_softmax.argmax() if greedy else torch.multinomial(log_softmax.exp(), 1, generator=random)[0]
            ids.append(int(chosen))
            logprobs.append(float(log_softmax[chosen]))
        return ids, logprobs
