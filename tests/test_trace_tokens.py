"""Tokens as people read them."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfppo.reporting.token_texts import token_texts
from hfppo.support.printable import escape_control_characters


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with two merges: every byte is a token, and so are " a" and a space with the byte E4."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "Ġa", "Ġä"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("Ġ", "ä")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("你", ["<E4>", "<BD>", "<A0>→你"]),
        ("是a的", ["<E6>", "<98>", "<AF>→是", "a", "<E7>", "<9A>", "<84>→的"]),
        ("🙂", ["<F0>", "<9F>", "<99>", "<82>→🙂"]),
        (" 你", ["␣<E4>", "<BD>", "<A0>→你"]),
        ("é!", ["<C3>", "<A9>→é", "!"]),
        ("b a\n\t", ["b", "␣a", "↵", "⇥"]),
        ("\x1b[31m", ["<U+001B>", "[", "3", "1", "m"]),
    ],
)
def test_every_token_of_a_byte_level_tokenizer_is_readable(byte_tokenizer, text, expected):
    ids = byte_tokenizer(text)["input_ids"]
    assert token_texts(ids, byte_tokenizer) == expected


def test_bytes_that_never_become_a_character_do_not_borrow_from_the_next(byte_tokenizer):
    begun, other = byte_tokenizer("你")["input_ids"], byte_tokenizer("好")["input_ids"]
    assert token_texts([*begun[:2], *other], byte_tokenizer) == ["<E4>", "<BD>", "<E5>", "<A5>", "<BD>→好"]
    assert token_texts([begun[0], *byte_tokenizer("b")["input_ids"], *begun[1:]], byte_tokenizer) == [
        *("<E4>", "b", "<BD>", "<A0>")
    ]


def test_tokens_of_a_byte_fallback_tokenizer_and_ids_without_text():
    pieces = ["<unk>", "▁the", "<0xE4>", "<0xBD>", "<0xA0>", "same"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_texts([1, 5, 2, 3, 4, 99], wrapped) == ["␣the", "same", "<E4>", "<BD>", "<A0>→你", "<#99>"]


def test_what_would_act_in_a_terminal_or_turn_text_around_is_named():
    assert escape_control_characters("a\x1b[2J\u202eb\u2028\nc") == "a<U+001B>[2J<U+202E>b<U+2028>\nc"
