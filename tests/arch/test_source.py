"""Rules that hold in every product file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source import ROOT, Module, modules

ENVIRONMENT = {"environ", "getenv", "environb"}
BROAD = {"Exception", "BaseException"}
# The border of a process: whatever went wrong is told to the process above, and this one ends.
BORDERS = {"model_executor.worker"}
SERIALIZERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
LONGEST_FILE = 400
# Work put off, and traces of where the code was written.
UNFINISHED = re.compile(r"\bTODO\b|\bFIXME\b|\bXXX\b|NotImplementedError")

every_module = pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: all but the bodies of functions."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += [*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        elif not isinstance(node, ast.Lambda):
            stack += list(ast.iter_child_nodes(node))


def reads_environment(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in at_import(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.Name) and node.id in ENVIRONMENT)
    ]


def broad_handlers(tree: ast.Module) -> list[int]:
    """Lines of handlers that take every exception and keep it: the last statement raises neither it nor its cause."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)
            last = node.body[-1]
            if broad and not (isinstance(last, ast.Raise) and (last.exc is None or last.cause is not None)):
                found.append(node.lineno)
    return found


@every_module
def test_nothing_reads_the_environment_at_import(module: Module) -> None:
    assert reads_environment(module.tree) == []


@every_module
def test_no_handler_takes_every_exception(module: Module) -> None:
    assert len(broad_handlers(module.tree)) == (1 if module.name in BORDERS else 0)


@every_module
def test_nothing_unpickles(module: Module) -> None:
    names = {
        name.partition(".")[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert names & SERIALIZERS == set()
    calls = {ast.unparse(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    assert calls & {"torch.load", "torch.save", "eval", "exec", "os.fork", "os.system"} == set()


@every_module
def test_no_global_statement(module: Module) -> None:
    assert [node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Global)] == []


@every_module
def test_a_file_has_a_docstring_and_a_readable_length(module: Module) -> None:
    assert ast.get_docstring(module.tree)
    assert len(module.path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


@every_module
def test_a_package_file_holds_its_docstring_alone(module: Module) -> None:
    if module.path.name == "__init__.py":
        assert len(module.tree.body) == 1


@every_module
def test_nothing_is_left_for_later(module: Module) -> None:
    assert UNFINISHED.findall(module.path.read_text(encoding="utf-8")) == []


def test_the_rules_find_what_they_forbid() -> None:
    assert reads_environment(ast.parse("import os\nX = os.environ['A']")) == [2]
    assert reads_environment(ast.parse("import os\ndef f(a=os.getenv('A')): return 1")) == [2]
    assert reads_environment(ast.parse("import os\ndef f(): return os.environ")) == []
    assert broad_handlers(ast.parse("try: f()\nexcept: pass")) == [2]
    assert broad_handlers(ast.parse("try: f()\nexcept (ValueError, Exception): pass")) == [2]
    assert broad_handlers(ast.parse("try: f()\nexcept OSError: pass")) == []
    assert broad_handlers(ast.parse("try: f()\nexcept BaseException:\n g()\n raise")) == []
    assert broad_handlers(ast.parse("try: f()\nexcept Exception as e: raise Known(e) from e")) == []
    assert broad_handlers(ast.parse("try: f()\nexcept Exception: raise Known")) == [2]


# The sources of the native kernels, and what the package's own build makes of them.
NATIVE = {Path("model_executor/native"): {".c", ".h", ".so"}}


def test_no_generated_or_foreign_file_lies_in_the_packages() -> None:
    stray = [
        path.relative_to(ROOT)
        for package in ("frontend", "engine_core", "model_executor")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"} | NATIVE.get(path.parent.relative_to(ROOT), set())
    ]
    assert stray == []
