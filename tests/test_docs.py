"""The pages of docs/ name everything public, state defaults and figures as they are, and their code runs."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import pytest
from datasets import Dataset, load_dataset
from transformers import TrainingArguments

import hfppo
import hfppo.functional as F
from hfppo import PPOConfig
from hfppo.metrics import METRICS

ROOT = Path(hfppo.__file__).parent.parent
DOCS = ROOT / "docs"
README, QUICKSTART = ROOT / "README.md", DOCS / "quickstart.md"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
PAIRS = [(page, DOCS / page.relative_to(DOCS / "zh")) for page in PAGES if page.parent.name == "zh"]
INHERITED = {f.name: f.default for f in fields(TrainingArguments)}
# Without the name that activation_checkpointing has before transformers 5.20.
OTHERS = {f.name: f.default for f in fields(PPOConfig) if f.name != "gradient_checkpointing"}
STATED = {name: default for name, default in OTHERS.items() if name not in INHERITED or INHERITED[name] != default}
NUMBER = re.compile(r"[−-]?\d[\d,]*(?:\.\d+)?")

sys.path.insert(0, str(DOCS))
import figures  # noqa: E402 (what docs/conf.py uses)

# The figures of the reference are made at build time only.
EXECUTED = [page for page in PAGES if figures.is_executed(page.read_text()) and page.name != "reference.md"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def first_cells(page: Path) -> list[list[str]]:
    """The cells of each table row that begins with a word in backticks, the backticks taken off."""
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row] for row in rows]


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_field_is_in_the_configuration_with_its_default():
    table = {name: default for name, default, *_ in first_cells(DOCS / "configuration.md")}
    assert table.keys() == STATED.keys()
    assert {name: ast.literal_eval(default) for name, default in table.items()} == STATED


def test_every_metric_and_no_other_has_a_line():
    names = [row[0] for row in first_cells(DOCS / "metrics.md")]
    assert len(names) == len(set(names))
    assert set(names) == METRICS.keys()


@pytest.mark.parametrize("owner", [hfppo, F], ids=lambda module: module.__name__)
def test_every_public_name_is_on_some_page(owner):
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in owner.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_links_between_pages_resolve():
    for page in (README, *PAGES):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            if "://" not in target:
                assert linked.is_file(), f"{page}: {target}"
                assert not anchor or anchor in anchors(linked), f"{page}: {target}"


def test_no_line_is_lost_or_something_else_by_its_first_character():
    """MyST drops lines that begin with %, Markdown makes a list of those that begin with + and a space.

    A row after an empty line begins a table, which needs a header.
    """
    for page in (README, *PAGES):
        text = re.sub(r"^```.*?^```$|^<!-- python.*?^-->$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"^\s*(?:%|\+ ).*", text, flags=re.MULTILINE) == [], name_of(page)
        assert re.findall(r"\n\n(\|.*)\n(?!\|[-|]+\|\n)", text) == [], name_of(page)


def test_python_blocks_are_python():
    for page in (README, *PAGES):
        for block in blocks(page, "python"):
            ast.parse(block)


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: name_of(page))
def test_both_languages_have_the_same_code_and_link_to_each_other(chinese, english):
    for language in ("python", "bash", "text"):
        assert blocks(chinese, language) == blocks(english, language)
    assert f"\n[English](../{english.name})\n" in chinese.read_text()
    assert f"\n[中文](zh/{chinese.name})\n" in english.read_text()
    contents = "index.md" if chinese.stem == "index" else "zh/index.md"
    assert re.search(rf"^(zh/)?{chinese.stem}$", (DOCS / contents).read_text(), flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_pages_hold_the_figures_that_their_code_makes(page):
    """Up to what another machine may round differently. `python docs/figures.py PAGE` writes new ones."""
    text = page.read_text()
    new = figures.renewed(text)
    # The widths of columns hang on the sign of a zero.
    assert re.sub(r"[ ─]+", " ", NUMBER.sub("0", new)) == re.sub(r"[ ─]+", " ", NUMBER.sub("0", text))
    for ours, theirs in zip(NUMBER.findall(text), NUMBER.findall(new), strict=True):
        given, made = (float(number.replace("−", "-").replace(",", "")) for number in (ours, theirs))
        assert given == (pytest.approx(made, rel=0.1, abs=0.02) if "." in ours else made)


def run_blocks(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Run a page's blocks, one after the other in one namespace, where the recipes lie beside."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(folder)
    namespace: dict = {"__name__": page.stem}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    return namespace


@pytest.mark.slow
def test_quickstart_runs(tmp_path, monkeypatch, capsys):
    assert len(blocks(QUICKSTART, "python")) == 5
    assert run_blocks(QUICKSTART, tmp_path, monkeypatch)["trainer"].state.global_step == 12
    shown = capsys.readouterr().out
    assert "advantage" in shown  # the token table
    assert "rollout 3: 64 completions" in shown  # the callback, after the resume
    assert "请问1+1=2？是的" in shown  # plain PEFT


@pytest.mark.slow
def test_what_is_ones_own_runs(tmp_path, monkeypatch, capsys):
    for mapping, name in ((F.POLICY_LOSSES, "unclipped"), (F.ADVANTAGE_ESTIMATORS, "better_than_half")):
        monkeypatch.setitem(mapping, name, None)  # so that it is gone afterwards
    assert run_blocks(DOCS / "extending.md", tmp_path, monkeypatch)["trainer"].collector.sampler.seconds > 0
    assert "s of sampling" in capsys.readouterr().out


@pytest.mark.slow
def test_readme_code_runs(tmp_path, monkeypatch):
    """With a small model in a folder of the name that the Hub knows a larger one by, and fewer episodes."""
    from build_tiny_base import build
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    (block,) = blocks(README, "python")
    (model,) = re.findall(r'model="(.*?)"', block)
    build(model)
    assert block.count("total_episodes=2_560") == 1
    exec(compile(block.replace("2_560", "8"), "README.md", "exec"), {"__name__": "readme"})
    (load,) = re.findall(r"`(AutoPeftModelForCausalLM.*?)`", README.read_text())
    assert eval(load, {"AutoPeftModelForCausalLM": AutoPeftModelForCausalLM}).peft_config


@pytest.mark.slow
def test_a_script_converted_from_trl_runs(tmp_path, monkeypatch):
    """With a small model under the name that the Hub knows a larger one by, short completions and no GPU."""
    from build_tiny_base import build

    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a} + {a}?", "answer": str(a + a)} for a in range(8)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script, changes = blocks(DOCS / "from_trl.md", "python")
    classes, _, fields = changes.partition("args = GRPOConfig(")
    changed = script.replace("from trl import GRPOConfig, GRPOTrainer", classes).replace("out/grpo", "out/hfppo")
    changed = changed.replace("GRPOConfig(\n", f"GRPOConfig({fields.rstrip().removesuffix(')')}")
    (model,) = re.findall(r'model="(.*?)"', changed)
    build(model)
    for there, here in (("bf16=True", "use_cpu=True"), ('"wandb"', '"none"'), ("length=256", "length=8")):
        assert changed.count(there) == 1
        changed = changed.replace(there, here)
    namespace: dict = {"__name__": "from_trl"}
    exec(compile(changed, "from_trl.md", "exec"), namespace)
    trainer = namespace["trainer"]
    assert trainer.args.rollout_size_per_process * trainer.args.world_size == 32
    assert trainer.state.global_step == 2


def test_reward_functions_and_parquet_files_of_verl_work_as_the_page_says(tmp_path, tokenizer, make_trainer):
    """Rows in verl's columns; the score may be a dictionary, as verl allows."""
    (block,) = blocks(DOCS / "from_verl.md", "python")
    namespace: dict = {}
    exec(block, namespace)
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info["index"]))
        return {"score": float(ground_truth)} if extra_info["index"] else float(ground_truth)

    rows = {
        **{"data_source": ["sums"] * 2, "ability": ["math"] * 2},
        "prompt": [[{"role": "user", "content": f"{index}+1="}] for index in range(2)],
        "reward_model": [{"style": "rule", "ground_truth": str(index + 1)} for index in range(2)],
        "extra_info": [{"split": "train", "index": index} for index in range(2)],
    }
    Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    data = load_dataset("parquet", data_files=str(tmp_path / "train.parquet"), split="train", cache_dir=str(tmp_path))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    trainer = make_trainer(
        {"max_completion_length": 4}, reward_funcs=namespace["from_verl"](compute_score), train_dataset=data
    )
    columns = {name: data[name] for name in ("data_source", "reward_model", "extra_info")}
    assert trainer.rollout(data["prompt"], **columns).scores.tolist() == [1.0, 2.0]
    assert [(source, truth, index) for source, _, truth, index in seen] == [("sums", "1", 0), ("sums", "2", 1)]
    assert all(isinstance(text, str) for _, text, _, _ in seen)


def commands() -> list[str]:
    """Each command of README and quickstarts once, but for blocks that say why they are not run."""
    found: list[str] = []
    for page in (README, QUICKSTART, DOCS / "zh/quickstart.md"):
        runnable = re.sub(r"<!-- not run: .*? -->\n```bash\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.M)
        for block in re.findall(r"^```bash\n(.*?)^```$", runnable, flags=re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                found += [" ".join(command.split()) for command in line.split("&&")]
    return list(dict.fromkeys(found))


def test_commands_for_cpus_start_as_many_processes_as_they_say():
    """accelerate starts one process on CPUs, whatever the number; torchrun's are connected with --use_cpu alone."""
    records = DOCS / "notes/results.md"  # commands as they were run
    pages = [README, *(page for page in PAGES if page != records), *(ROOT / "recipes").rglob("*.py")]
    lines = [line for page in pages for line in page.read_text().replace("\\\n", " ").splitlines()]
    launched = [line for line in lines if re.search(r"(torchrun|accelerate launch) .*recipes/[\w/]+\.py", line)]
    assert len(launched) > 20
    assert [line for line in launched if " --cpu" in line] == []
    on_one_machine = [line for line in launched if "torchrun" in line and "--nnodes" not in line]
    assert [line for line in on_one_machine if "--use_cpu true" not in line] == []


def test_which_blocks_are_not_run():
    text = "\n".join(page.read_text() for page in (README, QUICKSTART, DOCS / "zh/quickstart.md"))
    assert re.findall(r"<!-- not run: (.*?) -->", text) == ["it runs the tests"]  # .ci/run takes that very line


@pytest.mark.slow
@pytest.mark.nightly
def test_commands_run_and_give_what_the_pages_say(tmp_path):
    """The text itself, in a folder that looks like a clone. pip only resolves, from what is installed."""
    for name in ("hfppo", "recipes", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    # 0 is how pip spells "no isolation"
    pip = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in commands():
        run = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=os.environ | pip | path, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{command}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}"
        if "pip" in shlex.split(command):
            assert "Would install hfppo" in run.stdout or "already satisfied: torch" in run.stdout

    results = json.loads((tmp_path / "out/arithmetic/all_results.json").read_text())
    table = {row[0]: row[1:] for row in table_rows(QUICKSTART)}
    for mode in ("sampled", "greedy"):
        stated = [float(cell) for cell in table[f"held-out accuracy, {mode}"]]
        measured = [results[f"{when}_{mode}_accuracy"] for when in ("before", "after")]
        assert measured == pytest.approx(stated, abs=0.04)
    (claim,) = re.findall(r"^\| \[sums\].* ([\d.]+) → ([\d.]+) \|$", README.read_text(), flags=re.MULTILINE)
    assert [round(results[f"{when}_sampled_accuracy"], 2) for when in ("before", "after")] == pytest.approx(
        [float(x) for x in claim], abs=0.04
    )
    history = json.loads((tmp_path / "out/arithmetic/trainer_state.json").read_text())["log_history"]
    logged = {entry["step"]: entry for entry in history if "reward" in entry}
    for metric in ("reward", "kl", "policy/entropy", "policy/clip_frac", "value/mean"):
        means = [
            fmean(logged[n][metric] for n in range(int(end) - 16, int(end) + 1, 4)) for end in table["up to step"]
        ]
        assert means == pytest.approx([float(cell) for cell in table[metric]], abs=0.06)

    shared = json.loads((tmp_path / "out/shared/all_results.json").read_text())
    assert shared["after_sampled_accuracy"] > shared["before_sampled_accuracy"] + 0.1


def table_rows(page: Path) -> list[list[str]]:
    rows = re.findall(r"^\| (.*) \|$", page.read_text(), flags=re.MULTILINE)
    return [[cell.strip().strip("`") for cell in row.split("|")] for row in rows]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The pages, built; a warning is an error."""
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    html = tmp_path_factory.mktemp("docs") / "html"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(html)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return html


@pytest.mark.slow
@pytest.mark.nightly
def test_the_reference_holds_what_the_code_has(site):
    html = (site / "reference.html").read_text().replace("<wbr>", "")
    for owner in (hfppo, F):
        documented = [name for name in owner.__all__ if callable(getattr(owner, name))]
        assert [name for name in documented if f'id="{owner.__name__}.{name}"' not in html] == []
    names = set(re.findall(r'<span class="pre">([^<]*)</span>', html))
    assert (STATED.keys() | METRICS.keys()) - names == set()
    assert " at 0x" not in re.sub(r"<[^>]*>", "", html)  # what an object is, not where


@pytest.mark.slow
@pytest.mark.nightly
def test_built_pages_show_figures_and_load_nothing_from_elsewhere(site):
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    assert {"zh/worked_example.html", "quickstart.html"} <= {str(page.relative_to(site)) for page in pages}
    for page in pages:
        html = page.read_text()
        assert re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//', html) == []
        assert "&lt;!--" not in html
        assert (re.search(r'<html[^>]* lang="zh-CN"', html) is not None) == (page.parent.name == "zh")
        assert "critic=’" not in html  # typographic quotes in code
    assert "0.0382" in (site / "worked_example.html").read_text()
    links = [re.findall(r'href="([^"#:]*play\.html)(?:#[^"]*)?"', page.read_text()) for page in pages]
    assert sum(map(len, links)) >= 4
    assert all((page.parent / link).is_file() for page, found in zip(pages, links, strict=True) for link in found)
