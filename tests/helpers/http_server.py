"""An HTTP server on loopback that stands for a reward server."""

import json
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[dict], tuple[int, bytes]]


class Server:
    """Answers what a function of the request's JSON says; keeps what it was asked. With a `context` over TLS."""

    def __init__(self, answer: Answer, context: ssl.SSLContext | None = None, port: int = 0):
        self.asked: list[dict] = []
        self.paths: list[str] = []
        self.headers: list[dict] = []
        self.connections: list[socket.socket] = []
        self.at_once = self.most_at_once = 0
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # which keeps connections open

            def setup(self):
                super().setup()
                outer.connections.append(self.connection)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
                with lock:
                    outer.asked.append(body)
                    outer.paths.append(self.path)
                    outer.headers.append(dict(self.headers))
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                status, content = answer(body)
                with lock:
                    outer.at_once -= 1
                self.send_response(status)
                if status == 302:
                    self.send_header("location", "http://127.0.0.1:9/elsewhere")
                self.send_header("content-length", str(len(content)))
                self.send_header("set-cookie", "backend=3")
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        if context is not None:
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.url = f"http{'' if context is None else 's'}://127.0.0.1:{self.http.server_port}/score"
        threading.Thread(target=self.http.serve_forever, args=[0.01], daemon=True).start()  # `stop` waits so long

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)


def lengths(body: dict) -> tuple[int, bytes]:
    """A score for each completion: its length."""
    return 200, json.dumps({"scores": [len(text) for text in body["completions"]]}).encode()
