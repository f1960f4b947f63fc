"""Hide passwords, tokens and keys in settings, addresses and texts that are shown or saved."""

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "…"
# The end of a name: `hub_token`, `apiKey`, `Proxy-Authorization`; not `tokenizer`, `max_tokens` or `eos_token_id`.
WORDS = (
    r"token|key|secrets?|passwords?|passwd|passphrase|credentials?|authorization|cookie"
    r"|(?:api|access|auth|hub|hf|private)[-_]?(?:token|key)s?"
)
NAME_END = rf"(?:^|[\W_]|(?<=[a-z])(?=[A-Z]))(?i:{WORDS})"
SECRET_NAME = re.compile(rf"{NAME_END}$")
SPECIAL_TOKEN = re.compile(r"""["']?(<.*>|\[.*\])["']?""")  # of a vocabulary, such as <think> or [PAD]
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
URL_USER = re.compile(r"(?<=\w://)[^/\s@\"']+(?=@)")


def is_secret(name: str, value: Any) -> bool:
    """Return whether the name says that the value is a secret; a switch, a number or a special token is none."""
    if isinstance(value, str):
        return bool(SECRET_NAME.search(name)) and not SPECIAL_TOKEN.fullmatch(value)
    return isinstance(value, bytes | list | tuple | dict) and bool(SECRET_NAME.search(name))


def hide_in_settings(value: Any) -> Any:
    """Return a setting with secrets at any depth replaced by their names, and without the users in URLs."""
    if isinstance(value, str):
        return URL_USER.sub(HIDDEN, value)
    if isinstance(value, list):
        return [hide_in_settings(inner) for inner in value]
    if isinstance(value, dict):
        return {
            name: f"<{name.upper()}>" if isinstance(name, str) and is_secret(name, inner) else hide_in_settings(inner)
            for name, inner in value.items()
        }
    return value


def hide_in_url(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    return re.sub(r"[?#].*", "", re.sub(r"(^|//)[^/?#]*@", r"\1", url, count=1))


def hide_in_text(text: str, known: Iterable[str] = ()) -> str:
    """Return a text without the known secrets, tokens of the Hub, and users in URLs."""
    for secret in known:
        text = text.replace(secret, HIDDEN)
    return URL_USER.sub(HIDDEN, HUB_TOKEN.sub(HIDDEN, text))
