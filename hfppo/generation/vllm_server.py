"""An OpenAI-compatible vLLM server as the engine of `VLLMSampler`."""

from contextlib import nullcontext
from typing import Any

from tenacity import stop_after_delay

from hfppo.generation.vllm import Adapter, Sampled, Sampling, base_name, dtype_name, start_rank
from hfppo.models.actor_critic import ActorCritic
from hfppo.support.concurrency import wait_for
from hfppo.support.http_client import Endpoint, ServerError, Unavailable

MAX_CONCURRENCY = 256  # requests at once, per process; the server batches them itself


class ServerEngine:
    """A server that `vllm serve` started, asked by token ids, answering token ids and log-probs.

    Args:
        url: its address, without /v1.
        timeout: seconds to wait for it, at the start and for each answer.

    Raises:
        ServerError: it does not answer, or was started without what is needed; says the right command.
    """

    shared = True

    def __init__(self, model: ActorCritic, sampling: Sampling, url: str, timeout: float):
        self.sampling = sampling
        # vLLM answers 500, too, when it was started without LoRA or for a lower rank.
        hopeless = "Call to add_lora method failed"
        base = url.rstrip("/")  # each path begins with one
        self.endpoint = Endpoint(base, timeout, stop_after_delay(timeout), MAX_CONCURRENCY, hopeless=hopeless)
        self.command = serve_command(model)
        try:
            models = wait_for(lambda: self.endpoint.get("/v1/models"))
        except ServerError as error:
            raise ServerError(f"{error}\nStart the server with\n  {self.command}", error.status) from error
        self._check_logprobs(models["data"][0]["id"])

    def _check_logprobs(self, model: str) -> None:
        """Refuse a server that reports log-probs from before sampling: with top_k=1 they must be 0."""
        body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1, "top_k": 1, "logprobs": 1}
        (answer,) = wait_for(lambda: self.endpoint.post_all("/v1/completions", [body]))
        if answer["choices"][0]["logprobs"]["token_logprobs"] != [0.0]:
            raise ServerError(f"{self.endpoint.url} reports raw log-probs; start it with\n  {self.command}")

    def load(self, adapter: Adapter, old: Adapter | None) -> None:
        """See `Engine`."""
        if old is not None:
            self._ask("/v1/unload_lora_adapter", {"lora_name": old.name}, done="cannot be found")
        self._ask(
            "/v1/load_lora_adapter",
            {"lora_name": adapter.name, "lora_path": adapter.folder},
            done="already been loaded",
        )

    def _ask(self, path: str, body: dict[str, Any], done: str) -> None:
        """Have an adapter come or go; an error that says that it is so already will do."""
        try:
            wait_for(lambda: self.endpoint.ask_all("POST", path, [body]))
        except Unavailable:
            raise
        except ServerError as error:
            if done not in str(error):
                raise ServerError(
                    f"{error}\nThe server must see the folder of the adapter, and be started with\n  {self.command}",
                    error.status,
                ) from error

    def generate(self, prompts: list[list[int]], seeds: list[int | None], adapter: Adapter) -> list[Sampled]:
        """See `Engine`. A server that was started anew in between gets the adapter again."""
        bodies = [
            {"model": adapter.name, "prompt": ids, "return_token_ids": True, **self.sampling.params(seed)}
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        try:
            answers = wait_for(lambda: self.endpoint.post_all("/v1/completions", bodies))
        except ServerError as error:
            if error.status != 404:
                raise
            self.load(adapter, None)
            answers = wait_for(lambda: self.endpoint.post_all("/v1/completions", bodies))
        choices = [answer["choices"][0] for answer in answers]
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def awake(self) -> Any:
        """See `Engine`; the server's memory is its own."""
        return nullcontext()


def serve_command(model: ActorCritic) -> str:
    """The command line that starts a server for a model.

    Raises:
        ValueError: vLLM cannot serve it.
    """
    peft_config = model.peft_config["default"]
    revision = "" if peft_config.revision is None else f"--revision {peft_config.revision} "
    return (
        f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {base_name(model)} {revision}--enable-lora --max-lora-rank "
        f"{start_rank(peft_config)} --max-loras 1 --logprobs-mode processed_logprobs "
        f"--generation-config vllm --dtype {dtype_name(model)}"
    )
