"""A Hub on 127.0.0.1 that speaks what `huggingface_hub` asks of it, without Xet; files are kept in memory.

Processes that are started with `LoopbackHub.environment` take it for the Hub.
"""

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")  # as in the .gitattributes of a new repository
USER = "someone"
REPO = r"(?P<repo>[^/]+/[^/]+)"


@dataclass
class Commit:
    """The files of a repository after a commit."""

    message: str
    files: dict[str, bytes]
    parent: str = ""

    @property
    def sha(self) -> str:
        """40 hexadecimal digits."""
        digests = {path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}
        return hashlib.sha1(json.dumps([self.message, self.parent, digests], sort_keys=True).encode()).hexdigest()


@dataclass
class Repository:
    """Commits of each branch, oldest first."""

    tags: list[str] = field(default_factory=list)
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit("initial commit", {})]})

    def find(self, revision: str) -> Commit | None:
        """The commit that a branch's or a commit's name stands for."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for commits in self.branches.values() for c in commits if c.sha == revision), None)


class LoopbackHub:
    """The server; entered as a context it runs in a thread of its own, on a port of its own."""

    token = "hf_dummyDUMMYdummyDUMMYdummyDUMMY12"  # the one that may write

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}  # by SHA-256
        self.delay = 0.0  # seconds that each upload of a large file takes
        self.is_down = False
        self.lock = Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "LoopbackHub":
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Go down, also for connections that are open."""
        self.is_down = True
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: str | Path) -> dict[str, str]:
        """What a process must have in its environment to take this for the Hub."""
        disabled = dict.fromkeys(("XET", "TELEMETRY", "PROGRESS_BARS"), "1")
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": self.token}
        return {**own, **{f"HF_HUB_DISABLE_{name}": on for name, on in disabled.items()}, "NO_PROXY": "127.0.0.1"}

    def add(self, repo_id: str, files: dict[str, bytes], tags: list[str] | None = None, branch: str = "main") -> None:
        """Make a repository with some files, or a branch of one."""
        repo = self.repositories.setdefault(repo_id, Repository(tags or []))
        repo.branches.setdefault(branch, []).append(Commit("seed", files))

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What lies in a repository."""
        return self.repositories[repo_id].find(revision).files

    def messages(self, repo_id: str, revision: str = "main") -> list[str]:
        """The commit messages of a branch, oldest first."""
        return [commit.message for commit in self.repositories[repo_id].branches[revision]]


class Refusal(Exception):
    """An answer that is an error: the status, and what the Hub's error header says."""

    def __init__(self, status: int, code: str, body: Any = None):
        super().__init__(code)
        self.status, self.code, self.body = status, code, body


class Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.body()
        if self.command == "PUT":
            time.sleep(self.hub.delay)
        if self.hub.is_down:
            self.close_connection = True
            return
        with self.hub.lock:
            try:
                self.answer(200, *self.route(path, body))
            except Refusal as refusal:
                self.answer(refusal.status, json.dumps(refusal.body or {}).encode(), {"X-Error-Code": refusal.code})

    do_HEAD = do_POST = do_PUT = do_GET

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def route(self, path: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, action in ROUTES:
            if wanted == method and (match := re.fullmatch(pattern, path)):
                # The address that a large file is sent to is secret itself.
                if method == "POST" and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                    raise Refusal(401, "", {"error": "Invalid username or password."})
                given = match.groupdict()
                if "repo" in given:
                    if given["repo"] not in self.hub.repositories:
                        raise Refusal(404, "RepoNotFound")
                    given["repo_id"], given["repo"] = given["repo"], self.hub.repositories[given["repo"]]
                answer = action(self, body, **given)
                if isinstance(answer, tuple):
                    return answer
                return json.dumps(answer).encode(), {"Content-Type": "application/json"}
        raise Refusal(404, "", {"error": f"no such endpoint: {self.command} {path}"})

    def commit_of(self, repo: Repository, revision: str | None) -> Commit:
        if (commit := repo.find(revision or "main")) is None:
            raise Refusal(404, "RevisionNotFound")
        return commit

    def create(self, body: bytes) -> Any:
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}"}
        if repo_id in self.hub.repositories:
            raise Refusal(409, "", answer)
        self.hub.repositories[repo_id] = Repository()
        return answer

    def validate_yaml(self, body: bytes) -> Any:
        content = json.loads(body)["content"]
        data = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else {}
        base = data.get("base_model")
        if base is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
            message = f'"base_model" with value "{base}" is not valid. Use a model id from https://hf.co/models.'
            raise Refusal(400, "", {"error": message, "errors": [{"message": message}]})
        return {"errors": [], "warnings": []}

    def info(self, body: bytes, repo: Repository, repo_id: str, revision: str | None = None) -> Any:
        commit = self.commit_of(repo, revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return {"id": repo_id, "modelId": repo_id, "sha": commit.sha, "tags": repo.tags, "siblings": siblings}

    def tree(self, body: bytes, repo: Repository, repo_id: str, revision: str, folder: str | None = None) -> Any:
        files = self.commit_of(repo, revision).files
        found = {path: content for path, content in files.items() if path.startswith(f"{folder}/" if folder else "")}
        if folder and not found:
            raise Refusal(404, "EntryNotFound")
        return [describe(path, content) for path, content in found.items()]

    def resolve(self, body: bytes, repo: Repository, repo_id: str, revision: str, path: str) -> Any:
        commit = self.commit_of(repo, revision)
        if path not in commit.files:
            raise Refusal(404, "EntryNotFound")
        content = commit.files[path]
        return content, {"X-Repo-Commit": commit.sha, "ETag": f'"{etag(path, content)}"'}

    def preupload(self, body: bytes, repo: Repository, repo_id: str, revision: str) -> Any:
        files = self.commit_of(repo, revision).files
        return {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if path.endswith(LFS_SUFFIXES) else "regular",
                    "shouldIgnore": False,
                    "oid": etag(path, files[path]) if path in files else None,
                }
                for path in (asked["path"] for asked in json.loads(body)["files"])
            ]
        }

    def lfs_batch(self, body: bytes, repo: Repository, repo_id: str) -> Any:
        objects = []
        for asked in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
            objects.append({**asked, **({} if asked["oid"] in self.hub.lfs else {"actions": upload})})
        return {"transfer": "basic", "objects": objects}

    def lfs_upload(self, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "", {"error": "the content is not what was announced"})
        self.hub.lfs[oid] = body
        return {}

    def commit(self, body: bytes, repo: Repository, repo_id: str, revision: str) -> Any:
        before = self.commit_of(repo, revision)
        files, summary = dict(before.files), ""
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                summary = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            else:
                raise Refusal(400, "", {"error": f"unknown operation {operation['key']}"})
        made = Commit(summary, files, before.sha)
        repo.branches[revision].append(made)
        return {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{made.sha}", "commitOid": made.sha}


def etag(path: str, content: bytes) -> str:
    """What names a content: its SHA-256 in LFS, else git's SHA-1."""
    if path.endswith(LFS_SUFFIXES):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def describe(path: str, content: bytes) -> dict[str, Any]:
    """A file in a listing."""
    lfs = {"lfs": {"oid": etag(path, content), "size": len(content), "pointerSize": 134}}
    oid = hashlib.sha1(content).hexdigest()
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        **({"oid": oid, **lfs} if path.endswith(LFS_SUFFIXES) else {"oid": etag(path, content)}),
    }


ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("GET", rf"/api/models/{REPO}", Handler.info),
    ("GET", rf"/api/models/{REPO}/revision/(?P<revision>[^/]+)", Handler.info),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", Handler.tree),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", Handler.lfs_upload),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", Handler.commit),
)
