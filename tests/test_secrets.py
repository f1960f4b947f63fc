"""Secrets are found in settings, wherever they lie, and nothing else is; addresses lose theirs."""

import pytest

from hfppo.support.secrets import find_secret, hide_in_url

TOKEN = "hf_" + "aB3" * 10

SECRETS = {
    "['token']": {"token": "abc"},
    "['api_key']": {"api_key": "abc"},
    "['OPENAI_API_KEY']": {"OPENAI_API_KEY": "abc"},
    "['api_keys']": {"api_keys": ["abc", "def"]},
    "['credentials']": {"credentials": {"user": "abc", "word": "abc"}},
    "['Authorization']": {"Authorization": "Bearer abc"},
    "['headers']['X-Auth-Token']": {"headers": {"Accept": "text", "X-Auth-Token": "abc"}},
    "['servers'][1]['url']": {"servers": [{}, {"url": "http://me:abc@host/x"}]},
    "['url']": {"url": "https://abc@host"},
    "['note']": {"note": f"I use {TOKEN}"},
}
OTHERS = [
    {"tokenizer": "org/tok", "tokenizer_mode": "slow"},
    {"thinking_token": "think", "token": "<t>"},
    {"pad_token": "[PAD]", "eos_token_id": 3, "stop_tokens": ["</s>"]},
    {"token": None, "api_key": ""},
    {"token": "<TOKEN>"},
    {"keyboard": "qwerty", "monkey": "a", "key_order": "b", "secretary": "c", "passwordless": "d", "sort_key": "e"},
    {"url": "http://host/a@b"},
]


@pytest.mark.parametrize("place", SECRETS)
def test_a_secret_is_found_where_it_lies(place):
    assert find_secret("x", SECRETS[place], "x") == f"x{place}"


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_nothing_else_is_a_secret(settings):
    assert find_secret("x", settings, "x") is None


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
