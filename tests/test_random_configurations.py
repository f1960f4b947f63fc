"""Configurations drawn at random: a resumed run is the straight one bit for bit.

The tests take a few; `CONFIGURATIONS=200 pytest -m slow tests/test_random_configurations.py` looks further.
"""

import json
import os
import random

import pytest

from helpers.drawn import trainer_of
from helpers.runs import assert_same_end, logs

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
numbered = pytest.mark.parametrize("number", range(int(os.environ.get("CONFIGURATIONS", "6"))))


@numbered
def test_a_resumed_run_is_the_straight_one(number, tmp_path):
    straight = trainer_of(number, tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight.train()
    step = random.Random(number).randint(1, straight.args.max_steps - 1)
    resumed = trainer_of(number, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert_same_end(resumed, straight)
    assert resumed.ppo_state == straight.ppo_state
    assert json.dumps(logs(resumed), sort_keys=True) == json.dumps(logs(straight), sort_keys=True)  # some are NaN
