"""One function for the detectors: what its names mean, and which of them are tensors; and what they find in it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from torchport.porting.scan.codebase import Codebase, CodeUnit
from torchport.porting.scan.syntax import MODULE, Act, Event, Guards, chain_of
from torchport.porting.scan.tensors import Tensors

_BUILDERS = {
    "__init__", "reset_parameters", "init_weights", "_init_weights", "initialize_weights", "__new__",
    "__post_init__",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Site:
    """One finding of a function."""

    unit: CodeUnit  #: The function.
    kind: str  #: The rule's name.
    node: ast.AST  #: Where.
    guards: Guards  #: The conditions that it stands under.
    uses: str = ""  #: The name in full of what is called or imported.
    if_none: str = ""  #: A parameter that must be None for it to be one.
    #: Whether it is one for certain: not where a package is tried, or where a tensor is only assumed.

    sure: bool = True

    @property
    def line(self) -> int:
        """Its line."""
        return int(getattr(self.node, "lineno", 1))


class FunctionContext:
    """One function, for detectors.

    Args:
        codebase: Its codebase.
        unit: The function.
        attributes: The parameters and buffers of its class.
    """

    def __init__(self, codebase: Codebase, unit: CodeUnit, attributes: frozenset[str]) -> None:
        self.unit = unit
        self.codebase = codebase
        self._names: dict[tuple[str, ...], str] = {}
        self.tensors = Tensors(unit, self.full, attributes, self._returns)
        self.builds = unit.name.rpartition(".")[2] in _BUILDERS
        self.at_import = unit.name == MODULE
        self.asks_for_autocast = {id(node) for event in unit.body.events for node in _arguments_of_autocast(event)}

    def full(self, node: ast.AST) -> str:
        """Returns the name in full of a chain of names; empty where no import or definition of a module binds it."""
        chain = chain_of(node)
        if chain not in self._names:
            hidden = (
                chain[:1] and chain[0] in self.tensors.kinds and chain[0] not in self.unit.imports if chain else True
            )
            name = (
                "" if hidden and not self.at_import else self.codebase.full(self.unit.module, chain, self.unit.imports)
            )
            self._names[chain] = self.codebase.canonical(name) if name else ""
        return self._names[chain]

    def _returns(self, name: str) -> ast.expr | None:
        """Returns what a function of the codebase is annotated to return."""
        known = self.codebase.definition(name) if name else None
        node = known.body.node if isinstance(known, CodeUnit) else None
        return node.returns if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None

    def site(self, kind: str, event: Event, uses: str = "", if_none: str = "", sure: bool = True) -> Site:
        """Returns a finding at an event."""
        return Site(self.unit, kind, event.node, event.guards, uses, if_none, sure)


def _arguments_of_autocast(event: Event) -> Iterator[ast.AST]:
    if event.act is Act.CALL and isinstance(event.node, ast.Call):
        func = event.node.func
        last = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if last in ("autocast", "custom_fwd", "custom_bwd", "GradScaler"):
            yield from (*event.node.args, *(keyword.value for keyword in event.node.keywords))
