"""What is declared, what is documented, and what is really there agree."""

import ast
import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from labkit import cli
from labkit.notebooks import FOLDER, find_notebooks, parse_parameters
from labkit.presets import get_preset

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Conda's own names for what PyPI calls otherwise.
CONDA_NAMES = {"pytorch": "torch", "pytorch-cpu": "torch", "matplotlib-base": "matplotlib"}


def split(requirement: str) -> tuple[str, str]:
    """The canonical name and the version of `name>=1.2`; conda's single `=` counts as `==`."""
    name, version = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement.strip()).groups()
    name = re.sub(r"[-_.]+", "-", name).lower()
    version = re.sub(r"^=(?!=)", "==", version.replace(" ", ""))
    return CONDA_NAMES.get(name, name), version


def conda_versions(text: str) -> dict[str, str]:
    entries = []
    for entry in yaml.safe_load(text)["dependencies"]:
        entries += entry["pip"] if isinstance(entry, dict) else [entry]
    return dict(split(entry) for entry in entries if not entry.startswith("-"))


def project_versions() -> dict[str, str]:
    return dict(split(requirement) for requirement in PROJECT["dependencies"])


def test_conda_and_pip_install_the_same_versions():
    conda = conda_versions((ROOT / "environment.yml").read_text())
    assert conda.pop("python") == PROJECT["requires-python"].replace(" ", "")
    conda.pop("pip", None)
    extras = dict(split(entry) for entry in PROJECT["optional-dependencies"]["test"])
    wanted = project_versions()
    listed_extras = {name: version for name, version in conda.items() if name in extras}
    assert {n: v for n, v in conda.items() if n not in extras} == wanted
    assert listed_extras.items() <= extras.items()


def test_conda_installs_this_checkout():
    text = (ROOT / "environment.yml").read_text()
    assert re.search(r"^\s*- (-e|--editable) \.", text, re.MULTILINE)


def test_versions_are_read_as_conda_writes_them():
    text = "dependencies: [python>=3.11, pytorch=2.1, {pip: [Scikit_Image >= 0.2, -e .]}]"
    assert conda_versions(text) == {
        "python": ">=3.11", "torch": "==2.1", "scikit-image": ">=0.2",
    }  # fmt: skip


def test_torch_and_torchvision_are_pinned():
    versions = project_versions()
    for name in ("torch", "torchvision"):
        assert re.fullmatch(r"==\d+\.\d+\.\d+", versions[name]), name


def imported_names(path: Path) -> set[str]:
    """Top-level modules that a file imports from elsewhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("folder", ["labkit", "notebooks"])
def test_every_import_is_declared(folder):
    makers = importlib.metadata.packages_distributions()
    declared = project_versions().keys()
    sources = sorted((ROOT / folder).rglob("*.py"))
    assert sources
    for path in sources:
        for module in imported_names(path) - {"labkit"}:
            names = {split(name)[0] for name in makers.get(module, [])}
            if module == "IPython":  # every ipykernel brings it
                names.add("ipykernel")
            assert names & declared, f"{path.name} imports {module}, pyproject.toml has none"


# What the documents say.


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


DOCUMENTS = sorted(ROOT.glob("*.md"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_targets_that_exist(path):
    text = path.read_text(encoding="utf-8")
    code = re.findall(r"`([^`]+)`", text) + re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    named = {name for piece in code for name in re.findall(r"^make ([\w-]+)", piece, re.MULTILINE)}
    assert named <= targets(), named - targets()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_link_to_files_that_exist(path):
    for target in re.findall(r"\]\(([^)\s#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def commands(text: str) -> list[list[str]]:
    """Every `labkit VERB ...` in a document's code, without its comments."""
    code = re.findall(r"`([^`\n]+)`", text)
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        code += block.splitlines()
    found = [line.partition("#")[0].lstrip("!").split() for line in code]
    return [words for words in found if words[:1] == ["labkit"] and len(words) > 1]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_commands_that_exist(path):
    verbs = typer.main.get_command(cli.app).commands
    for _, verb, *words in commands(path.read_text(encoding="utf-8")):
        assert verb in verbs, verb
        options = {option for parameter in verbs[verb].params for option in parameter.opts}
        for word in words:
            if word.startswith("-"):
                assert word in options, f"labkit {verb} {word}"
        if verb == "run":
            numbers = [word for word in words if re.match(r"0\d", word)]
            given = [after for word, after in zip(words, words[1:], strict=False) if word == "-p"]
            for notebook in find_notebooks(numbers):
                parse_parameters(given, notebook)


def test_readme_starts_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make labs" in text and "make test" in text
    assert {"labs", "test"} <= targets()
    assert len(commands(text)) >= 4, "the commands are not found any more"


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test", script.read_text(), re.MULTILINE)


def test_notebooks_offer_presets_that_exist():
    for source in FOLDER.glob("*.py"):
        (comment,) = re.findall(r"^preset: str = .*# (.*)$", source.read_text(), re.MULTILINE)
        for name in re.split(r", | or ", comment):
            assert get_preset(name, "emulated")


@pytest.mark.parametrize(
    ("changes", "batch", "batches", "samples"),
    [
        ({}, 8, 20, 156),
        ({"batches": 5}, 8, 5, 36),
        ({"batch": 16}, 16, 20, 316),
        ({"batch": 2}, 2, 20, 39),  # four cannot be missing from a batch of two
        ({"batch": 16, "batches": 3}, 16, 3, 44),
        ({"batch": 1, "samples": 2}, 1, 2, 2),
    ],
)
def test_a_preset_of_another_size(changes, batch, batches, samples):
    size = get_preset("workshop", "emulated", **changes)
    assert (size.batch, size.batches, size.samples) == (batch, batches, samples)
