"""Fixtures of all tests. Nothing is downloaded."""

import os
import shutil
import ssl

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # helpers/hub_runs.py has a Hub of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import build_tiny_base
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from helpers import agents
from helpers.http_server import Answer, Server
from helpers.processes import freeze_imports
from helpers.runs import SUMS, chat_tokenizer, small_trainer
from helpers.tiny import tiny_model
from hfppo import PPOCallback, PPOConfig, PPOTrainer, RunPageCallback


def pytest_collection_finish() -> None:
    freeze_imports()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


@pytest.fixture
def run_page() -> None:
    """Let the runs of a test write their pages."""


@pytest.fixture(autouse=True)
def no_run_page(monkeypatch, request):
    """Without `run_page`, write no page: a tenth of the time of most runs here."""
    if "run_page" not in request.fixturenames:
        for event in ("on_rollout_end", "on_log", "on_train_end"):
            monkeypatch.setattr(RunPageCallback, event, getattr(PPOCallback, event))


@pytest.fixture
def dataset() -> Dataset:
    return SUMS


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., PPOConfig]:
    """Build a configuration on a CPU."""

    def make(**changes) -> PPOConfig:
        return PPOConfig(**{"output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": "none", **changes})

    return make


@pytest.fixture
def make_trainer(tmp_path: Path, tokenizer, dataset):
    """Build a small trainer; see `small_trainer`."""

    def make(config: dict | None = None, **kwargs) -> PPOTrainer:
        given = {"train_dataset": dataset, "processing_class": tokenizer, **kwargs}
        return small_trainer(tmp_path / "out", config, **given)

    return make


@pytest.fixture
def make_agent(tmp_path: Path):
    """Build a small trainer with tools or an environment; see `agent_trainer`."""
    return partial(agents.agent_trainer, tmp_path / "out")


@pytest.fixture
def base_path(tmp_path: Path, tokenizer) -> str:
    """A base on disk, as users have it."""
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> str:
    """The folder of a tiny chat model for recipes."""
    build_tiny_base.build(folder := str(tmp_path_factory.mktemp("tiny")))
    return folder


@pytest.fixture
def play(make_agent):
    """Play episodes with tools or an environment; see `helpers.agents.play`."""
    return partial(agents.play, make_agent)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers that stop when the test ends."""
    servers: list[Server] = []

    def start(answer: Answer, context: ssl.SSLContext | None = None) -> Server:
        servers.append(Server(answer, context))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright; for tests marked `browser`."""
    playwright = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Any]]:
    """Open an HTML file; takes the options of Playwright's `new_context`.

    At the end of the test, fails if a page has asked for anything but itself or has reported an error.
    """
    requests: list[str] = []
    errors: list[str] = []
    contexts = []

    def opened(path: Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, "locale": "en-US", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5_000)
        page.on("request", lambda request: requests.append(request.url) if request.url != path.as_uri() else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert requests == []
    assert errors == []
