"""What the processes of a run are given is compared before anything is sampled."""

import re

import pytest

from helpers.processes import run_two_processes
from hfppo.support import processes
from hfppo.support.processes import check_alike


def test_a_difference_is_named_with_hosts_and_values(monkeypatch):
    others = [("b", {"seed": 1, "lam": 0.9}), ("c", {"seed": 2})]
    monkeypatch.setattr(processes, "gather_object", lambda mine: [("a", mine[0][1]), *others])
    with pytest.raises(ValueError, match=r"^lam is None on process 0 \(a\), but 0\.9 on process 1 \(b\)"):
        check_alike({"seed": 1})


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict[str, str]]:
    """What the processes of tests/helpers/unlike_processes.py say; "" if they go on."""
    return run_two_processes("unlike_processes.py", tmp_path_factory.mktemp("unlike"))


WORDS = {
    "order": "train_dataset: rows",
    "length": "train_dataset: number of rows is 16 .* 8",
    "label": "train_dataset: rows",
    "columns": r"train_dataset: columns is \['prompt', 'answer'\] .*'label'",
    "evaluation": r"eval_dataset\['hard'\]: rows",
    "names": r"eval_dataset\['hard'\]: .* None",
    "number": r"eval_dataset\['hard'\]: .* None",
    "stream": "train_dataset .*prompts",
    "setting": "learning_rate is 0.001 .*0.0001",
    "saves": "save_strategy is 'no' .*'steps'",
    "base": "base .SHA-256",
    "adapter": "model, ref_model or critic",
    "reward": "reward_funcs is .*count_digits.*other_reward",
    "versions": "torch is '2.13' .*'2.14'",
    "evaluate": "the name of the evaluated dataset is .train_dataset. on process 0",
    "evaluate another": "eval_dataset: number of rows is 16 .* 8",
    "rollout": "number of prompts is 2 .* 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WORDS)
def test_two_processes_say_what_differs(said, case):
    first, second = (of_process[case] for of_process in said)
    assert first == second
    assert re.match(WORDS[case], first), first


@pytest.mark.slow
@pytest.mark.parametrize("case", ["own folder", "untrained adapter", "own prompts", "other dataset"])
def test_what_may_differ(said, case):
    assert [of_process[case] for of_process in said] == ["", ""]
