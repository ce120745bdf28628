"""Scan of product code for log events: which names are logged, at which level, with which fields.

The result has no module paths and no line numbers, so it does not change when code moves. Field names are resolved
from dict literals, `|`, `**`, local variables, attributes of `self`, return values of functions in the same module and
keyword arguments that a `**facts` parameter collects. What cannot be resolved is shown as `?`.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
UNRESOLVED = "?"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    """Yield the Python files below the folders that exist; symbolic links are not followed."""
    for folder in folders:
        top = root / folder
        if top.is_symlink():
            continue
        for directory, _, names in os.walk(top, followlinks=False):
            paths = (Path(directory) / name for name in names if name.endswith(".py"))
            yield from (path for path in paths if not path.is_symlink())


def log_events(module: ast.Module) -> set[str]:
    """Return one line per event of a module: `name level field, field`."""
    return _Scan(module).lines()


class _Scan:
    """One module. `_owner` maps each node to the function around it, or to the module."""

    def __init__(self, module: ast.Module) -> None:
        self._module = module
        self._functions = {node.name: node for node in ast.walk(module) if isinstance(node, _Function)}
        self._owner: dict[ast.AST, ast.AST] = {}
        self._find_owners(module, module)
        self._loggers = {
            target.id
            for node in module.body
            if isinstance(node, ast.Assign) and "getLogger" in ast.unparse(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def _find_owners(self, node: ast.AST, owner: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._owner[child] = owner
            self._find_owners(child, child if isinstance(child, _Function) else owner)

    def lines(self) -> set[str]:
        found = set()
        for node in ast.walk(self._module):
            if isinstance(node, ast.Call) and self._is_log_call(node):
                assert isinstance(node.func, ast.Attribute)
                options = {keyword.arg: keyword.value for keyword in node.keywords}
                fields = self._keys(options["extra"], self._owner[node]) if "extra" in options else set()
                shown = ", ".join(sorted(fields)) or "-"
                found |= {f"{name} {node.func.attr} {shown}" for name in _texts(node.args[0])}
        return found

    def _is_log_call(self, node: ast.Call) -> bool:
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in LEVELS:
            return False
        target = node.func.value
        if isinstance(target, ast.Name):
            return target.id in self._loggers
        return "getLogger" in ast.unparse(target) or ast.unparse(target).endswith(("logger", "_log"))

    def _keys(self, value: ast.expr, owner: ast.AST) -> set[str]:
        if isinstance(value, ast.Dict):
            found = set()
            for key, each in zip(value.keys, value.values, strict=True):
                found |= self._keys(each, owner) if key is None else _texts(key)
            return found
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
            return self._keys(value.left, owner) | self._keys(value.right, owner)
        if isinstance(value, ast.IfExp):
            return self._keys(value.body, owner) | self._keys(value.orelse, owner)
        if isinstance(value, ast.Name):
            return self._keys_of_variable(value.id, owner)
        if isinstance(value, ast.Attribute):
            return self._keys_assigned(ast.unparse(value), self._module)
        if isinstance(value, ast.Call):
            return self._keys_of_call(value)
        return {UNRESOLVED}

    def _keys_of_variable(self, name: str, owner: ast.AST) -> set[str]:
        if isinstance(owner, _Function) and owner.args.kwarg is not None and owner.args.kwarg.arg == name:
            return self._keys_collected(owner)
        return self._keys_assigned(name, owner)

    def _keys_assigned(self, target: str, scope: ast.AST) -> set[str]:
        """Return the keys that any statement in the scope gives to a variable: `x = {}`, `x |= {}`, `x["key"] = `."""
        found = set()
        for node in ast.walk(scope):
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
                continue
            for each in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if ast.unparse(each) == target:
                    found |= self._keys(node.value, self._owner[node])
                elif isinstance(each, ast.Subscript) and ast.unparse(each.value) == target:
                    found |= _texts(each.slice)
        return found or {UNRESOLVED}

    def _keys_of_call(self, call: ast.Call) -> set[str]:
        name = _called(call)
        if name == "dict":
            return {keyword.arg or UNRESOLVED for keyword in call.keywords}
        function = self._functions.get(name)
        if function is None:
            return {UNRESOLVED}
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        return set().union(*(self._keys(node.value, function) for node in returns if node.value)) or {UNRESOLVED}

    def _keys_collected(self, function: _Function) -> set[str]:
        """Return the keywords that callers in this module pass beyond the named parameters."""
        named = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        calls = [node for node in ast.walk(self._module) if isinstance(node, ast.Call)]
        passed = {kw.arg or UNRESOLVED for call in calls if _called(call) == function.name for kw in call.keywords}
        return passed - named


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _texts(value: ast.expr) -> set[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return {value.value}
    if isinstance(value, ast.IfExp):
        return _texts(value.body) | _texts(value.orelse)
    return {UNRESOLVED}
