# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, held by reading the sources and by importing them where torch and vLLM can't be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from vllm_fp8ext.compat.interfaces import Interface
from vllm_fp8ext.compat.probe import SourceTree

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_fp8ext"
LINKED = ("kernels", "serve", "loadtest")
"""Top-level folders that are parts of the package."""
FOLDERS = (PACKAGE, *LINKED, "tests", "scripts", "examples", "benchmarks", "docs")
TOUCH_VLLM = (
    "vllm_fp8ext.layers",
    "vllm_fp8ext.bench.attention",
    "vllm_fp8ext.bench.divergence",
    "vllm_fp8ext.bench.engines",
    "vllm_fp8ext.bench.experts",
    "vllm_fp8ext.bench.lending",
    "vllm_fp8ext.bench.logprobs",
    "vllm_fp8ext.bench.native",
    "vllm_fp8ext.bench.rivals",
    "vllm_fp8ext.bench.steady",
)
"""Modules that may import vLLM, besides those of vllm_fp8ext.compat."""
LIGHT = (
    "vllm_fp8ext",
    "vllm_fp8ext.register",
    "vllm_fp8ext.errors",
    "vllm_fp8ext.environment",
    "vllm_fp8ext.checkpoints",
    "vllm_fp8ext.config",
    "vllm_fp8ext.kernel_settings",
    "vllm_fp8ext.kv_types",
    "vllm_fp8ext.kernels.gemm.registry",
    "vllm_fp8ext.layers.gemm_kernels",
    "vllm_fp8ext.layers.expert_kernels",
    "vllm_fp8ext.cli",
    "vllm_fp8ext.bench.command",
    "vllm_fp8ext.calibrate.command",
    "vllm_fp8ext.calibrate.prompts",
    "vllm_fp8ext.memory_plan.command",
    "vllm_fp8ext.serve.client",
    "vllm_fp8ext.serve.schema",
    "vllm_fp8ext.serve.safetensors_body",
    "vllm_fp8ext.serve.safetensors_file",
    "vllm_fp8ext.serve.tensors",
    "vllm_fp8ext.serve.launch",
    "vllm_fp8ext.update.contract.labels",
    "vllm_fp8ext.update.contract.manifest",
    "vllm_fp8ext.update.engine.session",
    "vllm_fp8ext.update.contract.claims",
    "vllm_fp8ext.update.contract.canary",
    "vllm_fp8ext.update.contract.open_beneath",
    "vllm_fp8ext.update.contract.checkpoint_files",
    "vllm_fp8ext.update.contract.regular_file",
    "vllm_fp8ext.update.contract.safetensors_header",
)
"""Modules that need neither torch nor numpy nor vLLM: for trainers, for the command line, and in every process of
vLLM."""
TORCH_ALONE = (
    "vllm_fp8ext.kernels.numerics.reference",
    "vllm_fp8ext.kernels.quantize.quantize_weight",
    "vllm_fp8ext.kernels.gemm.linear",
    "vllm_fp8ext.kernels.testing.kernel_timing",
    "vllm_fp8ext.kernels.testing.kernel_cases",
    "vllm_fp8ext.kernels.runtime.cuda_kernel",
    "vllm_fp8ext.kernels.gemm.decode_gemm",
    "vllm_fp8ext.kernels.attention.rescale_kv",
    "vllm_fp8ext.kernels.attention.kv_amax",
    "vllm_fp8ext.kv_trainer",
    "vllm_fp8ext.update.worker.digest",
    "vllm_fp8ext.update.worker.stager",
    "vllm_fp8ext.update.worker.weight_swap",
    "vllm_fp8ext.update.worker.load_trace",
    "vllm_fp8ext.update.engine.engine",
    "vllm_fp8ext.update.transports.receiver",
    "vllm_fp8ext.update.worker.score_prompts",
    "vllm_fp8ext.trainer.activations",
    "vllm_fp8ext.trainer.convert",
    "vllm_fp8ext.trainer.correction",
    "vllm_fp8ext.trainer.mismatch",
    "vllm_fp8ext.trainer.optimizer",
    "vllm_fp8ext.trainer.mismatch_plot",
    "vllm_fp8ext.trainer.trl_adapter",
)
"""Modules that need neither vLLM nor Triton: a trainer computes codes and digests with them."""


@cache
def sources() -> dict[Path, ast.Module]:
    """Every Python file of the project, links left out so that each comes once."""
    files = [path for folder in FOLDERS for path in (PROJECT / folder).rglob("*.py")]
    return {path: ast.parse(path.read_text()) for path in files if path.resolve() == path}


def module_of(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(PROJECT).with_suffix("").parts
    if parts[0] in LINKED:
        parts = (PACKAGE, *parts)
    return ".".join(parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, wherever in it; for `from a import b` both `a` and `a.b`."""
    return tuple(imported(path, sources()[path]))


def imported(path: Path, source: ast.Module) -> Iterator[str]:
    """The same of a file with that source."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_of(path).split(".")
                keep = len(package) - node.level + (path.name == "__init__.py")
                base = ".".join([*package[:keep], *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def offenders(importers: tuple[str, ...], *packages: str, besides: tuple[str, ...] = ()) -> list[str]:
    """Imports of these packages (but for `besides`) in the importers' files."""
    return [
        f"{path.relative_to(PROJECT)} imports {name}"
        for path in sources()
        if within(module_of(path), *importers)
        for name in imports(path)
        if within(name, *packages) and not within(name, *besides)
    ]


LEVELS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"base": ("environment", "errors", "log", "log_text", "signals")},
    {"kernels": ("kernels",)},
    {"settings": ("checkpoints", "config", "kernel_settings", "kv_settings", "kv_trainer", "kv_types")},
    {"contract": ("update.contract",)},
    {"shared memory": ("lock_files", "shared_memory")},
    {"layers": ("layers",), "transports": ("update.transports",)},
    {"worker": ("update.worker",)},
    {"engine": ("update.engine",)},
    {"compat": ("compat",)},
    {"serve": ("serve",), "trainer": ("trainer",)},
    {"demo": ("demo",), "loadtest": ("loadtest",)},
    {"bench": ("bench",), "calibrate": ("calibrate",), "memory_plan": ("memory_plan",)},
    {"entry points": ("cli", "register")},
)
"""Rooms of the package and what they hold, from the bottom to the top. A room imports itself and rooms below it, none beside
it or above it."""
UPWARD = {(f"{PACKAGE}.kernel_settings", f"{PACKAGE}.layers.gemm_kernels")}
"""Modules that import one from above or beside, and which: settings know the names of kernels. None is added."""
COMPAT_USERS = ("serve", "entry points", "bench")
"""Rooms that import `compat`, which changes vLLM; layers and updates get what they need from it as arguments."""


def place_of(module: str) -> tuple[int, str]:
    """The level and the room that a module belongs to."""
    for level, rooms in enumerate(LEVELS):
        for room, members in rooms.items():
            if within(module, *(f"{PACKAGE}.{member}" for member in members)):
                return level, room
    raise LookupError(f"{module}: expected a room of LEVELS, found none")


@cache
def modules_with_code() -> set[str]:
    """Modules of the project; packages that hold nothing but modules are left out."""
    return {module_of(source) for source, tree in sources().items() if len(tree.body) > 1} - {PACKAGE}


def imported_modules(path: Path) -> set[str]:
    """Modules with code of the package that a file imports."""
    return {name for name in imports(path) if name in modules_with_code() and within(name, PACKAGE)}


def imported_without(blocked: tuple[str, ...], module: str) -> subprocess.CompletedProcess[str]:
    """Import a module in a new process in which some packages can't be imported."""
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import {module}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")


def test_the_sources_are_found() -> None:
    names = {module_of(path) for path in sources()}
    assert {
        "vllm_fp8ext",
        "vllm_fp8ext.kernels.numerics.reference",
        "vllm_fp8ext.serve.client",
        "tests.test_structure",
    } <= names
    assert {"vllm_fp8ext.compat.update.worker", *TOUCH_VLLM, *LIGHT, *TORCH_ALONE} <= names


def test_imports_are_read_wherever_they_are() -> None:
    text = """
import a.b as c
from d import e
def f():
    from g.h import i
    import_module("j.k")
from . import l
from ..m import n
"""
    path = PROJECT / "vllm_fp8ext" / "update" / "invented.py"
    assert set(imported(path, ast.parse(text))) == {
        *("a.b", "d", "d.e", "g.h", "g.h.i", "j.k"),
        *("vllm_fp8ext.update", "vllm_fp8ext.update.l", "vllm_fp8ext.m", "vllm_fp8ext.m.n"),
    }


def edges() -> Iterator[tuple[str, str]]:
    """Every module of the package with every module of it that it imports."""
    for path in sources():
        module = module_of(path)
        if within(module, PACKAGE) and module not in (PACKAGE, f"{PACKAGE}.update"):
            yield from ((module, name) for name in imported_modules(path))


def is_upward(module: str, name: str) -> bool:
    """Whether a module imports another one from a room that is not below it."""
    (level, room), (other_level, other) = place_of(module), place_of(name)
    return room != other and other_level >= level


def test_imports_go_downwards() -> None:
    assert {edge for edge in edges() if is_upward(*edge)} == UPWARD


@pytest.mark.parametrize(
    ("module", "name", "upward"),
    [
        ("update.contract.manifest", "update.engine.session", True),
        ("update.worker.rank", "compat.update.worker", True),
        ("layers.linear", "update.transports.wire", True),
        ("update.transports.wire", "layers.linear", True),
        ("update.worker.shadow", "layers.linear", False),
        ("compat.update.engine_core", "update.engine.engine", False),
        ("config", "kv_settings", False),
        ("serve.client", "trainer.correction", True),
        ("cli", "trainer.correction", False),
    ],
)
def test_directions_are_judged(module: str, name: str, upward: bool) -> None:
    assert is_upward(f"{PACKAGE}.{module}", f"{PACKAGE}.{name}") == upward


def test_kernels_import_nothing_but_the_names_of_variables() -> None:
    kernels = f"{PACKAGE}.kernels"
    assert offenders((kernels,), "vllm", PACKAGE, besides=(kernels, f"{PACKAGE}.environment")) == []


def test_the_trainers_room_needs_torch_alone() -> None:
    """Users import it, in a trainer's process; of the package only the demo does, which is a trainer."""
    room, allowed = f"{PACKAGE}.trainer", (f"{PACKAGE}.trainer", f"{PACKAGE}.log", f"{PACKAGE}.kernels")
    assert offenders((room,), PACKAGE, "vllm", "trl", "transformers", "accelerate", besides=allowed) == []
    users = {module for module, name in edges() if within(name, room)}
    assert {module for module in users if not within(module, room, f"{PACKAGE}.demo")} == set()


def test_few_rooms_import_compat() -> None:
    users = {place_of(module)[1] for module, name in edges() if within(name, f"{PACKAGE}.compat")}
    assert users <= {"compat", *COMPAT_USERS}


def test_every_module_has_a_room() -> None:
    modules = {module_of(path) for path in sources()} - {PACKAGE, f"{PACKAGE}.update"}
    assert all(place_of(name) for name in modules if within(name, PACKAGE))
    with pytest.raises(LookupError, match="invented"):
        place_of(f"{PACKAGE}.invented")


def test_only_a_few_rooms_import_vllm() -> None:
    importers = [
        f"{path.relative_to(PROJECT)} imports {name}"
        for path in sources()
        if within(module_of(path), PACKAGE) and not within(module_of(path), f"{PACKAGE}.compat", *TOUCH_VLLM)
        for name in imports(path)
        if within(name, "vllm")
    ]
    assert importers == []


def test_the_load_test_uses_only_the_client_and_the_schema() -> None:
    allowed = tuple(
        f"{PACKAGE}.{name}"
        for name in ("serve.client", "serve.schema", "loadtest", "errors", "environment", "checkpoints")
    )
    result = offenders((f"{PACKAGE}.loadtest",), PACKAGE, "vllm", besides=allowed)
    bases = {f"imports {name}" for name in (PACKAGE, f"{PACKAGE}.serve", f"{PACKAGE}.__version__")}
    assert [line for line in result if not any(line.endswith(base) for base in bases)] == []


def test_nothing_imports_the_linked_folders_by_their_bare_names() -> None:
    """A top-level `kernels` is another package, which transformers imports."""
    matching = [
        f"{path.relative_to(PROJECT)} imports {name}"
        for path in sources()
        for name in imports(path)
        if within(name, *LINKED)
    ]
    assert matching == []


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_without_torch_and_vllm(module: str) -> None:
    done = imported_without(("torch", "numpy", "vllm"), module)
    assert done.returncode == 0, done.stderr


def test_the_numerics_import_without_vllm_and_triton() -> None:
    done = imported_without(("vllm", "triton"), ", ".join(TORCH_ALONE))
    assert done.returncode == 0, done.stderr


def test_a_blocked_module_is_noticed() -> None:
    assert (
        "import of torch halted"
        in imported_without(("torch",), "vllm_fp8ext.kernels.numerics.reference").stderr
    )


def test_importing_sets_nothing_up() -> None:
    """No logging handlers and no environment variables come from an import."""
    program = f"""
import logging, os
before = dict(os.environ)
import {", ".join(LIGHT)}
assert dict(os.environ) == before, "the environment changed"
assert not logging.root.handlers, "logging was set up"
assert not logging.getLogger("vllm.fp8ext").handlers, "logging was set up"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_processes_of_other_servers_are_spared_what_a_worker_needs() -> None:
    """FlashAttention's backend reads vLLM's configuration as it is imported."""
    name = "vllm.v1.attention.backends.flash_attn"
    program = f"""
import sys
from vllm_fp8ext.compat.install import install
install()
sys.exit({name!r} in sys.modules and "imported with the plugin")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_file_begins_with_its_license() -> None:
    """After a `#!` line where there is one."""
    line = "# SPDX-License-Identifier: Apache-2.0"
    without = [
        str(path.relative_to(PROJECT))
        for path in sources()
        if line not in [text for text in path.read_text().splitlines()[:2] if not text.startswith("#!")][:1]
    ]
    assert without == []


def test_names_that_are_imported_exist() -> None:
    """In every file, those that no test runs here among them: programs on a GPU, benchmarks, examples."""
    tree = SourceTree(PROJECT)
    missing = [
        f"{path.relative_to(PROJECT)}: {problem}"
        for path, source in sources().items()
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and not node.level and within(node.module or "", PACKAGE)
        for alias in node.names
        if (problem := tree.problem(Interface(module=str(node.module), name=alias.name, why="import it")))
    ]
    assert missing == []


def test_nothing_imports_scripts() -> None:
    """Scripts in `benchmarks/` measure the package; only their own neighbours and tests know them."""
    scripts = {path.stem for path in (PROJECT / "benchmarks").glob("*.py")}
    importers = {
        str(path.relative_to(PROJECT))
        for path in sources()
        if within(module_of(path), PACKAGE) and scripts & set(imports(path))
    }
    assert importers == set()
