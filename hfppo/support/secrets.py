"""Find passwords, tokens and keys in settings, which are saved and shown in plain text; hide them in addresses."""

import re

# `token`, `hf_token`, `apiKey`, `Proxy-Authorization`; not `tokenizer`, `max_tokens`, `thinking_token`.
SECRET_NAME = re.compile(
    r"(?i)token|(?:.*[\W_])?(?:(?:access|api|auth|hf|hub|private|secret)[\W_]?(?:token|key)s?"
    r"|secrets?|passwords?|passwd|passphrase|credentials?|authorization|cookie)"
)
PLACEHOLDER = re.compile(r"<.*>|\[.*\]")  # `<think>`, or `<HUB_TOKEN>`, which TrainingArguments shows
SECRET_TEXT = re.compile(r"\bhf_[A-Za-z0-9]{20,}|\w://[^/\s@\"']+@")  # a token of the Hub, the user in a URL


def find_secret(value: object, place: str) -> str | None:
    """Return where a setting has a secret, at any depth, such as "model_init_kwargs['token']", or None."""
    if isinstance(value, str):
        return place if SECRET_TEXT.search(value) else None
    inner: list[tuple[str, str, object]] = []  # name, place, value
    if isinstance(value, dict):
        inner = [(str(name), f"{place}[{name!r}]", x) for name, x in value.items()]
    elif isinstance(value, list | tuple):
        inner = [("", f"{place}[{i}]", x) for i, x in enumerate(value)]
    found = (where if is_secret(name, x) else find_secret(x, where) for name, where, x in inner)
    return next((where for where in found if where), None)


def is_secret(name: str, value: object) -> bool:
    """Return whether the name says that the value is a secret; a switch, a number or a placeholder is none."""
    if isinstance(value, str) and (not value or PLACEHOLDER.fullmatch(value)):
        return False
    return isinstance(value, str | bytes | list | tuple | dict) and SECRET_NAME.fullmatch(name) is not None


def hide_in_url(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    return re.sub(r"[?#].*", "", re.sub(r"(^|//)[^/?#]*@", r"\1", url, count=1))
