"""Seeds of random draws, named by what each draw is for."""

import hashlib

# Purposes of random draws; two purposes never share numbers.
ORDER_STREAM, SAMPLING_STREAM, EVAL_STREAM, SHUFFLE_STREAM, ENVIRONMENT_STREAM = 1, 2, 3, 4, 5
HELD_OUT_STREAM, PRETRAINING_STREAM, BEST_OF_STREAM = 6, 7, 8


def stream_seed(*numbers: int) -> int:
    """Return a 63-bit seed for a tuple of numbers; any other tuple gives an unrelated seed.

    Random draws are named by (seed, purpose, rollout, row) instead of coming from one global stream, so a resumed run
    draws the same numbers without saved state, and no draw disturbs another.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
