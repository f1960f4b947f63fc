"""An OpenAI-compatible vLLM server as the engine of `VLLMSampler`."""

from typing import Any

from tenacity import stop_after_delay

from hfppo.config import PPOConfig
from hfppo.generation.vllm import Adapter, Engine, Sampled, engine_options
from hfppo.models.actor_critic import ActorCritic
from hfppo.support.calls import wait_for
from hfppo.support.http_client import Endpoint, ServerError, Unavailable

LOCAL = "http://127.0.0.1:8000"
MAX_CONCURRENCY = 256  # simultaneous requests per process; the server batches them


class ServerEngine(Engine):
    """A running vLLM server: it receives token ids and returns token ids and log-probs.

    Waits `vllm_server_timeout` seconds for the server, at the start and for each answer.

    Raises:
        ServerError: the server does not answer, or lacks an option.
    """

    shared = True

    def __init__(self, model: ActorCritic, args: PPOConfig):
        url, timeout = args.vllm_server_base_url or LOCAL, args.vllm_server_timeout
        # A server that was started without LoRA, or for a lower rank, answers 500; a retry does not help.
        final = "Call to add_lora method failed"
        base = url.rstrip("/")  # each path begins with a slash
        self.endpoint = Endpoint(base, timeout, stop_after_delay(timeout), MAX_CONCURRENCY, final_text=final)
        self.command = serve_command(model)
        try:
            models = wait_for(lambda: self.endpoint.get("/v1/models"))
        except ServerError as error:
            raise ServerError(f"{error}\nStart the server with\n  {self.command}", error.status) from error
        # With top_k=1 a processed log-prob is 0.
        body = {"model": models["data"][0]["id"], "prompt": [1, 2, 3, 4], "max_tokens": 1, "top_k": 1, "logprobs": 1}
        if self._complete([body])[0]["logprobs"]["token_logprobs"] != [0.0]:
            raise ServerError(f"{base} reports raw log-probs; start it with\n  {self.command}")

    def _complete(self, bodies: list[dict[str, object]]) -> list[dict[str, Any]]:
        """Return the completion that the server gives to each request."""
        answers = wait_for(lambda: self.endpoint.post_all("/v1/completions", bodies))
        return [answer["choices"][0] for answer in answers]

    def load(self, adapter: Adapter, old: Adapter | None) -> None:
        """See `Engine`."""
        if old is not None:
            self._post_adapter("/v1/unload_lora_adapter", {"lora_name": old.name}, already="cannot be found")
        body = {"lora_name": adapter.name, "lora_path": adapter.folder}
        self._post_adapter("/v1/load_lora_adapter", body, already="already been loaded")

    def _post_adapter(self, path: str, body: dict[str, str], already: str) -> None:
        """Load or unload an adapter.

        Args:
            already: text of the error for an adapter that is loaded or unloaded already; it counts as success.
        Raises:
            ServerError: any other error.
        """
        try:
            wait_for(lambda: self.endpoint.ask_all("POST", path, [body]))
        except Unavailable:
            raise
        except ServerError as error:
            if already not in str(error):
                raise ServerError(
                    f"{error}\nThe server must be able to read the adapter's folder, and be started with\n"
                    f"  {self.command}",
                    error.status,
                ) from error

    def generate(self, prompts: list[list[int]], sampling: list[dict[str, object]], adapter: Adapter) -> list[Sampled]:
        """See `Engine`. The adapter is loaded again if the server was restarted since."""
        bodies = [
            {"model": adapter.name, "prompt": ids, "return_token_ids": True, **fields}
            for ids, fields in zip(prompts, sampling, strict=True)
        ]
        try:
            choices = self._complete(bodies)
        except ServerError as error:
            if error.status != 404:
                raise
            self.load(adapter, None)
            choices = self._complete(bodies)
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def serve_command(model: ActorCritic) -> str:
    """Return the shell command that starts a server for a model, for the GPU and CPU builds of vLLM.

    Raises:
        ValueError: vLLM cannot serve the base or the adapter.
    """
    flags = {
        f"--{name.replace('_', '-')}": value for name, value in engine_options(model).items() if value is not None
    }
    options = " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags.items())
    # Not `vllm serve`, which fails with the CPU build: it looks for a package named "vllm".
    return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server {options}"
