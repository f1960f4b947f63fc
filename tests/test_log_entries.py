"""Values of any kind among the logs: a report takes the numbers, and ends no run."""

import json
import math
from collections import UserDict

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from helpers.runs import read_log
from hfppo.support.log_entries import numbers_of, plain_entry

ODD = {
    "text": "好",
    "list": [1, np.float32(0.5)],
    "dict": {"a": torch.ones(2)},
    "none": None,
    "object": UserDict(),
    "array": np.ones(3),
    0: "an integer key",
    ("a", 1): 2.0,
    np.int64(7): 0.25,
    "flag": True,
    "numpy": np.float64(0.5),
    "whole": np.int32(3),
    "tensor": torch.tensor(1.5),
    "nan": math.nan,
}
NUMBERS = {
    "('a', 1)": 2.0,
    "7": 0.25,
    "flag": True,
    "numpy": 0.5,
    "whole": 3,
    "tensor": 1.5,
    "nan": pytest.approx(math.nan, nan_ok=True),
}


def test_numbers_are_those_of_numpy_and_torch_too():
    assert numbers_of(ODD) == NUMBERS
    assert numbers_of({}) == {}


def test_a_plain_entry_is_json():
    plain = plain_entry(ODD)
    assert json.loads(json.dumps(plain, sort_keys=True)).keys() == {str(name) for name in ODD}
    assert plain["list"] == [1, 0.5]
    assert plain["none"] is None


class Logs(TrainerCallback):
    """Logs odd values within another log, as some callbacks do."""

    trainer = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs["of_callback"] = "text"
        if "policy/entropy" in logs and state.global_step == 2 and "text" not in logs:
            self.trainer.log({**ODD, "kl": None, "policy/clip_frac": "text"})


@pytest.mark.usefixtures("run_page")
def test_odd_values_of_metrics_and_logs_end_no_run(make_trainer, dataset):
    config = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1}
    callback = Logs()
    trainer = make_trainer(
        config | {"disable_tqdm": False},
        eval_dataset=dataset.select(range(2)),
        compute_metrics=lambda prediction: ODD,
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()
    trainer.create_model_card()
    history = read_log(trainer.args.output_dir)
    assert json.dumps(history, sort_keys=True) == json.dumps(trainer.state.log_history, sort_keys=True)  # has NaN
    assert [entry["step"] for entry in history if "text" in entry] == [2]
    evaluation = next(entry for entry in history if "eval_text" in entry)
    assert evaluation["eval_7"] == 0.25
    assert evaluation["eval_0"] == "an integer key"
