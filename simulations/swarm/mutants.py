"""Small wrong changes to the code that decides, made from its syntax: what a swarm should notice.

Places are all that the operators below apply to in `ksana/cache/` and `ksana/scheduling/`, but for what only
checks, tells or writes itself down, and a few files that no world runs (`_QUIET_FILES`, `_is_out_of_scope`).
Which of them are tried is drawn from a seed.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

MutantKind = Literal[
    "flipped comparison",
    "off by one",
    "lost wake-up",
    "dropped release",
    "dropped statement",
    "swapped min and max",
    "wrong condition",
    "constant return",
]

PACKAGES = ("ksana/cache", "ksana/scheduling")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}

_WAKE_UPS = {"num_changes", "retry_at_s", "plans_to_skip"}
"""State that says when asking again may be worth it: without it nobody asks, or late."""

_RELEASES = {
    "release", "unhold", "unpin", "discard", "release_request", "drop", "forget", "_shrink", "_drop_blocks",
    "undo", "step_aside", "cancel_load", "step_done", "retire_leaving",
}  # fmt: skip
"""Calls that give something back."""

_QUIET_FILES = {
    "fa_checks.py", "invariants.py", "status.py", "__init__.py",
    "pool_sizes.py",  # decides before an engine begins
    "fixed_batch.py", "fixed_batch_steps.py",  # decide for `ksana perf` alone
}  # fmt: skip
_QUIET_FUNCTIONS = {
    "check", "check_touched", "check_sums", "snapshot", "restore", "status", "use", "as_message", "__len__",
    "__contains__", "__post_init__", "_too_large", "_refuse_too_small", "_mib", "usage", "timing", "_count",
    "copy", "entries_of",
}  # fmt: skip
_QUIET_PARTS = ("check_", "snapshot", "restore")
"""Of names of functions."""
_QUIET_WORDS = {"counters", "totals", "num_late_messages", "load_outcomes", "last_progress_s"}


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """One wrong change. `site` counts the places of its kind in the file."""

    kind: MutantKind
    path: str
    site: int
    line: int
    function: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.before} -> {self.after}"


class _Change:
    """A change that can be made to a tree: `apply` gives the node instead, or None to drop a statement."""

    def __init__(self, node: ast.AST, kind: MutantKind, new: ast.AST | None, function: str) -> None:
        self.node = node
        self.kind: MutantKind = kind
        self.new = new
        self.function = function


def find_mutants(root: Path) -> list[Mutant]:
    """All of them, in the order of files and lines."""
    mutants = []
    for package in PACKAGES:
        for path in sorted((root / package).glob("*.py")):
            if path.name not in _QUIET_FILES:
                relative = str(path.relative_to(root))
                mutants += _in_file(relative, ast.parse(path.read_text(encoding="utf-8")))
    return mutants


def draw_mutants(mutants: list[Mutant], num: int, seed: int) -> list[Mutant]:
    """So many, kinds in turn and within a kind at random, without two of one line."""
    rng = random.Random(seed)
    by_kind: dict[MutantKind, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for group in by_kind.values():
        rng.shuffle(group)
    chosen: list[Mutant] = []
    lines: set[tuple[str, int]] = set()
    while len(chosen) < num and any(by_kind.values()):
        for group in by_kind.values():
            while group:
                mutant = group.pop()
                if (mutant.path, mutant.line) not in lines:
                    lines.add((mutant.path, mutant.line))
                    chosen.append(mutant)
                    break
    return chosen[:num]


def mutated_source(root: Path, mutant: Mutant) -> str:
    """The text of the mutant's file with the change made."""
    tree = ast.parse((root / mutant.path).read_text(encoding="utf-8"))
    change = list(_changes(tree))[mutant.site]
    new = ast.Pass() if change.new is None else change.new
    changed = _Replace(change.node, new).visit(tree)
    return ast.unparse(ast.fix_missing_locations(changed)) + "\n"


def _in_file(path: str, tree: ast.Module) -> list[Mutant]:
    mutants = []
    for site, change in enumerate(_changes(tree)):
        line = getattr(change.node, "lineno", 0)
        mutants.append(
            Mutant(
                kind=change.kind,
                path=path,
                site=site,
                line=line,
                function=change.function,
                before=_short(change.node),
                after="nothing" if change.new is None else _short(change.new),
            )
        )
    return mutants


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return self.new
        return self.generic_visit(node)


def _changes(tree: ast.Module) -> Iterator[_Change]:
    """Every change, in a fixed order."""
    for function in _functions(tree):
        if function.name in _QUIET_FUNCTIONS or any(word in function.name for word in _QUIET_PARTS):
            continue
        yield from _in_block(function.body, function.name, returns_bool=_returns_bool(function))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Outermost functions and methods, but of protocols."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if "Protocol" not in bases:
                yield from _functions(node)


def _returns_bool(function: ast.FunctionDef) -> bool:
    return isinstance(function.returns, ast.Name) and function.returns.id == "bool"


def _in_block(body: list[ast.stmt], function: str, *, returns_bool: bool) -> Iterator[_Change]:
    for statement in body:
        if _is_out_of_scope(statement):
            continue
        yield from _of_statement(statement, function, returns_bool=returns_bool)
        for expression in _own_expressions(statement):
            yield from _of_expression(expression, function)
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list):
                yield from _in_block(inner, function, returns_bool=returns_bool)


def _is_out_of_scope(statement: ast.stmt) -> bool:
    """Assertions, docstrings, and what only statistics and texts show."""
    if isinstance(statement, ast.Raise | ast.Assert | ast.FunctionDef | ast.Pass | ast.AnnAssign):
        return isinstance(statement, ast.Raise | ast.Assert | ast.FunctionDef | ast.Pass) or _is_quiet(
            statement
        )
    if isinstance(statement, ast.If) and all(isinstance(inner, ast.Raise) for inner in statement.body):
        return not statement.orelse
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    return isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr) and _is_quiet(statement)


def _is_quiet(statement: ast.stmt) -> bool:
    names = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return bool(names & _QUIET_WORDS) or any("check" in name for name in names)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement, without those of the statements inside it."""
    for _, value in ast.iter_fields(statement):
        if isinstance(value, ast.expr):
            yield value
        elif isinstance(value, list):
            yield from [item for item in value if isinstance(item, ast.expr)]


def _of_statement(statement: ast.stmt, function: str, *, returns_bool: bool) -> Iterator[_Change]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        is_release = name in _RELEASES or "release" in ast.unparse(statement.value)
        kind: MutantKind = "dropped release" if is_release else "dropped statement"
        yield _Change(statement, kind, None, function)
    elif isinstance(statement, ast.Assign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        attributes = {target.attr for target in targets if isinstance(target, ast.Attribute)}
        if attributes & _WAKE_UPS and _is_wake_up(statement):
            yield _Change(statement, "lost wake-up", None, function)
        elif attributes or isinstance(targets[0], ast.Subscript):
            yield _Change(statement, "dropped statement", None, function)
    elif isinstance(statement, ast.Delete):
        yield _Change(statement, "dropped release", None, function)
    elif isinstance(statement, ast.If):
        for value in (True, False):
            yield _Change(statement.test, "wrong condition", ast.Constant(value), function)
    elif isinstance(statement, ast.Return) and returns_bool and statement.value is not None:
        for value in (True, False):
            if ast.unparse(statement.value) != str(value):
                yield _Change(statement.value, "constant return", ast.Constant(value), function)


def _is_wake_up(statement: ast.Assign | ast.AugAssign) -> bool:
    """Counting on, going back to 0, or setting a time; not what puts asking off."""
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add)
    value = statement.value
    return isinstance(value, ast.BinOp) or (isinstance(value, ast.Constant) and value.value == 0)


def _of_expression(expression: ast.expr, function: str) -> Iterator[_Change]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Compare):
            for index, op in enumerate(node.ops):
                other = _COMPARISONS[type(op)]()
                flipped = copy.copy(node)
                flipped.ops = [other if at == index else old for at, old in enumerate(node.ops)]
                yield _Change(node, "flipped comparison", flipped, function)
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
            yield _Change(node, "off by one", ast.Constant(node.value + 1), function)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            swapped = copy.copy(node)
            swapped.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield _Change(node, "off by one", swapped, function)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
        ):
            other_call = copy.copy(node)
            other_call.func = ast.Name("max" if node.func.id == "min" else "min", ast.Load())
            yield _Change(node, "swapped min and max", other_call, function)
        elif isinstance(node, ast.BoolOp):
            other_op = copy.copy(node)
            other_op.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield _Change(node, "wrong condition", other_op, function)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield _Change(node, "wrong condition", node.operand, function)
