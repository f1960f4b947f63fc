"""Text of others, for a terminal or a page."""

import unicodedata

UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, which would act instead of being seen


def visible(text: str, marks: dict[str, str] | None = None) -> str:
    """Text without characters that act instead of being seen: escape sequences, changes of direction, half bytes.

    Args:
        marks: what takes the place of some characters.
    """
    return "".join((marks or {}).get(c) or (c if c in "\n\t" else escape_character(c)) for c in text)


def escape_character(character: str) -> str:
    if 0xDC80 <= (code := ord(character)) <= 0xDCFF:  # how "surrogateescape" keeps a byte
        return f"<{code - 0xDC00:02X}>"
    return f"<U+{code:04X}>" if unicodedata.category(character) in UNSEEN else character
