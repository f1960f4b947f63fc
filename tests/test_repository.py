"""Rules of the repository: imports go one way, recipes use public names, public names have docstrings."""

import ast
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hfppo
import hfppo.functional

ROOT = Path(hfppo.__file__).parent.parent
MODULES = sorted((ROOT / "hfppo").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
TESTS = [path for folder in ("", "helpers") for path in sorted((ROOT / "tests" / folder).glob("*.py"))]

# Which folders and files of the package each of them may import, besides itself.
ALLOWED = {
    "functional": "",
    "state": "",
    "support": "",
    "tape": "",
    "rollout": "state support tape",
    "metrics": "functional",
    "config_checks": "functional support",
    "trl_names": "config_checks",
    "config": "config_checks functional trl_names",
    "cli": "config config_checks",
    "report": "reporting",
    "data": "state",
    "saving": "support",
    "sample": "data rollout support",
    "models": "config functional support",
    "rewards": "data functional models sample support",
    "generation": "config functional models sample state support",
    "environments": "config data rewards sample state support",
    "endpoint": "config data environments generation rewards sample state support",
    "prompt_maker": "config data environments support",
    "checks": "checkpoint config data environments models prompt_maker reporting rewards support trl_names",
    "parts": "checks config data endpoint environments generation models prompt_maker rewards support",
    "checkpoint": "config data metrics models prompt_maker rollout saving state",
    "callbacks": "functional metrics rollout state support",
    "collect": "config data environments functional generation metrics models rewards rollout sample state support",
    "learn": "collect config functional metrics models rollout state support",
    "reporting": "callbacks config functional models rollout state support",
}
ANYTHING = {"trainer", "token_trace", "public", "__init__"}


def module_name(path: Path) -> str:
    return path.relative_to(ROOT / "hfppo").with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Top-level names of what a file imports; "hfppo.x" for this package."""
    return imported_by(ast.parse(path.read_text()))


def imported_by(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "hfppo":
                found |= {f"hfppo.{alias.name}" for alias in node.names}
    return found


def test_imports_go_one_way():
    for path in MODULES:
        name = module_name(path)
        if name not in ANYTHING:
            own = {i.split(".")[1] for i in imports(path) if i.startswith("hfppo.")} - {name}
            allowed = set(ALLOWED[name].split())
            assert own <= allowed, f"{path}: {name} must not import {own - allowed}"


def test_one_way_is_no_circle():
    TopologicalSorter({name: others.split() for name, others in ALLOWED.items()}).prepare()  # raises CycleError


def test_mathematics_and_rollout_know_torch_alone():
    for path in MODULES:
        if module_name(path) in ("functional", "rollout"):
            others = {i.split(".")[0] for i in imports(path)} - {"torch", "hfppo"}
            assert others <= {"bisect", "hashlib", "collections", "dataclasses", "inspect", "typing", "math"}, path


def test_no_test_module_imports_another():
    """Code that tests share stands in tests/helpers."""
    for path in TESTS:
        assert [i for i in imports(path) if i == "conftest" or i.startswith("test_")] == [], path


def test_recipes_use_public_names_only():
    public = {"hfppo", "hfppo.cli", *(f"hfppo.{name}" for name in hfppo.__all__)}
    for path in RECIPES:
        assert {i for i in imports(path) if i.split(".")[0] == "hfppo"} <= public, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trainer":
                assert not node.attr.startswith("_"), path


def test_recipes_import_files_of_their_own_folder_only():
    for path in RECIPES:
        others = {other.stem for other in RECIPES if other.parent != path.parent}
        assert {i.partition(".")[0] for i in imports(path)} & others <= {p.stem for p in path.parent.iterdir()}, path


def test_recipes_fit_on_one_screen_and_show_the_training():
    for path in RECIPES:
        if path.with_suffix(".yaml").is_file():
            lines = path.read_text().splitlines()
            assert len(lines) <= 100, path
            steps = ("Trainer(", "trainer.train(", "trainer.save_model(", "trainer.push_to_hub(")
            shown = [next(number for number, line in enumerate(lines) if step in line) for step in steps]
            assert shown == sorted(shown), path


def test_public_names_are_imported_on_first_use_and_exported_to_type_checkers():
    stated = ast.parse(Path(hfppo.public.__file__).read_text()).body[1:]
    names = {alias.asname: node.module for node in stated for alias in node.names}
    assert sorted(names) == hfppo.__all__
    for name, module in names.items():
        assert getattr(hfppo, name) is getattr(sys.modules[module], name)
    assert set(hfppo.__all__) <= set(dir(hfppo))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hfppo.nothing  # noqa: B018


def test_the_import_alone_loads_neither_torch_nor_transformers():
    code = "import sys, hfppo; print(hfppo.__version__, *{'torch', 'transformers', 'peft'} & {*sys.modules})"
    code += "; print(hfppo.functional.gae.__name__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [hfppo.__version__, "gae"]


@pytest.mark.parametrize("owner", [hfppo, hfppo.functional], ids=["hfppo", "hfppo.functional"])
def test_public_names_have_docstrings(owner):
    for name in owner.__all__:
        thing = getattr(owner, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name
            if inspect.isclass(thing) and thing.__module__.startswith("hfppo"):
                methods = {k: v for k, v in vars(thing).items() if inspect.isfunction(v) and not k.startswith("_")}
                undocumented = [
                    k for k, v in methods.items() if not inspect.getdoc(v) and not inspect.getdoc(getattr(thing, k))
                ]
                assert not undocumented, f"{name}: {undocumented}"


def test_extras_are_imported_when_they_are_needed():
    for path in (path for path in MODULES if module_name(path) != "cli"):  # for scripts, which import it by name
        on_import = ast.Module(ast.parse(path.read_text()).body, [])
        on_import.body = [node for node in on_import.body if isinstance(node, ast.Import | ast.ImportFrom)]
        tops = {i.split(".")[0] for i in imported_by(on_import)}
        assert not tops & {"trl", "vllm", "bitsandbytes", "matplotlib", "IPython"}, path
