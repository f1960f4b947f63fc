"""Make untrusted text safe to display: replace control and format characters."""

import unicodedata

UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories of control and format characters


def visible(text: str, marks: dict[str, str] | None = None) -> str:
    """Replace characters that a terminal or page would act on: escapes, changes of direction, stray bytes.

    Args:
        marks: replacements of some characters.
    """
    return "".join((marks or {}).get(c) or (c if c in "\n\t" else escape_character(c)) for c in text)


def escape_character(character: str) -> str:
    """Return the code of a control or format character in angle brackets, another character as it is."""
    if 0xDC80 <= (code := ord(character)) <= 0xDCFF:  # how "surrogateescape" keeps a byte
        return f"<{code - 0xDC00:02X}>"
    return f"<U+{code:04X}>" if unicodedata.category(character) in UNSEEN else character
