"""OpenAI-compatible vLLM servers as the engine of `VLLMSampler`."""

import asyncio
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tenacity import RetryCallState, stop_after_delay
from tenacity.stop import stop_base

from hfppo.config import PPOConfig
from hfppo.generation.vllm import Adapter, Engine, Sampled, engine_options
from hfppo.models.actor_critic import ActorCritic
from hfppo.support.calls import wait_for
from hfppo.support.http_client import Endpoint, ServerError, Unavailable, Unreachable
from hfppo.support.secrets import hide_in_url

LOCAL = "http://127.0.0.1:8000"
MAX_CONCURRENCY = 256  # simultaneous requests per process and server; the server batches them
CONNECTIONS = 3  # attempts to connect before another server is asked; an idle connection may just have been closed

Request = dict[str, object]  # body of a request for a completion


class ServerEngine(Engine):
    """Running vLLM servers: they receive token ids and return token ids and log-probs.

    Waits `vllm_server_timeout` seconds for the servers, at the start and for each answer. A server that is lost is not
    asked again before the next adapter, and the others answer its requests: each has its own seed.

    Raises:
        ServerError: a server does not answer at the start, or lacks an option; later, all of them are lost.
    """

    shared = True

    def __init__(self, model: ActorCritic, args: PPOConfig):
        given, command = args.vllm_server_base_url or LOCAL, serve_command(model)
        urls = [given] if isinstance(given, str) else given
        first = args.process_index % len(urls)  # processes with few prompts begin with different servers
        self.servers = [Server(url, args.vllm_server_timeout, command) for url in urls[first:] + urls[:first]]
        self._adapter: Adapter | None = None
        self._up: list[Server] = []  # servers that have not been lost with this adapter
        self._homes: dict[int, Server] = {}  # the server that has computed a prompt, by the prompt's hash
        wait_for(self._check)

    async def _check(self) -> None:
        await asyncio.gather(*(server.check() for server in self.servers))

    def load(self, adapter: Adapter, old: Adapter | None) -> None:
        """See `Engine`. A server that is lost gets the adapter when it is asked for a completion."""
        wait_for(lambda: self._load(adapter, old))

    async def _load(self, adapter: Adapter, old: Adapter | None) -> None:
        async def send(server: Server) -> None:
            with suppress(Unavailable):
                await server.load(adapter, old)

        await asyncio.gather(*(send(server) for server in self.servers))

    def generate(self, prompts: list[list[int]], sampling: list[dict[str, object]], adapter: Adapter) -> list[Sampled]:
        """See `Engine`."""
        bodies = [
            {"model": adapter.name, "prompt": ids, "return_token_ids": True, **fields}
            for ids, fields in zip(prompts, sampling, strict=True)
        ]
        choices = wait_for(lambda: self._complete(bodies, adapter))
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    async def _complete(self, bodies: list[Request], adapter: Adapter) -> list[Any]:
        """Return a completion for each request, in order."""
        if adapter != self._adapter:
            self._adapter, self._up, self._homes = adapter, [*self.servers], {}
        homes = [self._home_of(body["prompt"]) for body in bodies]
        batches = defaultdict[Server, list[Request]](list)
        for home, body in zip(homes, bodies, strict=True):
            batches[home].append(body)
        answers = await asyncio.gather(*(self._ask(home, batch, adapter) for home, batch in batches.items()))
        found = {home: iter(answer) for home, answer in zip(batches, answers, strict=True)}
        return [next(found[home]) for home in homes]

    async def _ask(self, server: "Server", bodies: list[Request], adapter: Adapter) -> list[Any]:
        """Return completions from a server, or from the others if it is lost."""
        is_last = self._up == [server]
        try:
            return await server.complete(bodies, adapter, patient=is_last)
        except Unavailable:
            if is_last:
                raise
            if server in self._up and len(self._up) > 1:  # two may be lost at once
                self._up.remove(server)
            return await self._complete(bodies, adapter)

    def _home_of(self, prompt: Any) -> "Server":
        """Return the server that has the longest prefix of a prompt in its cache, else the one with fewest prompts.

        So completions of a prompt are sampled together, and turns of an episode by one server.
        """
        if len(self._up) == 1:
            return self._up[0]
        prefixes = [*accumulate(prompt, lambda prefix, token: hash((prefix, token)), initial=0)]
        known = (self._homes[prefix] for prefix in reversed(prefixes) if prefix in self._homes)
        home = next((server for server in known if server in self._up), None)
        if home is None:
            home = min(self._up, key=[*self._homes.values()].count)
        self._homes[prefixes[-1]] = home
        return home


class Server:
    """One vLLM server.

    Args:
        url: its address.
        timeout: seconds to wait for it, and for each answer.
        command: the command that starts it, for errors.
    """

    def __init__(self, url: str, timeout: float, command: str):
        # A server that was started without LoRA, or for a lower rank, answers 500; a retry does not help.
        final = "Call to add_lora method failed"
        base = url.rstrip("/")  # each path begins with a slash
        self.name, self.command = hide_in_url(base), command
        self.patient = Endpoint(base, timeout, stop_after_delay(timeout), MAX_CONCURRENCY, final_text=final)
        self.quick = replace(self.patient, stop=stop_after_delay(timeout) | StopIfLost())

    async def check(self) -> None:
        """Wait for the server.

        Raises:
            ServerError: it does not answer, or lacks an option.
        """
        try:
            models = await self.patient.get("/v1/models")
        except ServerError as error:
            raise ServerError(f"{error}\nStart the server with\n  {self.command}", error.status) from error
        # With top_k=1 a processed log-prob is 0.
        body = {"model": models["data"][0]["id"], "prompt": [1, 2, 3, 4], "max_tokens": 1, "top_k": 1, "logprobs": 1}
        (answer,) = await self.patient.post_all("/v1/completions", [body])
        if answer["choices"][0]["logprobs"]["token_logprobs"] != [0.0]:
            raise ServerError(f"{self.name} reports raw log-probs; start it with\n  {self.command}")

    async def load(self, adapter: Adapter, old: Adapter | None) -> None:
        """Load an adapter and unload the old one."""
        if old is not None:
            await self._post_adapter("/v1/unload_lora_adapter", {"lora_name": old.name}, already="cannot be found")
        body = {"lora_name": adapter.name, "lora_path": adapter.folder}
        await self._post_adapter("/v1/load_lora_adapter", body, already="already been loaded")

    async def _post_adapter(self, path: str, body: dict[str, str], already: str) -> None:
        """Load or unload an adapter.

        Args:
            already: text of the error for an adapter that is loaded or unloaded already; it counts as success.
        Raises:
            ServerError: any other error.
        """
        try:
            await self.quick.ask_all("POST", path, [body])
        except Unavailable:
            raise
        except ServerError as error:
            if already not in str(error):
                raise ServerError(
                    f"{error}\nThe server must be able to read the adapter's folder, and be started with\n"
                    f"  {self.command}",
                    error.status,
                ) from error

    async def complete(self, bodies: list[Request], adapter: Adapter, patient: bool) -> list[Any]:
        """Return a completion for each request. The adapter is loaded again if the server was restarted since.

        Args:
            patient: whether to wait for a server that cannot be reached.
        """
        endpoint = self.patient if patient else self.quick
        try:
            answers = await endpoint.post_all("/v1/completions", bodies)
        except ServerError as error:
            if error.status != 404:
                raise
            await self.load(adapter, None)
            answers = await endpoint.post_all("/v1/completions", bodies)
        return [answer["choices"][0] for answer in answers]


class StopIfLost(stop_base):
    """Stops when a server cannot be reached after some attempts; a server that is slow may still answer."""

    def __call__(self, retry_state: RetryCallState) -> bool:
        error = None if retry_state.outcome is None else retry_state.outcome.exception()
        return retry_state.attempt_number >= CONNECTIONS and isinstance(error, Unreachable)


def serve_command(model: ActorCritic) -> str:
    """Return the shell command that starts a server for a model, for the GPU and CPU builds of vLLM.

    Raises:
        ValueError: vLLM cannot serve the base or the adapter.
    """
    flags = {f"--{name.replace('_', '-')}": x for name, x in engine_options(model).items() if x is not None}
    options = " ".join(flag if x is True else f"{flag} {x}" for flag, x in flags.items())
    # Not `vllm serve`, which fails with the CPU build: it looks for a package named "vllm".
    return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server {options}"
