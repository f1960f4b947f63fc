"""The pages of docs/ name everything public, state defaults and figures as they are, and their code runs."""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig

import hfppo
import hfppo.functional as F
from hfppo import PPOConfig, PPOTrainer
from hfppo.checks.names import TRL_NAMES
from hfppo.metrics import METRICS
from hfppo.reporting.progress import describe_sizes

ROOT = Path(hfppo.__file__).parent.parent
DOCS = ROOT / "docs"
README, QUICKSTART = ROOT / "README.md", DOCS / "quickstart.md"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
PAIRS = [(page, DOCS / page.relative_to(DOCS / "zh")) for page in PAGES if page.parent.name == "zh"]
INHERITED = {f.name: f.default for f in fields(TrainingArguments)}
STATED = {f.name: f.default for f in fields(PPOConfig) if INHERITED.get(f.name, f) != f.default}
CHOICES = {
    f.name: get_args(f.type) for f in fields(PPOConfig) if f.name in STATED and get_origin(f.type) is Literal
} | {
    "kl_estimator": tuple(F.KL_ESTIMATORS),
    "vllm_importance_sampling_mode": F.MISMATCH_MODES,
    "kl_loss_estimator": tuple(F.KL_LOSS_ESTIMATORS),
    "advantage_estimator": tuple(F.ADVANTAGE_ESTIMATORS),
    "policy_loss": tuple(F.POLICY_LOSSES),
    "loss_reduction": tuple(F.REDUCTIONS),
}
NUMBER = re.compile(r"[−-]?\d[\d,]*(?:\.\d+)?")

sys.path.insert(0, str(DOCS))
import figures  # noqa: E402 (what docs/conf.py uses)


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


def sections(page: Path, level: str) -> dict[str, str]:
    """The text below each heading of a level, by heading."""
    _, *parts = re.split(rf"^{level} (.*)\n", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def parameters(owner: type) -> dict[str, object]:
    """What a class is constructed with, by name, with the defaults."""
    if "__init__" not in vars(owner):
        return {}
    return {p.name: p.default for p in list(inspect.signature(owner.__init__).parameters.values())[1:]}


def test_every_field_is_in_the_configuration_with_its_default():
    table = {name: default for name, default, *_ in first_cells(DOCS / "configuration.md")}
    assert table.keys() == STATED.keys()
    assert {name: ast.literal_eval(default) for name, default in table.items()} == STATED


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_is_in_the_row_of_its_field(field):
    (row,) = (line for line in (DOCS / "configuration.md").read_text().splitlines() if line.startswith(f"| `{field}`"))
    assert [choice for choice in CHOICES[field] if f"`{choice}`" not in row and f'`"{choice}"`' not in row] == []


def test_every_metric_and_no_other_has_a_line():
    names = [row[0] for row in first_cells(DOCS / "metrics.md")]
    assert len(names) == len(set(names))
    assert set(names) == METRICS.keys()


@pytest.mark.parametrize("owner", [hfppo, F], ids=lambda module: module.__name__)
def test_every_public_name_is_on_some_page(owner):
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in owner.__all__ if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("name", [name for name in hfppo.__all__ if name.endswith("Callback")])
def test_every_callback_has_a_section_with_its_parameters_and_their_defaults(name):
    found = [text for page in PAGES for title, text in sections(page, "##").items() if name in title]
    assert found, f"no page has a section called {name}"
    text = "\n".join(found)
    for parameter, default in parameters(getattr(hfppo, name)).items():
        assert re.search(rf"\b{parameter}\b", text), parameter
        for stated in re.findall(rf"([−\d.]+) \(`{parameter}`\)", text):
            assert float(stated.replace("−", "-")) == default, parameter


@pytest.mark.parametrize("name", ["RewardModel", "RewardServer"])
def test_rewards_names_the_parameters_of(name):
    text = (DOCS / "rewards.md").read_text()
    assert [p for p in parameters(getattr(hfppo, name)) if not re.search(rf"\b{p}\b", text)] == []


def test_every_footgun_says_how_it_looks_in_the_metrics():
    part = sections(DOCS / "footguns.md", "##")["What can happen to you"]
    _, *footguns = re.split(r"^### ", part, flags=re.MULTILINE)
    for footgun in footguns:
        title, _, text = footgun.partition("\n")
        looks = re.search(r"\*\*Looks like:\*\*(.*?)\n\n", text, flags=re.DOTALL)
        assert looks, title
        named = {word.removeprefix("eval_") for word in re.findall(r"`([^`]+)`", looks[1])}
        assert named & {*METRICS, "grad_norm"}, title


def test_migrating_names_what_exists():
    """The right column of each table: fields, arguments, metrics, choices and public names, but nothing else."""
    ours = {f.name for f in fields(PPOConfig)} | METRICS.keys() | set(dir(PPOTrainer))
    ours |= {choice for choices in CHOICES.values() for choice in choices}
    ours |= {name for owner in hfppo.__all__ for name in parameters(getattr(hfppo, owner))}
    # Words of Trainer's, and the other side's where a cell explains them: "`mse` is `k2`".
    ours |= {"prompt", "processes", "epoch", "train", "trainer", "train_samples_per_second", "fixed", "adaptive", "kl"}
    ours |= {"activation_checkpointing"}  # of TrainingArguments from transformers 5.20 on
    ours |= {"group_norm", "dr_grpo", "reinforce", "reinforce_baseline", "mse", "low_var_kl", "dapo", "bnpo"}
    for line in (DOCS / "migrating.md").read_text().splitlines():
        if line.startswith("| `"):
            for code in re.findall(r"`([^`]+)`", line.strip("|").split("|")[1]):
                names = re.findall(r"\b[a-z][\w-]*(?:/\w+)*", re.sub(r'"[^"]*"|--\S+', "", code))
                assert [name for name in names if name not in ours] == [], line


def test_hints_name_fields_that_the_page_says_mean_the_same():
    ours = {f.name for f in fields(PPOConfig)}
    rows = [line for line in (DOCS / "migrating.md").read_text().splitlines() if line.startswith("| `")]
    for theirs, hint in TRL_NAMES.items():
        assert theirs not in ours
        (row,) = (line for line in rows if re.search(rf"`{theirs}(?![\w/])", line.split(" | ")[0]))
        named = [word for word in re.findall(r"\w+", hint) if word in ours]
        assert named
        assert [name for name in named if name not in row.split(" | ")[1]] == []


def test_migrating_knows_every_field_of_grpo_config():
    text = sections(DOCS / "migrating.md", "##")["From TRL's GRPOTrainer"]
    inherited = {f.name for f in fields(TrainingArguments)}
    own = [f.name for f in fields(GRPOConfig) if f.name not in inherited]
    assert [name for name in own if f"`{name}`" not in text and f"`{name}=" not in text] == []


def test_migrating_tells_which_defaults_of_grpo_config_are_others():
    text = sections(DOCS / "migrating.md", "##")["From TRL's GRPOTrainer"]
    theirs, ours = ({f.name: f.default for f in fields(config)} for config in (GRPOConfig, PPOConfig))
    own = {"logging_nan_inf_filter", "ddp_find_unused_parameters", "vllm_server_base_url"}  # change no result
    others = [name for name in ours.keys() & theirs.keys() - own if theirs[name] != ours[name]]
    assert "learning_rate" in others
    assert [name for name in others if f"`{name}` (" not in text and f"`{name}=" not in text] == []


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_links_between_pages_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_python_blocks_are_python(page):
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: name_of(page))
def test_both_languages_have_the_same_code_and_figures(chinese, english):
    for language in ("python", "py", "bash", "text"):
        assert blocks(chinese, language) == blocks(english, language)
    for pattern in (r"^<!-- python\n.*?^-->$", r"\S*<!--= .*? -->"):
        found = [re.findall(pattern, page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in (chinese, english)]
        codes = [[re.sub(r"^.*<!--", "", code) for code in page] for page in found]
        assert codes[0] == codes[1]
    tables = [re.findall(r"^\|.*\|$", page.read_text(), flags=re.MULTILINE) for page in (chinese, english)]
    for ours, theirs in zip(*tables, strict=True):
        numbers = [[number.rstrip(",") for number in NUMBER.findall(row)] for row in (ours, theirs)]
        assert numbers[0] == numbers[1]


def outline(page: Path) -> list[str]:
    """The levels of the headings, outside of code and comments."""
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+(?= )", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: name_of(page))
def test_both_languages_have_the_same_sections_and_link_to_each_other(chinese, english):
    assert outline(chinese) == outline(english)
    assert f"\n[English](../{english.name})\n" in chinese.read_text()
    assert f"\n[中文](zh/{chinese.name})\n" in english.read_text()


@pytest.mark.parametrize("page", [chinese for chinese, _ in PAIRS], ids=name_of)
def test_chinese_pages_are_listed_and_link_to_chinese_pages(page):
    index = (DOCS / "index.md").read_text()
    assert f"](zh/{page.name})" in index
    assert f"\nzh/{page.stem}\n" in index
    _, _, text = page.read_text().partition("[English]")
    _, _, text = text.partition("\n")
    assert [name for name in re.findall(r"\]\(\.\./(\w+\.md)", text) if (DOCS / "zh" / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if NUMBER.search(p.read_text())], ids=name_of)
def test_pages_hold_the_figures_that_their_code_makes(page):
    """Up to what another machine may round differently. `python docs/figures.py PAGE` writes new ones."""
    text = page.read_text()
    if not figures.is_executed(text) or page.name == "reference.md":  # the reference's are made at build time only
        return
    new = figures.renewed(text)
    # The widths of columns hang on the sign of a zero.
    assert re.sub(r"[ ─]+", " ", NUMBER.sub("0", new)) == re.sub(r"[ ─]+", " ", NUMBER.sub("0", text))
    for ours, theirs in zip(NUMBER.findall(text), NUMBER.findall(new), strict=True):
        given, made = (float(number.replace("−", "-").replace(",", "")) for number in (ours, theirs))
        assert given == (pytest.approx(made, rel=0.1, abs=0.02) if "." in ours else made)


@pytest.mark.slow
def test_quickstart_runs(tmp_path, monkeypatch, capsys):
    """Its blocks, one after the other in one namespace, where the recipes lie beside."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    code = blocks(QUICKSTART, "python")
    assert len(code) == 5
    namespace: dict = {"__name__": "quickstart"}
    for number, block in enumerate(code):
        exec(compile(block, f"quickstart.md, block {number}", "exec"), namespace)
    assert namespace["trainer"].state.global_step == 12
    shown = capsys.readouterr().out
    assert "advantage" in shown  # the token table
    assert "rollout 3: 64 completions" in shown  # the callback, after the resume
    assert "请问1+1=2？是的" in shown  # plain PEFT


@pytest.mark.slow
def test_what_is_ones_own_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for mapping, name in ((F.POLICY_LOSSES, "unclipped"), (F.ADVANTAGE_ESTIMATORS, "better_than_half")):
        monkeypatch.setitem(mapping, name, None)  # so that it is gone afterwards
    namespace: dict = {"__name__": "extending"}
    for number, block in enumerate(blocks(DOCS / "extending.md", "python")):
        exec(compile(block, f"extending.md, block {number}", "exec"), namespace)
    assert namespace["trainer"].collector.sampler.seconds > 0
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
    assert block.count("total_episodes=10_000") == 1
    exec(compile(block.replace("10_000", "8"), "README.md", "exec"), {"__name__": "readme"})
    (load,) = re.findall(r"`(AutoPeftModelForCausalLM.*?)`", README.read_text())
    assert eval(load, {"AutoPeftModelForCausalLM": AutoPeftModelForCausalLM}).peft_config


def test_readme_states_the_sizes_of_its_run(tmp_path):
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, total_episodes=10_000)
    sizes = describe_sizes(args.rollout_size_per_process, args.world_size, args.updates_per_rollout)
    assert f"`{args.max_steps // args.updates_per_rollout} {sizes}`" in README.read_text()


def commands() -> list[str]:
    """Each command of README and quickstarts once, but for blocks that say why they are not run."""
    found: list[str] = []
    for page in (README, QUICKSTART, DOCS / "zh/quickstart.md"):
        runnable = re.sub(r"<!-- not run: .*? -->\n```bash\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.M)
        for block in re.findall(r"^```bash\n(.*?)^```$", runnable, flags=re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                found += [" ".join(command.split()) for command in line.split("&&")]
    return list(dict.fromkeys(found))


def test_which_blocks_are_not_run():
    text = "\n".join(page.read_text() for page in (README, QUICKSTART, DOCS / "zh/quickstart.md"))
    assert re.findall(r"<!-- not run: (.*?) -->", text) == ["it runs the tests"]  # .ci/run takes that very line


@pytest.mark.slow
@pytest.mark.nightly
def test_commands_run_and_give_what_the_pages_say(tmp_path):
    """The text itself, in a folder that looks like a clone. pip only resolves, from what is installed."""
    for name in ("hfppo", "recipes", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    pip = {
        "PIP_DRY_RUN": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }  # 0 is how pip spells "no isolation"
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
    (claim,) = re.findall(r"goes from ([\d.]+) to ([\d.]+)\]", README.read_text())
    assert [round(results[f"{when}_sampled_accuracy"], 2) for when in ("before", "after")] == pytest.approx(
        [float(x) for x in claim], abs=0.04
    )
    history = json.loads((tmp_path / "out/arithmetic/trainer_state.json").read_text())["log_history"]
    logged = {entry["step"]: entry for entry in history if "reward" in entry}
    for metric in ("reward", "kl", "policy/entropy", "policy/clip_frac", "value/mean"):
        stated = [float(cell) for cell in table[metric]]
        assert [logged[int(step)][metric] for step in table["logged at step"]] == pytest.approx(stated, abs=0.06)

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
def test_the_reference_holds_what_the_code_has(site):
    html = (site / "reference.html").read_text().replace("<wbr>", "")
    for owner in (hfppo, F):
        documented = [name for name in owner.__all__ if callable(getattr(owner, name))]
        assert [name for name in documented if f'id="{owner.__name__}.{name}"' not in html] == []
    names = set(re.findall(r'<span class="pre">([^<]*)</span>', html))
    assert (STATED.keys() | METRICS.keys()) - names == set()


@pytest.mark.slow
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
    links = [re.findall(r'href="([^"#:]*play\.html)"', page.read_text()) for page in pages]
    assert sum(map(len, links)) >= 4
    assert all((page.parent / link).is_file() for page, found in zip(pages, links, strict=True) for link in found)
