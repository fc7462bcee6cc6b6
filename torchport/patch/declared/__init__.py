"""What a pack declares: its entries, the functions beside them, and the versions that they fit.

An entry is one patch as it stands in YAML. The schema is closed: no other key, no coercion, nothing that is executed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from torchport.config import Frozen
from torchport.config.card import StageName

KINDS = ("replace", "wrap", "rewrite", "op", "stub")

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PATH = rf"{_NAME}(?:\.{_NAME})*"

Text = Annotated[str, pydantic.Field(min_length=1, pattern=r"\S")]
Identifier = Annotated[str, pydantic.Field(pattern=rf"^{_NAME}$")]
Package = Annotated[str, pydantic.Field(pattern=rf"^{_PATH}$")]
TargetName = Annotated[str, pydantic.Field(pattern=rf"^{_PATH}:{_PATH}$", max_length=300)]
Reference = Annotated[str, pydantic.Field(pattern=rf"^{_NAME}\.py:{_NAME}$", max_length=200)]
Range = Annotated[str, pydantic.Field(min_length=1, max_length=100)]


class Close(Frozen):
    """How close two outputs a and b are.

    Attributes:
        bound: The largest max|a - b| / max|b|.
        dtype: The dtype that the bound is for. Without it, the bound is for all.
    """

    bound: float = pydantic.Field(gt=0)
    dtype: str | None = None


class Equivalence(Frozen):
    """What a patch promises about the numbers: the word `bitwise` (the same bits), or exactly one of these keys.

    Attributes:
        bitwise: The same bits. Written as the plain word `bitwise`.
        algebraic: Equal in real arithmetic, apart from rounding. The text says why.
        close: Equal within a bound.
        lossy: Not equal. The text says why that is accepted.
    """

    bitwise: bool = False
    algebraic: Text | None = None
    close: Close | None = None
    lossy: Text | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, data: Any) -> Any:
        """Returns `{"bitwise": True}` for the word `bitwise`, and a mapping with one of the other fields as it is."""
        if data == "bitwise":
            return {"bitwise": True}
        if isinstance(data, dict) and len(data) == 1 and "bitwise" not in data:
            return data
        forms = "one of {algebraic: why}, {close: {bound: 1e-5}}, {lossy: why}"
        raise ValueError(f"It must be bitwise, or {forms}; quote a text that has a comma")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        written = {"algebraic": {"type": "string"}, "close": handler(core)["properties"]["close"]}
        written["lossy"] = {"type": "string"}
        single = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": False}
        return {"anyOf": [{"const": "bitwise"}, {**single, "properties": written}]}

    def written(self) -> str | dict[str, Any]:
        """Returns the promise as YAML has it: `"bitwise"`, `{"lossy": "why"}`."""
        if self.bitwise:
            return "bitwise"
        return self.model_dump(exclude_defaults=True, exclude_none=True)


class Lifetime(Frozen):
    """How long a patch is in force: the word `run` (the whole run), or this key.

    Attributes:
        while_importing: A package. The patch is in force only while its modules are imported.
    """

    while_importing: Package | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, data: Any) -> Any:
        """Returns no fields for the word `run`, and a mapping as it is."""
        if data == "run":
            return {}
        if isinstance(data, dict) and data:
            return data
        raise ValueError("It must be run, or {while_importing: package}")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        package = {"type": "object", "required": ["while_importing"], "additionalProperties": False}
        return {"anyOf": [{"const": "run"}, {**package, "properties": {"while_importing": {"type": "string"}}}]}


class Rewrite(Frozen):
    """An edit of a run of statements in one upstream function.

    Attributes:
        match: The statements. `$name` matches any expression, `$...name` on a line of its own any statements.
        put: The function that is called instead, `file.py:function`. Its parameters are names of upstream's function.
        gives: The names that take what `put` returns. By default the one name that the statements bind.
        times: How often the statements appear in the function, exactly.
    """

    match: Text
    put: Reference
    gives: list[Identifier] | None = None
    times: int = pydantic.Field(default=1, ge=1, le=100)


class StandIn(Frozen):
    """An absent package, and who may import what stands in for it.

    Attributes:
        package: The top-level package that is not installed.
        importers: The modules that can import the stub. No other module can.
    """

    package: Package
    importers: list[Package] = pydantic.Field(min_length=1)


class Entry(Frozen):
    """One patch. Exactly one of `replace`, `wrap`, `rewrite`, `op` and `stub` is given.

    Attributes:
        id: A name of its own, such as `up.attention`, unique among all entries.
        target: What is changed in upstream: `module:attribute.path`.
        replace: What takes the target's place: `file.py:name`.
        wrap: A function that receives the original as its first argument: `file.py:function`.
        rewrite: An edit of some statements of the target.
        op: A torchax lowering for the target, a torch function or ATen overload: `file.py:function`.
        stub: A stand-in for a package that is not installed. Calling it raises an error.
        why: What fails, or is slow, without the patch.
        reported: The upstream issue or pull request; or `none: ` and why there is none.
        until: When to delete the entry.
        fits: The distributions that the patch was written for, each with a range of versions (PEP 440) or `"*"`.
        equivalence: What the patch promises about the numbers.
        must_be_called: The stages that fail if they do not call the patch.
        plumbing: Whether no tensor passes through the target. The original backend applies such a patch, too.
        needed: Where the fault exists: ranges of versions, which must all hold, and a `probe: file.py:function`.
        scope: `global` if the target is shared by everybody: in torch, in jax or in Python's library.
        scope_reason: Why that is safe. Required with `scope: global`.
        lifetime: How long the patch is in force.
        relies_on: Other upstream functions, as targets, that the patch depends on. A change in them is drift.
        counted: Whether calls are counted. False is for very hot functions: a replacement then adds no frame.
        overrides: Whether it takes the place of the patch with the same id in a pack under its own (docs/packs.md).
    """

    id: str = pydantic.Field(pattern=r"^[a-z0-9]+(?:[._-][a-z0-9]+)*$", max_length=120)
    target: TargetName
    replace: Reference | None = None
    wrap: Reference | None = None
    rewrite: Rewrite | None = None
    op: Reference | None = None
    stub: StandIn | None = None
    why: Text
    reported: Text
    until: Text
    fits: dict[str, Range] = pydantic.Field(min_length=1)
    equivalence: Equivalence
    must_be_called: list[StageName] = []
    plumbing: bool = False
    needed: dict[str, Range] | None = pydantic.Field(default=None, min_length=1)
    scope: Literal["package", "global"] = "package"
    scope_reason: Text | None = None
    lifetime: Lifetime = pydantic.Field(Lifetime.model_validate("run"), json_schema_extra={"default": "run"})
    relies_on: list[TargetName] = []
    counted: bool = True
    overrides: bool = False

    _place: str = "Python:1"
    _folder: Path = Path()

    @property
    def place(self) -> str:
        """`file:line` of the entry."""
        return self._place

    @property
    def folder(self) -> Path:
        """The folder of the entry's file, and of the Python files beside it."""
        return self._folder

    @property
    def upstream(self) -> str:
        """The name of that folder."""
        return self._folder.name

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if kind in self.model_fields_set)

    @property
    def edits(self) -> bool:
        """Whether it changes an object of upstream's modules as they are imported: then drift is checked."""
        return self.kind in ("replace", "wrap", "rewrite")

    @property
    def is_shared(self) -> bool:
        """Whether everybody uses its target's package: torch, JAX, or Python's library (builtins included)."""
        return self.package in ("torch", "jax", "jaxlib") or self.package in sys.stdlib_module_names

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        """The top-level package of the target: `diffusers`."""
        return self.module.partition(".")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """The names that lead to the target in its module: `("Block", "forward")`."""
        return tuple(self.target.partition(":")[2].split("."))

    @property
    def reference(self) -> str | None:
        """The `file.py:name` of the function or class that the entry loads. None for a stub."""
        return self.rewrite.put if self.rewrite else self.replace or self.wrap or self.op


Mistake = tuple[tuple[str, ...], str, str]


def mistake(entry: Entry) -> Mistake | None:
    """Returns the first mistake in an entry that the schema allows: the field's keys, fact and remedy; else None."""
    kinds = [kind for kind in KINDS if kind in entry.model_fields_set]
    if len(kinds) != 1:
        listed = ", ".join(kinds) or "none"
        return (), f"'{entry.id}' has {len(kinds)} kinds ({listed})", f"Give exactly one of {', '.join(KINDS)}"
    if getattr(entry, kinds[0]) is None:
        return (kinds[0],), f"'{kinds[0]}' is empty", "Name a function as file.py:name"
    if entry.scope == "global" and entry.scope_reason is None:
        return ("scope",), "'scope' is global without a reason", "Add 'scope_reason'"
    if entry.scope == "package" and entry.scope_reason is not None:
        return ("scope_reason",), "'scope_reason' is read only with scope: global", "Remove it"
    # A lowering is seen by torchax alone, though its target is in torch.
    if entry.is_shared and entry.kind != "op" and entry.scope != "global":
        return ("target",), f"'{entry.target}' is shared by everybody", "Add 'scope: global' and 'scope_reason'"
    if entry.lifetime.while_importing and entry.scope != "global":
        return ("lifetime",), "'while_importing' is for targets shared by everybody", "Add 'scope: global'"
    if entry.lifetime.while_importing and entry.kind in ("rewrite", "op", "stub"):
        return ("lifetime",), f"'while_importing' does not go with '{entry.kind}'", "Use replace or wrap"
    if entry.must_be_called and not entry.counted:
        return ("counted",), "'counted' is false beside 'must_be_called'", "Remove one of the two"
    if not entry.counted and entry.kind not in ("replace", "wrap"):
        return ("counted",), f"'{entry.kind}' is always counted", "Remove 'counted'"
    if entry.stub is not None and entry.package != entry.stub.package:
        return ("target",), f"'{entry.target}' is not in {entry.stub.package}", "Name what the importers take from it"
    if entry.rewrite and entry.rewrite.gives and len(set(entry.rewrite.gives)) != len(entry.rewrite.gives):
        return ("rewrite", "gives"), "'rewrite.gives' repeats a name", "Name each once"
    ranges = [(("fits", name), text) for name, text in entry.fits.items()]
    ranges += [(("needed", name), text) for name, text in (entry.needed or {}).items() if name != "probe"]
    for location, text in ranges:
        try:
            SpecifierSet("" if text == "*" else text)
        except InvalidSpecifier:
            return location, f"'{'.'.join(location)}' is {text!r}", 'Write a PEP 440 range, as ">=2.13", or "*"'
    return None


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of a file of entries, for editors."""
    entry = Entry.model_json_schema(by_alias=True)
    definitions = entry.pop("$defs", {})
    entry["oneOf"] = [{"required": [kind]} for kind in KINDS]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "torchport patches",
        "type": "array",
        "items": {"$ref": "#/$defs/Entry"},
        "$defs": {**definitions, "Entry": entry},
    }
