"""Reads YAML strictly into frozen models: every mistake is an error that names the file and the line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import pydantic
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from torchport import folder
from torchport.errors import (
    ConfigError,
    DuplicateKeyError,
    MissingKeyError,
    SyntaxYamlError,
    UnknownKeyError,
    WrongTypeError,
    nearest,
)

Location = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound="Frozen")


class Frozen(pydantic.BaseModel):
    """A model read from YAML: unknown keys are refused, nothing is coerced, nothing changes after reading."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


@dataclasses.dataclass(frozen=True)
class Document:
    """One YAML file as plain data, with the line of every value.

    Attributes:
        file: What errors call the file.
        data: Mappings, lists, strings, numbers, booleans and None.
        lines: Line (from 1) of each key or list item, by its path from the root; `()` is the root's.
        flags: What was put in from the command line: the flag, by the path of the value.
    """

    file: str
    data: Any
    lines: Mapping[Location, int]
    flags: Mapping[Location, str] = dataclasses.field(default_factory=dict)

    def line(self, location: Sequence[str | int]) -> int:
        """Returns the line of a location, or of the closest container of it that was written."""
        path = tuple(location)
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def place(self, location: Sequence[str | int] = ()) -> str:
        """Returns `file:line` of a location, or the flag that set it."""
        path = tuple(location)
        for length in range(len(path), 0, -1):
            if path[:length] in self.flags:
                return self.flags[path[:length]]
        return f"{self.file}:{self.line(path)}"


def read_document(file: Path, shown: str | None = None) -> Document:
    """Returns a YAML file's data with its lines.

    Args:
        file: The file to read, UTF-8.
        shown: What errors call it; its path by default.

    Raises:
        SyntaxYamlError: No file that can be read, not YAML, no UTF-8, tags, anchors, several documents.
        DuplicateKeyError: One key twice in a mapping.
    """
    name = shown or str(file)
    try:
        return parse_document(folder.text(file), name)
    except OSError as error:
        fact = f"It cannot be read: {error.strerror}"
        raise SyntaxYamlError(name, fact, "Put a file of YAML there") from error
    except UnicodeDecodeError as error:
        raise SyntaxYamlError(f"{name}:1", f"Byte {error.start} is not UTF-8", "Save the file as UTF-8") from error


def parse_document(text: str, file: str) -> Document:
    """Returns YAML text as data with its lines; see `read_document`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # an anchor is refused anyhow, and a warning is no answer
    try:
        nodes = list(yaml.compose_all(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = " ".join(str(error.problem or error.context).split())
        raise SyntaxYamlError(f"{file}:{line}", f"Not YAML: {problem}", "Mend the syntax") from error
    except (YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split()).rstrip(".")[:200]
        raise SyntaxYamlError(f"{file}:1", f"Not YAML: {problem}", "Mend the syntax") from error
    if len(nodes) > 1:
        line = nodes[1].start_mark.line + 1
        raise SyntaxYamlError(f"{file}:{line}", "A second document starts here", "Keep one document to a file")
    lines: dict[Location, int] = {(): 1}
    data = _plain(nodes[0], (), lines, file) if nodes and nodes[0] is not None else None
    return Document(file, data, lines)


_SCALARS = {"tag:yaml.org,2002:" + kind for kind in ("str", "int", "float", "bool", "null", "timestamp")}


def _plain(node: Node, path: Location, lines: dict[Location, int], file: str) -> Any:
    """Returns a composed node as plain data; composing has constructed nothing, so nothing was executed."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    _check_no_anchor(node, file)
    if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _plain_mapping(node, path, lines, file)
    if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_plain(item, (*path, i), lines, file) for i, item in enumerate(node.value)]
    if isinstance(node, ScalarNode) and node.tag in _SCALARS:
        return _plain_scalar(node, file)
    raise SyntaxYamlError(f"{file}:{line}", f"The tag {node.tag} is not plain data", "Remove the tag")


def _check_no_anchor(node: Node, file: str) -> None:
    """Refuses an anchor, and with it every alias: an alias is read only after its anchor."""
    if node.anchor:
        line = node.start_mark.line + 1
        raise SyntaxYamlError(f"{file}:{line}", f"The anchor &{node.anchor} is not plain data", "Write the value out")


def _plain_mapping(node: MappingNode, path: Location, lines: dict[Location, int], file: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode) or key_node.tag not in _SCALARS:
            raise SyntaxYamlError(f"{file}:{line}", "A key is not a plain word", "Use a string as the key")
        _check_no_anchor(key_node, file)
        key = str(key_node.value)
        if key in result:
            first = lines[(*path, key)]
            raise DuplicateKeyError(
                f"{file}:{line}", f"'{key}' stands here and on line {first}", "Keep one of the two", key=key
            )
        lines[(*path, key)] = line
        result[key] = _plain(value_node, (*path, key), lines, file)
    return result


def _plain_scalar(node: ScalarNode, file: str) -> Any:
    from ruamel.yaml.constructor import SafeConstructor

    if node.tag in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp"):
        return node.value  # a date stays what was written: no field here is one
    try:
        return SafeConstructor(loader=YAML(typ="safe", pure=True)).construct_object(node)
    except (YAMLError, ValueError, OverflowError, ArithmeticError, LookupError) as error:
        line = node.start_mark.line + 1
        raise SyntaxYamlError(f"{file}:{line}", f"'{node.value}' cannot be read", "Quote it") from error


def overridden(document: Document, override: str) -> Document:
    """Returns the document with one `path.to.field=value` put in, the value read as YAML."""
    place = f"--set {override}"
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise WrongTypeError(place, "This is not path.to.field=value", "Write for example --set steps=10")
    try:
        value = parse_document(text, place).data
    except SyntaxYamlError as error:
        raise SyntaxYamlError(place, error.fact, "Quote the value") from error
    data: Any = {**document.data} if isinstance(document.data, dict) else {}
    inner, new = data, len(keys)
    for depth, key in enumerate(keys[:-1], 1):
        if not isinstance(inner.get(key), dict):
            new = min(new, depth)  # from here on down, all is the flag's
            inner[key] = {}
        inner[key] = {**inner[key]}
        inner = inner[key]
    inner[keys[-1]] = value
    return dataclasses.replace(document, data=data, flags={**document.flags, tuple(keys[:new]): place})


def validated(model: type[ModelT], document: Document) -> ModelT:
    """Returns the document as a model.

    Raises:
        UnknownKeyError, MissingKeyError, WrongTypeError: The first mistake in the file, with its line.
    """
    try:
        return model.model_validate(document.data)
    except pydantic.ValidationError as error:
        mistakes = [(_written(document.data, e["loc"], e["type"]), e) for e in error.errors()]
        # Of the alternatives of one field, the one that went furthest is the one that was meant: our own checks last.
        mistakes.sort(
            key=lambda m: (m[1]["type"] == "missing", document.line(m[0]), -len(m[0]), m[1]["type"] != "value_error")
        )
        raise _mistake(model, document, *mistakes[0]) from error


def _written(data: Any, location: Sequence[str | int], kind: str) -> Location:
    """Returns pydantic's location without the names that it gives to alternatives, which nobody wrote."""
    path: Location = ()
    for number, part in enumerate(location, 1):
        held = range(len(data)) if isinstance(data, list) else data if isinstance(data, dict) else ()
        if part in held:
            data = data[part]
            path += (part,)
        elif kind == "missing" and number == len(location):
            path += (part,)
    return path


def _mistake(model: type[Frozen], document: Document, location: Location, error: Any) -> ConfigError:
    """Returns one of pydantic's errors as ours."""
    place = document.place(location)
    name = ".".join(str(part) for part in location) or "the file"
    if error["type"] == "extra_forbidden":
        key = str(location[-1])
        known = fields_at(model, location[:-1])
        return UnknownKeyError(place, f"Unknown key '{name}'", nearest(key, known), key=name)
    if error["type"] == "missing":
        return MissingKeyError(place, f"'{name}' is missing", f"Add '{location[-1]}'", key=name)
    if error["type"] == "value_error":
        return WrongTypeError(place, f"'{name}' is {error['input']!r}", str(error["ctx"]["error"]), key=name)
    wanted = _WANTED.get(error["type"]) or str(error["msg"]).removeprefix("Input should be ").rstrip(".")
    value, kind = error["input"], type(error["input"]).__name__
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    fact = f"'{name}' is empty" if value is None else f"'{name}' is {shown} ({_KINDS.get(kind, kind)})"
    return WrongTypeError(place, fact, f"It must be {wanted}", key=name)


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "list_type": "a list",
}
_KINDS = {
    "str": "text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "dict": "a mapping",
    "list": "a list",
}


def fields_at(model: type[Frozen], location: Sequence[str | int]) -> list[str]:
    """Returns the keys that a model reads at a location inside it."""
    current: Any = model
    for part in location:
        current = _inside(current, part)
    candidates = [c for c in _alternatives(current) if isinstance(c, type) and issubclass(c, pydantic.BaseModel)]
    return sorted({field.alias or name for c in candidates for name, field in c.model_fields.items()})


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) is None or get_origin(annotation) in (dict, list, tuple):
        return [annotation]
    return [inner for arg in get_args(annotation) for inner in _alternatives(arg)]


def _inside(annotation: Any, part: str | int) -> Any:
    for candidate in _alternatives(annotation):
        if isinstance(candidate, type) and issubclass(candidate, pydantic.BaseModel):
            for name, field in candidate.model_fields.items():
                if part in (name, field.alias):
                    return field.annotation
        elif get_origin(candidate) in (list, tuple):
            return get_args(candidate)[0]
        elif get_origin(candidate) is dict:
            return get_args(candidate)[1]
    return None
