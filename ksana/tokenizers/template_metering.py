"""A template's tree rewritten before it is compiled, so that all that repeats or grows is paid for."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


class Metering(NodeTransformer):
    """Puts the internal filters `_iterate`, `_turn`, `_concat`, `_walk` and `_slice` where work can grow."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:  # what it leaves out takes no turn
            node.iter = _filtered(node.iter, "_iterate")
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), "_turn")))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "_concat")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), "_walk")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), "_walk")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_walk") if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_walk")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_walk")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_slice")
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._pay_for_spread(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._pay_for_spread(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._pay_for_spread(node)

    def _pay_for_spread(self, node: Any) -> nodes.Node:
        """`f(*values, **names)`: one argument for each item, made before anything is called."""
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _filtered(node.dyn_args, "_iterate")
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _filtered(node.dyn_kwargs, "_iterate")
        spread: nodes.Node = node
        return spread

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data)  # so that it passes through `finalize` like any other output

    # There is no other template, and prompts are not HTML: an error, but only where it is reached.

    def visit_Extends(self, _: nodes.Extends) -> nodes.Node:
        return _refused("extends")

    def visit_Include(self, _: nodes.Include) -> nodes.Node:
        return _refused("include")

    def visit_Import(self, _: nodes.Import) -> nodes.Node:
        return _refused("import")

    def visit_FromImport(self, _: nodes.FromImport) -> nodes.Node:
        return _refused("from")

    def visit_ScopedEvalContextModifier(self, _: nodes.ScopedEvalContextModifier) -> nodes.Node:
        return _refused("autoescape")


def _refused(what: str) -> nodes.Node:
    return nodes.ExprStmt(_filtered(nodes.Const(what), "_refuse"))


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)
