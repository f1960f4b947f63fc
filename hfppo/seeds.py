"""Seeds of random draws, named by what each draw is for."""

import hashlib

# What random draws are for; two of them never share numbers.
ORDER_STREAM, SAMPLING_STREAM, EVAL_STREAM, SHUFFLE_STREAM = 1, 2, 3, 4


def stream_seed(*numbers: int) -> int:
    """A 63-bit seed from a tuple of numbers; any other tuple gives an unrelated one.

    Random draws are named by what they are for, (seed, purpose, rollout, row), instead of being taken from one global
    stream. Nothing has to be saved for a resumed run to draw the same, and no draw disturbs another.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
