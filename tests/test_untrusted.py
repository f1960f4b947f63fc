"""What others wrote: checkpoints and models run no code, text steers no terminal, servers lead nowhere else."""

import io
import json
import logging
import os
import pickle
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerState

from helpers.http_server import Server, lengths
from helpers.runs import PROMPTS, SMALL, count_digits
from helpers.tiny import lora, tiny_model
from hfppo import PPOConfig, PPOTrainer, PrintCompletionsCallback, RewardServer, TokenTable, Transcript
from hfppo.models.critic import find_critic
from hfppo.models.loading import load_model, load_tokenizer
from hfppo.rewards.load_rewards import load_reward_func
from hfppo.saving.manifest import seal

SECRET = "s3cr3t-Zf9kQ2"


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path) -> Path:
    """Is there once code has run."""
    return tmp_path / "code-has-run"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """In the middle of a rollout."""
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, max_steps=2, save_strategy="steps", save_steps=2).train()
    return folder / "checkpoint-2"


def trainer(folder: Path, *, model=None, peft_config=lora(), reward_funcs=count_digits, **config) -> PPOTrainer:  # noqa: B008
    return PPOTrainer(
        model=tiny_model() if model is None else model,
        reward_funcs=reward_funcs,
        args=PPOConfig(**{**SMALL, "output_dir": str(folder), **config}),
        train_dataset=PROMPTS,
        processing_class=character_tokenizer(),
        peft_config=peft_config,
    )


# All that a checkpoint holds; a file that comes to it fails the test below.
FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "critic/critic.safetensors", "critic/critic_config.json"),
    *("manifest.json", "optimizer.pt", "ppo_state_0.json", "ppo_state_0.safetensors", "README.md", "rng_state.pth"),
    *("scheduler.pt", "tokenizer.json", "tokenizer_config.json", "trainer_state.json", "training_args.bin"),
)


NOT_READ = ("adapter_config.json", "README.md", "tokenizer.json", "tokenizer_config.json", "training_args.bin")


def test_no_file_of_a_checkpoint_is_forgotten_here(checkpoint):
    assert {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()} == set(FILES)


@pytest.mark.parametrize(
    "legacy",
    [
        pytest.param(True, id="bare pickle"),
        pytest.param(False, id="torch.save", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_runs_code(checkpoint, tmp_path, mark, name, legacy):
    """Whoever writes a checkpoint can seal it, too."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(checkpoint, folder)
    with (folder / name).open("wb") as file:
        pickle.dump(Evil(mark), file) if legacy else torch.save(Evil(mark), file)
    if name != "manifest.json":
        seal(folder)
    refusals = (ValueError, SafetensorError, pickle.UnpicklingError)
    with nullcontext() if name in NOT_READ else pytest.raises(refusals):
        trainer(tmp_path / "out", max_steps=3).train(resume_from_checkpoint=str(folder))
    assert not mark.exists()


def test_the_planted_code_would_run(mark):
    """Else the tests above could not fail."""
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()


@pytest.mark.parametrize("kind", ["base", "adapter"])
def test_pickled_weights_of_a_model_run_no_code(tmp_path, mark, kind):
    base, folder = tmp_path / "base", tmp_path / kind
    tiny_model().save_pretrained(base)
    folder.mkdir(exist_ok=True)
    if kind == "adapter":
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base), "task_type": "CAUSAL_LM"})
        )
    else:
        (base / "model.safetensors").unlink()
    name = "adapter_model.bin" if kind == "adapter" else "pytorch_model.bin"
    torch.save({"lm_head.weight": Evil(mark)}, folder / name)
    with pytest.raises((ValueError, pickle.UnpicklingError), match=r"(?i)weights.only|pickle"):
        trainer(tmp_path / "out", model=str(folder), peft_config=None if kind == "adapter" else lora())
    assert not mark.exists()


@pytest.mark.parametrize("asked", [False, True], ids=["not asked for", "asked for"])
def test_code_that_comes_with_a_model_runs_only_if_asked_for(tmp_path, mark, monkeypatch, asked):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "its_own",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    kwargs = {"model_init_kwargs": {"trust_remote_code": True}} if asked else {}
    with pytest.raises((ValueError, AttributeError), match="" if asked else "trust_remote_code"):
        trainer(tmp_path / "out", model=str(folder), **kwargs)
    assert mark.exists() == asked


@pytest.mark.parametrize("named", ["model", "adapter", "critic", "saved critic", "reward", "tokenizer"])
def test_an_answer_that_is_piped_in_runs_no_code(tmp_path, mark, monkeypatch, named):
    """Transformers asks whether to run the code that comes with a model, on the standard input."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    code, folder = tmp_path / "code", tmp_path / "named"
    tiny_model().save_pretrained(code)
    autos = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    own = {"model_type": "its_own", "auto_map": dict.fromkeys(autos, "code.Its")}
    (code / "config.json").write_text(json.dumps(json.loads((code / "config.json").read_text()) | own))
    (code / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.Its", None]}}))
    (code / "code.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    folder.mkdir()
    (folder / "critic_config.json").write_text(json.dumps({"kind": "model", "base": str(code)}))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(code), "task_type": "CAUSAL_LM"}
    save_file({}, folder / "adapter_model.safetensors")
    load = {
        "model": lambda: load_model(str(code)),
        "adapter": lambda: load_model(str(folder)),
        "critic": lambda: find_critic(str(code)),
        "saved critic": lambda: find_critic(str(folder)),
        "reward": lambda: load_reward_func(str(code), None, "", torch.device("cpu")),
        "tokenizer": lambda: load_tokenizer(str(code)),
    }[named]
    if named == "adapter":
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load()
    assert not mark.exists()


@pytest.mark.parametrize("asked", [False, True], ids=["not asked for", "asked for"])
def test_code_that_comes_with_a_tokenizer_runs_only_if_asked_for(tmp_path, mark, monkeypatch, asked):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    character_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    code = "import os\nfrom transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    (folder / "own.py").write_text(f"{code}os.mkdir({str(mark)!r})\n")
    with nullcontext() if asked else pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(str(folder), trust_remote_code=asked or None)
    assert mark.exists() == asked


NASTY = "[red]x[/red] [/] \x1b[2J\x1b]0;owned\x07 \x9b31m \u202e \r\b [link=http://evil]y"


def printed(thing, monkeypatch=None) -> str:
    """What reaches a terminal with colours, without the colours that are rich's own."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=400, color_system="truecolor")
    console.print(thing)
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())


def check_harmless(shown: str) -> None:
    assert "[red]x[/red] [/]" in shown
    assert "[link=http://evil]y" in shown
    assert not set(shown) & set("\x1b\x07\x9b\u202e\r\b"), shown


@pytest.mark.parametrize("chat", [False, True], ids=["text", "messages"])
def test_completions_steer_no_terminal(monkeypatch, tmp_path, chat):
    shown = []
    monkeypatch.setattr("rich.print", lambda table: shown.append(printed(table)))
    made = trainer(tmp_path)
    completion = [{"role": "assistant", "content": NASTY}] if chat else NASTY
    PrintCompletionsCallback().on_rollout_end(
        made.args,
        TrainerState(is_world_process_zero=True),
        made.control,
        rollout=made.rollout(["1+1="]),
        transcript=Transcript([NASTY], [completion], {NASTY: [1.0]}, {"extra": [NASTY]}),
        metrics={},
        ppo_state=made.ppo_state,
    )
    check_harmless("".join(shown))


def test_the_token_table_steers_no_terminal(tmp_path):
    made = trainer(tmp_path)
    table = TokenTable.from_rollout(made.rollout(["1+1="]), 0, made.processing_class)
    rows = [type(table.rows[0])(NASTY, *list(vars(table.rows[0]).values())[1:])]
    check_harmless(printed(TokenTable(NASTY, 1.0, rows)))


@pytest.fixture
def scoring():
    server = Server(lengths)
    yield server
    server.stop()


def test_a_server_is_asked_directly_whatever_the_environment_says(scoring, monkeypatch, tmp_path):
    """Proxies would see prompts and keys; .netrc would send passwords along."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    RewardServer(scoring.url, max_retries=0).check()
    (headers,) = scoring.headers
    assert "authorization" not in {name.lower() for name in headers}


def test_a_redirect_is_not_followed(scoring):
    first = Server(lambda body: (302, b""))
    try:
        with pytest.raises(RuntimeError, match="answered 302"):
            RewardServer(first.url, max_retries=0, headers={"Authorization": SECRET}).check()
    finally:
        first.stop()
    assert len(first.asked) == 1


def test_no_secret_reaches_logs_or_files(scoring, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", f"hf_{SECRET}")
    url = scoring.url.replace("http://", f"http://me:{SECRET}@") + f"?key={SECRET}"
    server = RewardServer(url, headers={"Authorization": f"Bearer {SECRET}"})
    made = trainer(
        tmp_path / "out", reward_funcs=server, hub_token=SECRET, max_steps=1, save_strategy="steps", save_steps=1
    )
    with caplog.at_level(logging.INFO):
        made.train()
        made.save_model()
        made.create_model_card()
        scoring.stop()
        server.endpoint = replace(server.endpoint, stop=lambda state: True)
        with pytest.raises(RuntimeError) as refused:
            made.rollout(["1+1="])
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holding == []
    assert SECRET not in caplog.text + str(refused.value) + repr(server) + str(made.args) + repr(made._checkpoint)
