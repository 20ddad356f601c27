"""What a template may be before it is compiled: its size, its depth, and the kinds of its parts.

Jinja's parser and code generator and Python's compiler take time and memory that grow faster than the
template, and recurse as deep as it nests. So the tokens are counted before anything is parsed, and the tree
before code is made of it. The largest templates in use have 17,000 characters, 4,000 tokens, 1,300 nodes, 60
names and a depth of 29.
"""

from __future__ import annotations

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateSyntaxError

MAX_TEMPLATE_BYTES = 4 << 20
"""Of a file that holds nothing but a template, before it is read as text."""
MAX_TEMPLATE_CHARS = 400_000
MAX_TOKENS = 40_000
MAX_NODES = 20_000
MAX_DEPTH = 100
MAX_NAMES = 1_000
MAX_NAME_CHARS = 200
MAX_NUMBER_CHARS = 100
MAX_BRANCHES = 200
"""`elif` parts of one `if`: for Python's compiler each is nested in the one before."""
MAX_CHAIN = 1_000
"""Comparisons in a row, and arguments of one call."""

_NUMBERS = frozenset({"integer", "float"})
_ALLOWED = frozenset(
    {
        # statements
        nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock,
        nodes.FilterBlock, nodes.With, nodes.Block, nodes.Assign, nodes.AssignBlock, nodes.Scope,
        nodes.Break, nodes.Continue,
        # statements that `Metering` replaces
        nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.ScopedEvalContextModifier,
        # expressions
        nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword,
        nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice,
        nodes.Concat, nodes.Compare, nodes.Operand, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Add,
        nodes.Sub, nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos,
    }
)  # fmt: skip


class TemplateTooLarge(TemplateSyntaxError):
    """The template is larger, or nests deeper, than any that is worth compiling."""


def check_source(environment: Environment, source: str) -> None:
    """Refuse a source with too many characters, tokens or digits. Linear in time and memory.

    Raises TemplateTooLarge, or TemplateSyntaxError for what the lexer does not know.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateTooLarge(f"it has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}", 1)
    for number, (line, kind, text) in enumerate(environment.lexer.tokeniter(source, None)):
        if number >= MAX_TOKENS:
            raise TemplateTooLarge(f"it has more than {MAX_TOKENS} tokens", line)
        if kind in _NUMBERS and len(text) > MAX_NUMBER_CHARS:
            raise TemplateTooLarge(f"a number has {len(text)} digits, more than {MAX_NUMBER_CHARS}", line)
        if kind == "name" and len(text) > MAX_NAME_CHARS:
            raise TemplateTooLarge(f"a name has {len(text)} characters, more than {MAX_NAME_CHARS}", line)


def check_tree(tree: nodes.Template) -> None:
    """Refuse a tree that is too large or too deep, or has parts that no chat template needs.

    Takes no recursion, so that depth is found and not fallen into. Raises TemplateSyntaxError.
    """
    names: set[str] = set()
    num_nodes = 0
    level: list[nodes.Node] = [tree]
    depth = 0
    while level:
        depth += 1
        num_nodes += len(level)
        line = level[0].lineno or 1
        if depth > MAX_DEPTH:
            raise TemplateTooLarge(f"it nests deeper than {MAX_DEPTH} levels", line)
        if num_nodes > MAX_NODES:
            raise TemplateTooLarge(f"it has more than {MAX_NODES} parts", line)
        for node in level:
            _check_node(node)
            names.update(_names(node))
        level = [child for node in level for child in node.iter_child_nodes()]
    if len(names) > MAX_NAMES:
        raise TemplateTooLarge(f"it has {len(names)} names, more than {MAX_NAMES}", 1)


def _check_node(node: nodes.Node) -> None:
    line = node.lineno or 1
    if type(node) not in _ALLOWED:
        raise TemplateSyntaxError(f"{type(node).__name__} has no place in a chat template", line)
    if isinstance(node, nodes.Filter | nodes.Test) and node.name.startswith("_"):
        raise TemplateSyntaxError(f"no filter or test is named {node.name!r}", line)
    if isinstance(node, nodes.If) and len(node.elif_) > MAX_BRANCHES:
        raise TemplateTooLarge(f"an if has {len(node.elif_)} elif, more than {MAX_BRANCHES}", line)
    chain = len(node.ops) if isinstance(node, nodes.Compare) else 0
    if isinstance(node, nodes.Call | nodes.Filter | nodes.Test):
        chain = len(node.args) + len(node.kwargs)
    if chain > MAX_CHAIN:
        raise TemplateTooLarge(f"{chain} comparisons or arguments follow each other", line)


def _names(node: nodes.Node) -> tuple[str, ...]:
    """The variables and blocks that a node names."""
    if isinstance(node, nodes.Name | nodes.NSRef | nodes.Macro | nodes.Block):
        return (node.name,)
    return ()
