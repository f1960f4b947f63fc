"""Make untrusted text safe to display: replace control and format characters."""

import unicodedata

UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories of control and format characters


def escape_control_characters(text: str, marks: dict[str, str] | None = None) -> str:
    """Replace control and format characters, such as terminal escapes and changes of direction, by their codes.

    Args:
        marks: characters with other replacements, such as "␣" for a space. Without marks, line breaks and tabs stay.
    """
    return "".join((marks or {}).get(c) or (c if c in "\n\t" else escape_character(c)) for c in text)


def escape_character(character: str) -> str:
    """Return a control or format character as its code in angle brackets, and any other character unchanged."""
    if 0xDC80 <= (code := ord(character)) <= 0xDCFF:  # how "surrogateescape" keeps a byte
        return f"<{code - 0xDC00:02X}>"
    return f"<U+{code:04X}>" if unicodedata.category(character) in UNSEEN else character
