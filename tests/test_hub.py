"""Pushing to a Hub over HTTP, and what another machine makes of what arrived there."""

import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from huggingface_hub import ModelCard

from helpers.loopback_hub import LoopbackHub
from helpers.processes import HELPERS, environment
from helpers.runs import assert_same_tensors
from helpers.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

MODEL = {
    *("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("critic/critic.safetensors", "critic/critic_config.json", "training_args.bin"),
}
STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "ppo_state_0.json", "manifest.json"}
CHECKPOINT = MODEL | STATE | {"ppo_state_0.safetensors"}  # the last one within a rollout only
CURVES = {"metrics.jsonl"}  # of every run, beside pictures
PICTURES = ("run.html", "reward.svg")  # the second if rewards were logged
WEIGHTS = ("adapter_model.safetensors", "critic/critic.safetensors")
PROGRESS = "Training in progress, step "


@pytest.fixture(scope="module")
def hub() -> LoopbackHub:
    return LoopbackHub()


def run(mode: str, folder: Path, hub: LoopbackHub) -> None:
    """Run tests/helpers/hub_runs.py with the hub as its Hub, which goes down when that is ready for it."""
    with (folder / f"{mode}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(HELPERS / "hub_runs.py"), mode, str(folder / "runs"), "--hub_token", hub.token],
            env=environment(**hub.environment(folder / f"home of {mode}")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        limit = Timer(180, process.kill)
        limit.start()
        for line in process.stdout:
            if line == "ready\n":
                hub.close()
                process.stdin.write("\n")
                process.stdin.flush()
        limit.cancel()
    assert process.wait() == 0, (folder / f"{mode}.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def runs(hub, tmp_path_factory) -> Path:
    """The folder in which one process has trained, and another, which knows the Hub alone, has loaded."""
    folder = tmp_path_factory.mktemp("hub")
    for seed, branch in ((0, "main"), (3, "v2")):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = None if branch == "main" else branch
        tiny_model(seed=seed).save_pretrained(folder / branch)
        tokenizer.save_pretrained(folder / branch)
        files = {path.name: path.read_bytes() for path in (folder / branch).iterdir()}
        hub.add("team/base", files, ["license:apache-2.0"], branch)
    hub.delay = 0.05  # long enough for the next checkpoint to come while one is uploaded
    (folder / "runs").mkdir()
    with hub:
        run("train", folder, hub)
        branches = hub.repositories["someone/all_checkpoints"].branches
        branches["early"] = branches["main"][:2]  # up to step 3
        run("load", folder, hub)
    return folder / "runs"


@pytest.fixture
def trained(runs) -> dict:
    return torch.load(runs / "train.pt")


@pytest.fixture
def loaded(runs) -> dict:
    return torch.load(runs / "load.pt")


FOLDERS = {
    "checkpoint": {"last-checkpoint": CHECKPOINT},
    "all_checkpoints": {"checkpoint-3": CHECKPOINT, "checkpoint-6": CHECKPOINT, "checkpoint-8": MODEL | STATE},
}
STEPS = {"end": [], "every_save": [3, 6, 8], "checkpoint": [3, 6], "all_checkpoints": [3, 6, 8]}
LAST = {"end": ["End of training"], "all_checkpoints": ["Model save"]}


@pytest.mark.parametrize("strategy", STEPS)
def test_what_each_strategy_pushes(runs, hub, strategy):
    folders, each = FOLDERS.get(strategy, {}), ("", ", checkpoint")
    files = MODEL | {f"{folder}/{name}" for folder, names in folders.items() for name in names}
    commits = [f"{PROGRESS}{step}{what}" for step in STEPS[strategy] for what in each[: 2 if folders else 1]]
    repo = f"someone/{strategy}"
    assert {name for name in hub.files(repo) if not name.endswith(PICTURES)} == files | CURVES
    assert hub.messages(repo)[1:] == commits + LAST.get(strategy, [])
    for name in MODEL - {"README.md"}:
        assert hub.files(repo)[name] == (runs / strategy / name).read_bytes(), name
    assert b'"traces": []' in hub.files(repo).get("run.html", b'"traces": []'), "no texts of completions"
    data = ModelCard(hub.files(repo)["README.md"].decode()).data
    assert data.library_name == "peft"
    assert {"ppo", "hfppo", "lora", "reinforcement-learning"} <= set(data.tags)
    if strategy == "end":  # its base is a folder
        assert data.base_model is None
        assert data.license == "mit"
        assert "sums" in data.tags
    else:
        assert data.base_model == "team/base"
        assert data.license == "apache-2.0"
        assert "base_model:adapter:team/base" in data.tags


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_pushed_actor_and_critic_are_of_one_step(runs, hub, strategy):
    """The folder that is pushed changes at the next checkpoint, while the Hub may still be reading it."""
    pushes = [c for c in hub.repositories[f"someone/{strategy}"].branches["main"] if c.message.startswith(PROGRESS)]
    assert pushes
    for commit in pushes:
        step = commit.message.removeprefix(PROGRESS).removesuffix(", checkpoint")
        for name in WEIGHTS:
            assert commit.files[name] == (runs / strategy / f"checkpoint-{step}" / name).read_bytes(), (step, name)
        assert f"{step} optimizer steps." in commit.files["README.md"].decode()


def test_no_secret_arrives(runs, hub):
    commits = [commit for repository in hub.repositories.values() for commit in repository.branches["main"]]
    assert [path for c in commits for path, content in c.files.items() if hub.token.encode() in content] == []


def test_plain_peft_and_pipeline_give_the_trained_model(trained, loaded):
    assert torch.equal(loaded["logits"], trained["logits"])
    assert loaded["tokens"] == character_tokenizer()("请问3+4=")["input_ids"]
    assert loaded["completion"] == loaded["card's code"] == trained["completion"]


def test_training_goes_on_from_the_repository(trained, loaded):
    assert torch.equal(loaded["logits by id"], trained["logits"])
    assert torch.equal(loaded["values"], trained["values"])
    assert trained["values"].abs().min() > 1e-3, "an untrained critic gives 0"
    assert loaded["kl"][0] == 0.0
    assert loaded["kl"][1] > 1e-5


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_a_pushed_checkpoint_resumes_bit_for_bit(trained, loaded, strategy):
    assert_same_tensors(loaded[f"resumed {strategy}"], trained["undisturbed"])


def test_a_revision_is_that_of_base_tokenizer_and_adapter(trained, loaded):
    """And what was trained on a revision of a base says so."""
    of_v2 = loaded["logits of v2"]
    assert torch.equal(of_v2["new"], of_v2["base"])
    assert not torch.equal(of_v2["trained"], of_v2["base"])
    assert torch.equal(of_v2["again"], of_v2["trained"])
    assert torch.equal(of_v2["by PEFT"], of_v2["trained"])
    assert torch.equal(of_v2["unnamed"], of_v2["trained"])
    assert loaded["named"] == "v2"
    assert loaded["templates"] == {"v2": "v2", "a loaded model": None}
    early = loaded["logits of early"]
    assert torch.equal(early["by id"], early["by PEFT"])
    assert not torch.equal(early["by id"], trained["logits"])


def test_a_hub_that_is_down(runs, hub, loaded):
    """Training goes on with a warning, the push at the end is an error, and the folder is complete."""
    assert hub.messages("someone/down") == ["initial commit"]
    log = (runs.parent / "load.log").read_text()
    assert "A push to someone/down failed" in log
    assert f"The push to someone/down failed. The model is in {runs / 'down'}" in loaded["error"]
    found = {str(path.relative_to(runs / "down")) for path in (runs / "down").rglob("*") if path.is_file()}
    kept = {name for name in found if not name.startswith("checkpoint-") and not name.endswith(PICTURES)}
    assert kept == MODEL | CURVES
    assert "4 optimizer steps." in (runs / "down/README.md").read_text()
