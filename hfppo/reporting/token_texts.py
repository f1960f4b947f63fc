"""Readable texts for tokens, even if one character is spread over several tokens."""

import codecs
import re
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hfppo.support.printable import escape_control_characters

REPLACEMENT = "\ufffd"  # the character that decoding puts in place of invalid bytes
MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}
BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token, with spaces and line breaks made visible.

    A token that is a part of a character shows its bytes, and the one that completes the character names it:
    `<E4>`, `<BD>`, `<A0>→你`. An id without text, as models with a padded vocabulary may give, shows as `<#151700>`.
    """
    pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(ids))]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = []
    for token_id, piece in zip(ids, pieces, strict=True):
        text = str(tokenizer.decode([token_id]))
        raw = decode_piece(piece) if REPLACEMENT in text else None
        if raw is None:
            decoder.reset()
            spaced = f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text
            texts.append(escape_control_characters(spaced, MARKS) or f"<#{token_id}>")
        else:
            inside_character = bool(decoder.getstate()[0])
            completed = decoder.decode(raw)
            has_name = inside_character and completed.strip(REPLACEMENT)
            name = f"→{escape_control_characters(completed, MARKS)}" if has_name else ""
            texts.append(escape_control_characters(raw.decode(errors="surrogateescape"), MARKS) + name)
    return texts


def decode_piece(piece: str) -> bytes | None:
    """Return the bytes of a vocabulary entry of a byte-level or byte-fallback tokenizer; None for other entries."""
    if match := BYTE_FALLBACK.fullmatch(piece):
        return bytes.fromhex(match[1])
    alphabet = byte_level_alphabet()
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else None


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each letter in byte-level BPE."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}
