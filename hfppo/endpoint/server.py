"""The server of the agents of a process: OpenAI's HTTP interface in front of the policy, on the loopback address.

Each episode has a key of its own, which tells the server the session and ends with the episode.
"""

import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hfppo.endpoint.anthropic import anthropic_answer, anthropic_events, read_anthropic
from hfppo.endpoint.chat import Answer, Refusal, Request, chat_answer, chat_events, read_chat
from hfppo.endpoint.responses import read_responses, responses_answer, responses_events
from hfppo.endpoint.session import Session

MOST_BYTES = 2**24  # of a request's body
RETRIES = "x-stainless-retry-count"  # header of the clients of openai and anthropic

Body = Mapping[str, Any]  # of a request or an answer
# How a request is read, and its answer written, at once or as a stream.
Format = tuple[Callable[[Body], Request], Callable[[Answer, Body], Body], Callable[[Answer, Body], Iterator[str]]]
FORMATS: dict[str, Format] = {
    "/v1/chat/completions": (read_chat, chat_answer, chat_events),
    "/v1/responses": (read_responses, responses_answer, responses_events),
    "/v1/messages": (read_anthropic, anthropic_answer, anthropic_events),
}


class Server:
    """Serves sessions from a thread, until the process ends."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}  # by key
        routes = [Route(path, partial(self.answer, one), methods=["POST"]) for path, one in FORMATS.items()]
        app = Starlette(
            routes=[*routes, Route("/v1/models", self.list_models)],
            exception_handlers={Refusal: refuse, HTTPException: refuse},
        )
        listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self.loop = asyncio.new_event_loop()
        serving = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).serve([listening])
        threading.Thread(target=self.loop.run_until_complete, args=[serving], daemon=True).start()

    def begin(self, session: Session) -> str:
        """Serve a session, and return its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self.sessions[key] = session
        return key

    def end(self, key: str) -> Future[None]:
        """End the session of a key; the Future is done when the session no longer changes."""
        return asyncio.run_coroutine_threadsafe(self.sessions.pop(key).end(), self.loop)

    def session_of(self, request: HTTPRequest) -> Session:
        """Return the session of a request's key.

        Raises:
            Refusal: there is none.
        """
        headers = request.headers
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if (session := self.sessions.get(key)) is None:
            raise Refusal(401, "the key is of no running episode", "invalid_api_key")
        return session

    async def answer(self, form: Format, request: HTTPRequest) -> Response:
        """Answer a request to the policy."""
        session, (read, write, stream) = self.session_of(request), form
        body = await read_json(request)
        try:
            wanted = read(body)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refusal(400, f"the request is malformed: {error!r}") from error
        client_left = asyncio.create_task(disconnect(request))
        try:
            answer = await session.answer(wanted, client_left, request.headers.get(RETRIES, "0") != "0")
        finally:
            client_left.cancel()
        if body.get("stream"):
            return StreamingResponse(stream(answer, body), media_type="text/event-stream")
        return JSONResponse(write(answer, body))

    async def list_models(self, request: HTTPRequest) -> Response:
        """Name the policy."""
        self.session_of(request)
        policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "hfppo"}
        return JSONResponse({"object": "list", "data": [policy]})


async def disconnect(request: HTTPRequest) -> None:
    """Wait until the client of a request has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_json(request: HTTPRequest) -> dict[str, Any]:
    """Return the body of a request.

    Raises:
        Refusal: it is too large, or not a JSON object.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise Refusal(413, f"the request is larger than {MOST_BYTES} bytes")
    try:
        value = json.loads(body)
    except ValueError as error:
        raise Refusal(400, f"the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(400, f"the request is {type(value).__name__} in JSON, not an object")
    return value


async def refuse(request: HTTPRequest, error: Exception) -> Response:
    """Answer with an error in OpenAI's form."""
    if isinstance(error, HTTPException):  # of an unknown path or method
        error = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, Refusal)
    return JSONResponse(error.body, error.status)


@cache
def server_of(process: int) -> Server:
    """Return the server of a process; a fork has its own."""
    return Server()


def this_server() -> Server:
    """Return the server of this process."""
    return server_of(os.getpid())
