"""Find passwords, tokens and keys in settings, which are saved and shown in plain text; hide them in addresses."""

import re

# `token`, `hf_token`, `apiKey`, `X-Auth-Token`; not `tokenizer`, `max_tokens`, `thinking_token`.
SECRET_NAME = re.compile(
    r"(?i)token|(.*[\W_])?((access|api|auth|hf|hub|private|secret)[\W_]?(token|key)s?"
    r"|secrets?|passw(or)?ds?|passphrase|credentials?|authorization|cookie)"
)
PLACEHOLDER = re.compile(r"<.*>|\[.*\]")  # `<think>`, or `<HUB_TOKEN>`, which TrainingArguments shows
SECRET_TEXT = re.compile(r"\bhf_[A-Za-z0-9]{20,}|\w://[^/\s@\"']+@")  # a token of the Hub, the user in a URL


def find_secret(name: str, value: object, place: str) -> str | None:
    """Return where a setting has a secret, at any depth, such as "model_init_kwargs['token']", or None."""
    text = value if isinstance(value, str) else ""
    is_named = SECRET_NAME.fullmatch(name) and isinstance(value, str | bytes | list | tuple | dict) and value
    if (is_named and not PLACEHOLDER.fullmatch(text)) or SECRET_TEXT.search(text):
        return place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    found = (find_secret(str(key), x, f"{place}[{key!r}]") for key, x in inner)
    return next((where for where in found if where), None)


def hide_in_url(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    return re.sub(r"[?#].*", "", re.sub(r"(^|//)[^/?#]*@", r"\1", url, count=1))
