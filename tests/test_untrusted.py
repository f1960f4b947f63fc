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

from helpers.http_server import lengths
from helpers.runs import PROMPTS, count_digits, small_trainer
from helpers.tiny import lora, tiny_model
from hfppo import PPOTrainer, PrintCompletionsCallback, RewardServer, TokenTable, Transcript
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
    given = {"peft_config": peft_config, "train_dataset": PROMPTS}
    return small_trainer(folder, config, model=model, reward_funcs=reward_funcs, **given)


# All that a checkpoint holds; a file that comes to it fails the test below.
FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "critic/critic.safetensors", "critic/critic_config.json"),
    *("manifest.json", "optimizer.pt", "ppo_state_0.json", "ppo_state_0.safetensors", "README.md", "rng_state.pth"),
    *("scheduler.pt", "tokenizer.json", "tokenizer_config.json", "trainer_state.json", "training_args.bin"),
    "chat_template.jinja",
)


NOT_READ = ("adapter_config.json", "README.md", "tokenizer.json", "tokenizer_config.json", "training_args.bin")
NOT_READ += ("chat_template.jinja",)


def test_no_file_of_a_checkpoint_is_forgotten_here(checkpoint):
    assert {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_runs_code(checkpoint, tmp_path, mark, name):
    """Whoever writes a checkpoint can seal it, too."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(checkpoint, folder)
    with (folder / name).open("wb") as file:
        pickle.dump(Evil(mark), file)
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
    if kind == "adapter":
        lora(base_model_name_or_path=str(base)).save_pretrained(folder)
    else:
        (base / "model.safetensors").unlink()
    name = "adapter_model.bin" if kind == "adapter" else "pytorch_model.bin"
    torch.save({"lm_head.weight": Evil(mark)}, folder / name)
    with pytest.raises((ValueError, pickle.UnpicklingError), match=r"(?i)weights.only|pickle"):
        trainer(tmp_path / "out", model=str(folder), peft_config=None if kind == "adapter" else lora())
    assert not mark.exists()


@pytest.fixture
def plant(tmp_path, mark, monkeypatch):
    """Save a model or tokenizer with code of its own, which the fields of its configuration name."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = "import os\nfrom transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"

    def planted(saved, file: str, **fields) -> Path:
        folder = tmp_path / "code"
        saved.save_pretrained(folder)
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))
        (folder / "code.py").write_text(f"{code}os.mkdir({str(mark)!r})\n")
        return folder

    return planted


asked_for = pytest.mark.parametrize("asked", [False, True], ids=["not asked for", "asked for"])


@asked_for
def test_code_that_comes_with_a_model_runs_only_if_asked_for(plant, tmp_path, mark, asked):
    autos = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    folder = plant(tiny_model(), "config.json", model_type="its_own", auto_map=autos)
    kwargs = {"model_init_kwargs": {"trust_remote_code": True}} if asked else {}
    with pytest.raises((ValueError, AttributeError), match="Config" if asked else "trust_remote_code"):
        trainer(tmp_path / "out", model=str(folder), **kwargs)
    assert mark.exists() == asked


@asked_for
def test_code_that_comes_with_a_tokenizer_runs_only_if_asked_for(plant, mark, asked):
    autos = {"AutoTokenizer": ["code.Own", "code.Own"]}
    folder = plant(character_tokenizer(), "tokenizer_config.json", tokenizer_class="Own", auto_map=autos)
    with nullcontext() if asked else pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(str(folder), trust_remote_code=asked or None)
    assert mark.exists() == asked


LOADS = {
    "model": lambda code, named: load_model(code),
    "adapter": lambda code, named: load_model(named),
    "critic": lambda code, named: find_critic(code),
    "saved critic": lambda code, named: find_critic(named),
    "reward": lambda code, named: load_reward_func(code, None, "", torch.device("cpu")),
    "tokenizer": lambda code, named: load_tokenizer(code),
}


@pytest.mark.parametrize("load", LOADS)
def test_an_answer_that_is_piped_in_runs_no_code(plant, tmp_path, mark, monkeypatch, load):
    """Transformers asks whether to run the code that comes with a model, on the standard input."""
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    autos = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    autos = dict.fromkeys(autos, "code.Its")
    code, named = plant(tiny_model(), "config.json", model_type="its_own", auto_map=autos), tmp_path / "named"
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(code), "task_type": "CAUSAL_LM"}
    named.mkdir()
    save_file({}, named / "adapter_model.safetensors")
    for file, fields in {
        code / "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["code.Its", None]}},
        named / "critic_config.json": {"kind": "model", "base": str(code)},
        **({named / "adapter_config.json": adapter} if load == "adapter" else {}),
    }.items():
        file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="trust_remote_code"):
        LOADS[load](str(code), str(named))
    assert not mark.exists()


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
    columns = table.columns | {"token": [NASTY] * len(table.columns["token"])}
    check_harmless(printed(TokenTable(prompt=NASTY, score=1.0, columns=columns)))


def test_a_server_is_asked_directly_whatever_the_environment_says(serve, monkeypatch, tmp_path):
    """Proxies would see prompts and keys; .netrc would send passwords along."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    scoring = serve(lengths)
    RewardServer(scoring.url, max_retries=0).check()
    (headers,) = scoring.headers
    assert "authorization" not in {name.lower() for name in headers}


def test_no_secret_reaches_logs_or_files(serve, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", f"hf_{SECRET}")
    scoring = serve(lengths)
    url = scoring.url.replace("http://", f"http://me:{SECRET}@") + f"?key={SECRET}"
    server = RewardServer(url, headers={"Authorization": f"Bearer {SECRET}"})
    saving = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    made = trainer(tmp_path / "out", reward_funcs=server, hub_token=SECRET, **saving)
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
