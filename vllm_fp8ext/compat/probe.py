# SPDX-License-Identifier: Apache-2.0
"""Does this vLLM have the names that the plugin leans on? Answered from its sources, without importing it."""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vllm_fp8ext.compat.interfaces import Interface

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_missing(interfaces: Iterable[Interface], root: Path | None = None) -> list[str]:
    """One line for each interface that vLLM lacks: what is missing, and why it is needed.

    `root` is the folder that holds the package `vllm`, by default the one where it is installed.
    """
    named = list(interfaces)
    if root is None:
        root = installed_root()
        if root is None:
            return ["vllm: the package is not installed"] if named else []
    tree = SourceTree(root)
    return [problem for interface in named if (problem := tree.problem(interface)) is not None]


def installed_root() -> Path | None:
    """The folder that holds the installed package `vllm`, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


@dataclass(frozen=True, slots=True)
class _Import:
    """A name bound by an import: `name` of the module `source`, or with None the module itself."""

    source: str
    name: str | None


_Definition = _Function | ast.ClassDef | _Import | None
"""The meaning of a name; None is a plain value."""


@dataclass(frozen=True, slots=True)
class _Module:
    """The names that one module defines at its top level."""

    name: str
    names: dict[str, _Definition] = field(default_factory=dict)
    star_imports: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A definition and the module in which its own names are looked up."""

    definition: _Definition
    module: _Module


class SourceTree:
    """The source files under one folder; each is parsed at most once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, _Module | None] = {}

    def problem(self, interface: Interface) -> str | None:
        """Say what is missing of this interface, as one line, or None when nothing is."""
        try:
            missing = self._missing(interface)
        except SyntaxError as error:
            missing = f"the module cannot be parsed ({error.msg}, line {error.lineno})"
        if missing is None:
            return None
        return f"{interface.module}: {missing}; needed to {interface.why}"

    def _missing(self, interface: Interface) -> str | None:
        module = self._module(interface.module)
        if module is None:
            return (
                f"the module is missing, and {interface.name} with it"
                if interface.name
                else "the module is missing"
            )
        if not interface.name:
            return None
        first, *members = interface.name.split(".")
        resolved = self._lookup(module, first)
        if resolved is None:
            if not members and self._module(f"{interface.module}.{first}") is not None:
                return None  # a module is imported by its package's name, too
            return f"{first} is missing"
        path = first
        for member in members:
            resolved = self._member(resolved, member)
            path = f"{path}.{member}"
            if resolved is None:
                return f"{path} is missing"
        if not interface.parameters:
            return None
        accepted = self._parameters(resolved)
        if accepted is None:
            return f"{path} is no longer a function or class whose parameters can be read"
        absent = [parameter for parameter in interface.parameters if parameter not in accepted]
        return f"{path} does not take {', '.join(absent)}" if absent else None

    def _module(self, name: str) -> _Module | None:
        """The parsed module, or None when the tree has no such source file."""
        if name not in self._modules:
            stem = self._root.joinpath(*name.split("."))
            files = (stem / "__init__.py", stem.with_name(stem.name + ".py"))
            path = next((file for file in files if file.is_file()), None)
            self._modules[name] = None if path is None else _read_module(name, path)
        return self._modules[name]

    def _lookup(
        self, module: _Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> _Resolved | None:
        """Find what a module-level name stands for, imports inside the tree followed."""
        if (module.name, name) in seen:
            return None
        seen |= {(module.name, name)}
        if name not in module.names:
            for source in module.star_imports:
                origin = self._module(source)
                if origin is not None and (imported := self._lookup(origin, name, seen)) is not None:
                    return imported
            return None
        definition = module.names[name]
        if isinstance(definition, _Import) and definition.name is not None:
            origin = self._module(definition.source)
            if origin is not None and (imported := self._lookup(origin, definition.name, seen)) is not None:
                return imported
        return _Resolved(definition, module)

    def _classes(
        self, resolved: _Resolved, seen: frozenset[str] = frozenset()
    ) -> Iterator[tuple[ast.ClassDef, _Module]]:
        """The class and its bases, nearest first, as far as the tree holds them."""
        node = resolved.definition
        if not isinstance(node, ast.ClassDef) or f"{resolved.module.name}.{node.name}" in seen:
            return
        seen |= {f"{resolved.module.name}.{node.name}"}
        yield node, resolved.module
        for base in node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if (parent := self._resolve(expression, resolved.module)) is not None:
                yield from self._classes(parent, seen)

    def _resolve(self, expression: ast.expr, module: _Module) -> _Resolved | None:
        """Find what `Name` or `module.Name` stands for in this module."""
        if isinstance(expression, ast.Name):
            return self._lookup(module, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self._resolve(expression.value, module)
            if owner is not None and isinstance(owner.definition, _Import):
                imported = owner.definition
                name = imported.source if imported.name is None else f"{imported.source}.{imported.name}"
                source = self._module(name)
                return None if source is None else self._lookup(source, expression.attr)
        return None

    def _member(self, resolved: _Resolved, name: str) -> _Resolved | None:
        """A method, class attribute or instance attribute of a class or of its bases."""
        for node, module in self._classes(resolved):
            members = _names_in(node.body, module.name)
            if name in members.names:
                return _Resolved(members.names[name], module)
            if name in _instance_attributes(node):
                return _Resolved(None, module)
        return None

    def _parameters(self, resolved: _Resolved) -> set[str] | None:
        """The parameters of a function, or those of making an instance; None when neither can be read."""
        if isinstance(resolved.definition, _Function):
            return _parameter_names(resolved.definition)
        if not isinstance(resolved.definition, ast.ClassDef):
            return None
        accepted: set[str] = set()
        for node, module in self._classes(resolved):
            initializer = _names_in(node.body, module.name).names.get("__init__")
            if isinstance(initializer, _Function):
                return accepted | _parameter_names(initializer)
            accepted |= {
                statement.target.id
                for statement in node.body
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            }
        return accepted


def _read_module(name: str, path: Path) -> _Module:
    parsed = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _names_in(parsed.body, name, package)


def _names_in(body: list[ast.stmt], module: str, package: str = "") -> _Module:
    """The names that a module or class body binds; those for type checkers only beside a `__getattr__`."""
    lazy = any(isinstance(inner, _Function) and inner.name == "__getattr__" for inner in _flat(body, False))
    result = _Module(module)
    for statement in _flat(body, lazy):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                result.names[statement.name] = statement
            case ast.Import():
                for alias in statement.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    result.names[alias.asname or whole] = _Import(whole, None)
            case ast.ImportFrom():
                source = _absolute(statement, package)
                for alias in statement.names:
                    if alias.name == "*":
                        result.star_imports.append(source)
                    else:
                        result.names[alias.asname or alias.name] = _Import(source, alias.name)
            case ast.Assign():
                for target in statement.targets:
                    result.names.update(_targets(target))
            case ast.AnnAssign() | ast.AugAssign():
                result.names.update(_targets(statement.target))
    return result


def _flat(body: list[ast.stmt], lazy: bool) -> Iterator[ast.stmt]:
    """The statements of a body and its blocks; those for type checkers only if `lazy`."""
    for statement in body:
        yield statement
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")) if not lazy:
                yield from _flat(statement.orelse, lazy)
            case ast.If() | ast.For() | ast.While():
                yield from _flat(statement.body + statement.orelse, lazy)
            case ast.With():
                yield from _flat(statement.body, lazy)
            case ast.Try():
                handlers = [inner for handler in statement.handlers for inner in handler.body]
                yield from _flat(statement.body + handlers + statement.orelse + statement.finalbody, lazy)


def _targets(target: ast.expr) -> dict[str, _Definition]:
    """The plain names that an assignment binds."""
    return {
        node.id: None
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    """The module that a `from` import names, relative ones made absolute."""
    if statement.level == 0:
        return statement.module or ""
    parts = package.split(".")[: len(package.split(".")) - statement.level + 1]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _instance_attributes(node: ast.ClassDef) -> set[str]:
    """Every `x` of a `self.x = ...` in the methods of the class."""
    attributes: set[str] = set()
    for method in _flat(node.body, lazy=False):
        if not isinstance(method, _Function):
            continue
        positional = [*method.args.posonlyargs, *method.args.args]
        if not positional:
            continue
        instance = positional[0].arg
        attributes |= {
            part.attr
            for part in ast.walk(method)
            if isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == instance
        }
    return attributes


def _parameter_names(function: _Function) -> set[str]:
    arguments = function.args
    return {argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
