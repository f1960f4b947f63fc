"""Rewards over HTTP, from a real server on loopback: what it is asked, and what becomes of each way to fail."""

import asyncio
import math
import shutil
import ssl
import subprocess
import time
from datetime import datetime

import pytest

from helpers.http_server import lengths
from helpers.scripted import score
from hfppo import RewardServer, TolerantReward
from hfppo.rewards.reward_func import RewardBatch
from hfppo.support.http_client import ServerError, client_in


def ask(server: RewardServer, completions: list[str], **columns) -> list:
    return asyncio.run(server(prompts=["p"] * len(completions), completions=completions, **columns))


def test_scores_come_back_in_order_in_batches_with_the_columns_asked_for(serve):
    server = serve(lengths)
    func = RewardServer(server.url, columns=["answer"], batch_size=2, headers={"Authorization": "Bearer key"})
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]
    scores = ask(func, texts, answer=list("12345"), other=[object()] * 5)
    assert scores == [1, 2, 3, 4, 5]
    assert sorted(len(body["completions"]) for body in server.asked) == [1, 2, 2]
    first = next(body for body in server.asked if body["completions"][0] == "a")
    assert first == {"prompts": ["p", "p"], "completions": ["a", "bb"], "answer": ["1", "2"]}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer key"}


CALLS = {
    "awaited": lambda func: ask(func, ["a"]),
    "reward": lambda func: score(func, texts=("a",)),
    "tolerant": lambda func: score(TolerantReward(func, timeout=30), texts=("a",)),
    "check": lambda func: func.check(),
}


@pytest.mark.parametrize("call", CALLS)
def test_all_batches_share_a_connection(serve, call):
    server = serve(lengths)
    func = RewardServer(server.url)
    for _ in range(3):
        CALLS[call](func)
    assert len(server.asked) == 3
    assert len(server.connections) == 1


def test_requests_that_wait_are_dropped_when_another_fails(serve):
    def answer(body):
        return (404, b"") if body["completions"] == ["bad"] else (503, b"busy")

    server = serve(answer)
    with pytest.raises(ServerError, match="404"):
        ask(RewardServer(server.url, batch_size=1), ["a", "bad", "c"])
    time.sleep(0.05)
    asked = len(server.asked)
    time.sleep(0.5)  # retries begin after 0.2 s
    assert len(server.asked) == asked


def test_completions_continue_their_prompts(serve, monkeypatch):
    server = serve(lengths)
    monkeypatch.setattr(RewardBatch, "continuations", lambda batch: [f" {text}" for text in batch.completions])
    score(RewardServer(server.url), texts=("capital",))
    assert [body["completions"] for body in server.asked] == [[" capital"]]


@pytest.mark.parametrize("end", ["", "/", "?of=a/"])
def test_requests_go_to_exactly_the_address_given(serve, end):
    server = serve(lengths)
    ask(RewardServer(server.url + end), ["a"])
    assert server.paths == [f"/score{end}"]


def test_no_more_requests_at_once_than_allowed(serve):
    def slowly(body):
        time.sleep(0.05)
        return lengths(body)

    server = serve(slowly)
    ask(RewardServer(server.url, batch_size=1, max_concurrency=3), ["a"] * 12)
    assert server.most_at_once == 3


def test_a_server_that_recovers_is_waited_for(serve):
    answers = iter([(503, b"busy"), (429, b"slow down")])
    server = serve(lambda body: next(answers, None) or lengths(body))
    assert ask(RewardServer(server.url), ["abc"]) == [3]
    assert len(server.asked) == 3


def hang(body: dict) -> tuple[int, bytes]:
    time.sleep(0.6)
    return lengths(body)


# The answer, the attempts, and what the error says.
FAILURES = {
    "error": (lambda body: (500, b"no memory"), 2, "answered 500, after all retries: 'no memory'; see its log"),
    "hang": (hang, 2, "did not answer within 0.3 s, after all retries; raise the limit"),
    "404": (lambda body: (404, b"no such page"), 1, "answered 404: 'no such page'; check address"),
    "redirect": (lambda body: (302, b""), 1, "answered 302"),
    "html": (lambda body: (200, b"<html>"), 1, "answered '<html>', which is not JSON"),
    "list": (lambda body: (200, b"[1.0]"), 1, r"answered '\[1.0\]' for 1 completions; it must answer {\"scores\""),
    "count": (lambda body: (200, b'{"scores": [1, 2]}'), 1, "for 1 completions; it must answer"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "attempts", "message"), FAILURES.values(), ids=FAILURES)
def test_failures_name_the_server_and_the_way_out(serve, answer, attempts, message):
    server = serve(answer)
    with pytest.raises(ServerError, match=message) as error:
        ask(RewardServer(server.url, timeout=0.3 if answer is hang else 30, max_retries=1), ["a"])
    assert server.url in str(error.value)
    assert len(server.asked) == attempts


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_private_authority_is_trusted_where_the_environment_names_it(serve, tmp_path, monkeypatch):
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    request = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=judge -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*request.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    reward = RewardServer(serve(lengths, context).url, max_retries=0)
    with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(reward, ["12"])
    client_in.cache_clear()
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # still not used
    assert ask(reward, ["12"]) == [2]


def test_secrets_stay_out_of_errors():
    func = RewardServer("http://me:pass@127.0.0.1:9/s?key=K1", max_retries=0, headers={"Authorization": "K2"})
    with pytest.raises(ServerError, match=r"http://127.0.0.1:9/s cannot be reached") as error:
        ask(func, ["a"])
    assert not any(secret in str(error.value) for secret in ("pass", "K1", "K2"))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (datetime(2026, 1, 1), "datetime is not JSON serializable"),
        (math.nan, "not JSON compliant"),
        ("\ud800", "surrogates not allowed"),  # half a character
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_at_once(value, why):
    func = RewardServer("http://127.0.0.1:9/score", columns=["answer", "when"])
    with pytest.raises((TypeError, ValueError), match=why):
        ask(func, ["a"], answer=["1"], when=[value])


def test_a_trainer_learns_from_a_server_given_by_its_address(serve, make_trainer):
    server = serve(lengths)
    trainer = make_trainer({"max_steps": 4}, reward_funcs=server.url)
    assert server.asked == [{"prompts": [], "completions": []}]  # is it there?
    trainer.train()
    assert len(server.asked) == 2  # one request per rollout
    assert trainer.state.log_history[0]["rewards/reward_server/mean"] > 0


@pytest.mark.parametrize("wrap", [lambda func: func, TolerantReward])
def test_a_server_that_is_down_ends_the_run_before_it_begins(make_trainer, tmp_path, wrap):
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        make_trainer(reward_funcs=wrap(RewardServer("http://127.0.0.1:9", max_retries=0)))
    assert not (tmp_path / "out").exists()
