"""Tokens as people read them, also where one character is spread over several tokens."""

import codecs
import re
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

from hfppo.support.printable import visible

REPLACEMENT = "\ufffd"  # what decoding puts where bytes are no text
MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}
BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token stands for, with spaces and line breaks made visible.

    A token that is a part of a character shows its bytes, and the one that completes the character names it:
    `<E4>`, `<BD>`, `<A0>→你`. An id without text, as models with a padded vocabulary may give, shows as `<#151700>`.
    """
    pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(ids))]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = []
    for token_id, piece in zip(ids, pieces, strict=True):
        text = str(tokenizer.decode([token_id]))
        raw = piece_bytes(piece) if REPLACEMENT in text else None
        if raw is None:
            decoder.reset()
            spaced = f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text
            texts.append(visible(spaced, MARKS) or f"<#{token_id}>")
        else:
            begun = bool(decoder.getstate()[0])
            completed = decoder.decode(raw)
            name = f"→{visible(completed, MARKS)}" if begun and completed.strip(REPLACEMENT) else ""
            texts.append(visible(raw.decode(errors="surrogateescape"), MARKS) + name)
    return texts


def piece_bytes(piece: str) -> bytes | None:
    """The bytes of a vocabulary entry of a byte-level or byte-fallback tokenizer; None if it is neither."""
    if match := BYTE_FALLBACK.fullmatch(piece):
        return bytes.fromhex(match[1])
    table = byte_of_letter()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else None


@cache
def byte_of_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE: visible Latin-1 characters stand for themselves, U+0100 and on for the rest."""
    seen = [b for b in range(256) if chr(b).isprintable() and chr(b) not in " \u00a0"]
    unseen = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + n): b for n, b in enumerate(unseen)}
