"""Secrets are hidden wherever something is shown or saved, and nothing else is."""

import pytest

from hfppo.support.secrets import hide_in_settings, hide_in_text, hide_in_url

TOKEN = "hf_" + "aB3" * 10

SECRETS = [
    {"token": "abc"},
    {"hub_token": "abc"},
    {"api_key": "abc"},
    {"apiKey": "abc"},
    {"OPENAI_API_KEY": "abc"},
    {"api_keys": ["abc", "def"]},
    {"password": "abc"},
    {"client_secret": "abc"},
    {"credentials": {"user": "abc", "word": "abc"}},
    {"Authorization": "Bearer abc"},
    {"headers": {"Proxy-Authorization": "Basic abc", "X-Auth-Token": "abc", "Cookie": "session=abc"}},
    {"servers": [{"url": "http://me:abc@host/x"}]},
    {"url": "https://abc@host"},
]
OTHERS = [
    {"tokenizer": "org/tok"},
    {"tokenizer_mode": "slow"},
    {"thinking_token": "<t>"},
    {"pad_token": "[PAD]"},
    {"eos_token_id": 3},
    {"stop_tokens": ["</s>"]},
    {"max_tokens": 8, "max_num_batched_tokens": "auto"},
    {"token": True},
    {"token": None},
    {"keyboard": "qwerty", "monkey": "a", "key_order": "b", "secretary": "c", "passwordless": "d"},
    {"url": "http://host/a@b"},
]


@pytest.mark.parametrize("settings", SECRETS, ids=str)
def test_secrets_are_hidden(settings):
    assert "abc" not in str(hide_in_settings(settings))
    assert "abc" in str(settings), "the settings themselves were changed"


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_nothing_else_is_hidden(settings):
    assert hide_in_settings(settings) == settings


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("http://me:pass@host:80/score?key=K#part", "http://host:80/score"),
        ("https://pass@host", "https://host"),
        ("me:pass@host:80", "host:80"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("http://me:p@ss@host/", "http://host/"),
    ],
)
def test_an_address_loses_user_and_query(url, safe):
    assert hide_in_url(url) == safe


def test_a_text_loses_known_secrets_tokens_of_the_hub_and_users():
    text = f"run of abc with {TOKEN} at http://me:pass@host/x, tokenizer=org/tok"
    assert hide_in_text(text, known=["abc"]) == "run of … with … at http://…@host/x, tokenizer=org/tok"
