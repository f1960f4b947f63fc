"""A JSON service over HTTP, as reward servers and vLLM servers are."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

MAX_ANSWER = 64 * 2**20  # bytes; an answer is numbers, and a longer one is not read to its end
PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that another attempt may get past


class ServerError(RuntimeError):
    """A server did not answer as it must; the message says which, how, and what to do."""


class Unavailable(ServerError):
    """It may answer another time."""


class Endpoint:
    """One server: a time limit, retries with growing pauses, and a limit on requests at once.

    Nothing but the address given is talked to: redirects are not followed, proxies of the environment not used.

    Args:
        url: http:// or https://.
        timeout: seconds until an answer must be complete.
        max_retries: further attempts after the first, for what may pass.
        max_concurrency: requests at once.
        headers: sent along, an Authorization for instance; never shown.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 60.0,
        max_retries: int = 5,
        max_concurrency: int = 8,
        headers: Mapping[str, str] | None = None,
    ):
        parsed = httpx2.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"url={self.shown(url)!r} is no address; write http://host:port/path")
        if not timeout > 0 or max_retries < 0 or max_concurrency < 1:
            raise ValueError(
                f"timeout={timeout} must be above 0, max_retries={max_retries} 0 or more, "
                f"max_concurrency={max_concurrency} 1 or more"
            )
        self.url, self.timeout, self.max_retries = url.rstrip("/"), timeout, max_retries
        self.max_concurrency, self.headers = max_concurrency, dict(headers or {})

    @staticmethod
    def shown(url: str) -> str:
        """The address without what may be secret: a password, and the query."""
        return str(httpx2.URL(url).copy_with(userinfo=b"", query=None))

    async def post_all(self, bodies: Sequence[Any], path: str = "") -> list[Any]:
        """Post each body as JSON; their answers in order.

        Raises:
            ServerError: one could not be had; the requests under way are dropped.
        """
        limit = asyncio.Semaphore(self.max_concurrency)
        async with httpx2.AsyncClient(headers=self.headers, timeout=self.timeout, trust_env=False) as client:

            async def post(body: Any) -> Any:
                async with limit:
                    retrying = AsyncRetrying(
                        stop=stop_after_attempt(self.max_retries + 1),
                        wait=wait_exponential_jitter(multiplier=0.2, max=30.0),
                        retry=retry_if_exception_type(Unavailable),
                        reraise=True,
                    )
                    return await retrying(self._post, client, self.url + path, body)

            return await asyncio.gather(*(post(body) for body in bodies))

    async def _post(self, client: httpx2.AsyncClient, url: str, body: Any) -> Any:
        """One attempt."""
        name, content = self.shown(url), bytearray()
        try:
            async with asyncio.timeout(self.timeout), client.stream("POST", url, json=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_ANSWER:
                        raise ServerError(
                            f"{name} answered more than {MAX_ANSWER} bytes; check that it is the address"
                        )
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise Unavailable(
                f"{name} did not answer within timeout={self.timeout:g} s, in {self.max_retries + 1} attempts; raise "
                "the limit, send less at once, or see what holds it up"
            ) from error
        except httpx2.TransportError as error:
            raise Unavailable(
                f"{name} cannot be reached, in {self.max_retries + 1} attempts ({error or type(error).__name__}); "
                "start the server or mend the address"
            ) from error
        said = content[:200].decode(errors="replace")
        if response.status_code in PASSING:
            raise Unavailable(
                f"{name} answered {response.status_code}, in {self.max_retries + 1} attempts: {said!r}; see its log"
            )
        if not response.is_success:
            raise ServerError(f"{name} answered {response.status_code}: {said!r}; check address, headers and its log")
        try:
            return json.loads(content)
        except ValueError as error:
            raise ServerError(f"{name} answered what is no JSON: {said!r}; check that it is the address") from error
