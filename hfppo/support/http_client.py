"""A client for JSON services over HTTP, such as reward servers and vLLM servers."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx2
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter
from tenacity.stop import stop_base

from hfppo.support.calls import schedule
from hfppo.support.secrets import hide_in_url

RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses after which another attempt may succeed


class ServerError(RuntimeError):
    """A server cannot be reached, or its answer is wrong; the message names the server and the remedy.

    Args:
        status: the HTTP status; None without an answer.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Unavailable(ServerError):
    """A failure after which another attempt may succeed."""


class Unreachable(Unavailable):
    """There is no connection, or it was lost."""


@dataclass(frozen=True)
class Endpoint:
    """A server endpoint with a timeout, retries with backoff, and limited concurrency.

    Requests go to the given address only: redirects and the proxies of environment variables are ignored.
    TLS uses the system's CA certificates, or those that `SSL_CERT_FILE` or `SSL_CERT_DIR` names.

    Args:
        url: http:// or https://; the paths of requests are appended to it.
        timeout: seconds until an answer must be complete.
        stop: when to stop retrying.
        max_concurrency: most concurrent requests.
        headers: extra request headers, such as Authorization; never logged.
        final_text: an answer that contains this text is not retried, whatever its status.

    Raises:
        ValueError: an argument outside its range.
    """

    url: str
    timeout: float
    stop: stop_base
    max_concurrency: int
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    final_text: str | None = None

    def __post_init__(self) -> None:
        if not re.match("https?://[^/]", self.url):
            raise ValueError(f"url={hide_in_url(self.url)!r} is not an HTTP address; write http://host:port/path")
        if not self.timeout > 0 or self.max_concurrency < 1:
            raise ValueError(
                f"timeout={self.timeout} must be above 0, max_concurrency={self.max_concurrency} 1 or more"
            )

    async def post_all(self, path: str, bodies: Sequence[object]) -> list[Any]:
        """Post each body as JSON and return the parsed answers in order.

        Raises:
            ServerError: an answer is missing or wrong; pending requests are dropped.
        """
        return [parse_json(answer) for answer in await self.ask_all("POST", path, bodies)]

    async def get(self, path: str) -> Any:
        """Return the parsed answer to a GET.

        Raises:
            ServerError: the answer is missing or wrong.
        """
        return parse_json((await self.ask_all("GET", path, [None]))[0])

    async def ask_all(self, method: str, path: str, bodies: Sequence[object]) -> list[httpx2.Response]:
        """Send each body as JSON and return the answers in order.

        Raises:
            ServerError: an answer is missing or wrong; pending requests are dropped.
        """
        limit = asyncio.Semaphore(self.max_concurrency)
        wait, unavailable = wait_exponential_jitter(multiplier=0.2, max=5.0), retry_if_exception_type(Unavailable)
        ask_again = AsyncRetrying(stop=self.stop, wait=wait, retry=unavailable, reraise=True).wraps(self._ask)

        async def ask(body: object) -> httpx2.Response:
            async with limit:
                return await ask_again(method, self.url + path, body)

        # Requests run in the process's event loop, to which the client belongs.
        requests = [asyncio.wrap_future(schedule(ask(body))) for body in bodies]
        try:
            return await asyncio.gather(*requests)
        finally:
            for request in requests:
                request.cancel()

    async def _ask(self, method: str, url: str, body: object) -> httpx2.Response:
        """Make one attempt."""
        name, client = hide_in_url(url), client_in(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(self.timeout):
                response = await client.request(method, url, json=body, headers=self.headers)
        except TimeoutError as error:
            raise Unavailable(
                f"{name} did not answer within {self.timeout:g} s, after all retries; raise the limit, send less at "
                "once, or find out what delays it"
            ) from error
        except httpx2.TransportError as error:
            raise Unreachable(
                f"{name} cannot be reached, after all retries ({error or type(error).__name__}); start the server or "
                "correct the address"
            ) from error
        said, status = response.text[:500], response.status_code
        if status in RETRY_STATUSES and not (self.final_text and self.final_text in said):
            raise Unavailable(f"{name} answered {status}, after all retries: {said!r}; see its log", status)
        if not response.is_success:
            raise ServerError(f"{name} answered {status}: {said!r}; check address, headers and its log", status)
        return response


@cache
def client_in(loop: asyncio.AbstractEventLoop) -> httpx2.AsyncClient:
    """Return the client of an event loop. It keeps connections open, and reads the CA certificates once."""
    return httpx2.AsyncClient(
        timeout=None,  # `_ask` has its own
        limits=httpx2.Limits(),
        trust_env=False,  # no proxies and no .netrc
        verify=httpx2.create_ssl_context(),  # with the environment's certificates
    )


def parse_json(response: httpx2.Response) -> Any:
    """Return a parsed answer.

    Raises:
        ServerError: it is not JSON.
    """
    try:
        return response.json()
    except ValueError as error:
        name, said = hide_in_url(str(response.url)), response.text[:200]
        raise ServerError(f"{name} answered {said!r}, which is not JSON; check the address") from error


logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs addresses with user, password and query
