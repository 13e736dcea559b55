# SPDX-License-Identifier: Apache-2.0
"""Every name inside vLLM that the plugin leans on, as each file's own data says: read, not imported.

Files of `compat` and `layers` say which `FEATURE` they are part of, what they replace (`REPLACES`) and what else they use
(`USES`). What a file imports of vLLM is used, too, and so are constants and classes that it reads of an imported name:
`RequestOutputKind.FINAL_ONLY`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

CORE = "core"
"""The feature without which nothing is served: names that it lacks refuse the start."""
PACKAGE = Path(__file__).resolve().parent.parent
ROOMS = ("compat", "layers")
"""Folders of the package whose files touch vLLM."""
MACHINERY = ("features.py", "interfaces.py", "probe.py", "wrapping.py")
"""Files of `compat` that lean on no name of vLLM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """One name inside vLLM that must exist."""

    module: str
    """The module that holds the name, dotted: `vllm.v1.engine.core`."""

    name: str
    """The name within the module, dotted: a function, a class, `Class.method` or `Class.attribute`; none: the module."""

    parameters: tuple[str, ...] = ()
    """Parameters that the function, or the class when called, must accept by name."""

    why: str
    """Purpose of the name, as a phrase that goes on from "needed to": `build the model anew`."""

    @classmethod
    def of(cls, text: str, why: str) -> Self:
        """Read `module:name` or `module:name(parameter, parameter)`."""
        match = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.+)\))?", text)
        if match is None:
            raise ValueError(f"expected module:name or module:name(parameter, …), found {text!r}")
        module, name, parameters = match.groups()
        return cls(
            module=module, name=name, parameters=tuple(parameters.split(", ")) if parameters else (), why=why
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The data of one file that touches vLLM."""

    file: str
    """Its path within the package: `compat/speed/output_interval.py`."""

    feature: str
    why: str
    gain: str
    """Gain of the file's feature, measured where it was."""

    replaces: tuple[Interface, ...]
    """Functions and methods of vLLM that it wraps or replaces, on classes or instances."""

    uses: tuple[Interface, ...]
    """Other names of vLLM that it leans on, its imports among them."""

    upstream: str
    """The issue or pull request at vLLM about it."""

    remove_when: str
    needs: frozenset[str]
    """Other features without which this one is off."""

    switch: tuple[str, object] | None
    """The setting that switches it off, a path of `Settings`, and the value that does."""

    gpu_only: bool
    plain_engines: bool
    """Tells whether it is for engines alone that `supported_engines` finds plain."""

    one_rank: bool
    """Tells whether it is for engines without tensor parallelism alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One thing that is switched on and off as a whole: `core`, or something that serving can do without."""

    name: str
    headers: tuple[Header, ...]
    """The file that is named after the feature comes first."""

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """Every name that its files lean on, each once."""
        named: dict[tuple[str, str, tuple[str, ...]], Interface] = {}
        for header in self.headers:
            for interface in (*header.replaces, *header.uses):
                named.setdefault((interface.module, interface.name, interface.parameters), interface)
        return tuple(named.values())

    @property
    def needs(self) -> frozenset[str]:
        """Other features without which it is off."""
        return frozenset().union(*(header.needs for header in self.headers))

    @property
    def switch(self) -> tuple[str, object] | None:
        """The setting that switches it off, and the value that does."""
        return next((header.switch for header in self.headers if header.switch), None)

    @property
    def gpu_only(self) -> bool:
        """Tell whether it does nothing without a GPU."""
        return all(header.gpu_only for header in self.headers)

    @property
    def plain_engines(self) -> bool:
        """Tell whether it is for engines alone that `supported_engines` finds plain."""
        return any(header.plain_engines for header in self.headers)

    @property
    def one_rank(self) -> bool:
        """Tell whether it is for engines without tensor parallelism alone."""
        return any(header.one_rank for header in self.headers)


@cache
def headers() -> tuple[Header, ...]:
    """The data of every file that touches vLLM, by reading them: about a tenth of a second."""
    files = sorted(file for room in ROOMS for file in (PACKAGE / room).rglob("*.py"))
    files = [file for file in files if file.name not in ("__init__.py", *MACHINERY)]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    constants = {file: constants_of(tree) for file, tree in trees.items()}
    features = {_dotted(file): values["FEATURE"] for file, values in constants.items() if "FEATURE" in values}
    return tuple(_header(file, trees[file], constants[file], features) for file in files)


@cache
def features() -> dict[str, Feature]:
    """Every feature by name: `core`, then the others in the order of their names."""
    grouped: dict[str, list[Header]] = {CORE: []}
    for header in sorted(headers(), key=lambda header: header.feature):
        grouped.setdefault(header.feature, []).append(header)
    for name, of_feature in grouped.items():
        of_feature.sort(key=lambda header: (Path(header.file).stem != name, header.file))
    return {name: Feature(name=name, headers=tuple(parts)) for name, parts in grouped.items()}


def constants_of(tree: ast.Module) -> dict[str, Any]:
    """Literals that a module binds at its top level with a type, by name."""
    values: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            try:
                values[node.target.id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return values


def _header(file: Path, tree: ast.Module, values: dict[str, Any], features: dict[str, str]) -> Header:
    feature, why = values.get("FEATURE", CORE), values.get("WHY", "serve blockfp8")
    phrase = (why[0].lower() + why[1:]).partition(":")[0]
    used = [Interface.of(text, reason) for reason, texts in values.get("USES", {}).items() for text in texts]
    imported = {features.get(module, CORE) for module in _own_imports(tree)}
    return Header(
        file=str(file.relative_to(PACKAGE)),
        feature=feature,
        why=why,
        gain=values.get("GAIN", ""),
        replaces=tuple(Interface.of(text, phrase) for text in values.get("REPLACES", ())),
        uses=(*used, *_vllm_imports(tree, phrase)),
        upstream=values.get("UPSTREAM", ""),
        remove_when=values.get("REMOVE_WHEN", ""),
        needs=frozenset({*imported, *values.get("NEEDS", ())} - {feature, CORE}),
        switch=values.get("SWITCH"),
        gpu_only=values.get("GPU_ONLY", False),
        plain_engines=values.get("PLAIN_ENGINES", False),
        one_rank=values.get("ONE_RANK", False),
    )


def _vllm_imports(tree: ast.Module, why: str) -> Iterator[Interface]:
    """List what a file imports of vLLM, wherever in it. Names with a capital that it reads of that come last."""
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield Interface(module=alias.name, name="", why=why)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                imported[alias.asname or alias.name] = (str(node.module), alias.name)
                yield Interface(module=str(node.module), name=alias.name, why=why)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in imported and node.attr[0].isupper():
            module, name = imported[node.value.id]
            if name[0].isupper():
                yield Interface(module=module, name=f"{name}.{node.attr}", why=why)
            else:  # a module
                yield Interface(module=f"{module}.{name}", name=node.attr, why=why)


def _own_imports(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a file imports when it is imported itself."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE.name}."):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _dotted(file: Path) -> str:
    return ".".join((PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts))
