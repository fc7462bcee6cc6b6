"""Reads YAML strictly into frozen models: every mistake is an error that names the file and the line."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import pydantic
import yaml

from torchport.errors import (
    DuplicateKeyError,
    MissingKeyError,
    SyntaxYamlError,
    TorchportError,
    UnknownKeyError,
    UnknownNameError,
    WrongTypeError,
    closest,
    combined,
    nearest,
)
from torchport.files import folder

Location = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound="Frozen")


class Frozen(pydantic.BaseModel):
    """A model read from YAML: unknown keys are refused, nothing is coerced, nothing changes after reading."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


@dataclasses.dataclass(frozen=True)
class Document:
    """One YAML file as plain data, with the line of every value."""

    file: str  #: What errors call the file.
    data: Any  #: Mappings, lists, strings, numbers, booleans and None.
    #: Line (from 1) of each key or list item, by its path from the root; `()` is the root's.
    lines: Mapping[Location, int]
    #: The flags of the command line that set a value, by the path of the value.
    flags: Mapping[Location, str] = dataclasses.field(default_factory=dict)
    #: What errors call another file, by the path of each value that is written there.
    files: Mapping[Location, str] = dataclasses.field(default_factory=dict)

    def line(self, location: Sequence[str | int]) -> int:
        """Returns the line of a location, such as `("mesh", "tp")`, or of the closest container that was written."""
        path = tuple(location)
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def place(self, location: Sequence[str | int] = ()) -> str:
        """Returns `file:line` of a location, or the flag that set it: `--set steps=10`."""
        containers = [tuple(location)[:length] for length in range(len(location), 0, -1)]
        for path in containers:
            if path in self.flags:
                return self.flags[path]
        written = next((path for path in containers if path in self.lines), ())
        return f"{self.files.get(written, self.file)}:{self.line(written)}"

    def over(self, base: Document) -> Document:
        """Returns this document on top of `base`: mappings are merged, and null removes a value of `base`."""
        lines, files = dict(self.lines), dict(self.files)

        def merged(upper: Any, lower: Any, path: Location) -> Any:
            """Returns the upper value on top of the lower; notes file and line of values that only the lower has."""
            if not isinstance(upper, dict) or not isinstance(lower, dict):
                return upper
            inherited = {(*path, key) for key in lower.keys() - upper.keys()}
            # Their lines, and those of the values inside them.
            inner = {below: line for below, line in base.lines.items() if below[: len(path) + 1] in inherited}
            lines.update(inner)
            files.update(dict.fromkeys(inner, base.file))
            values = {**lower, **{key: merged(upper[key], lower.get(key), (*path, key)) for key in upper}}
            # A null that replaces no value of the lower mapping is a value.
            return {key: value for key, value in values.items() if value is not None or lower.get(key) is None}

        return dataclasses.replace(self, data=merged(self.data, base.data, ()), lines=lines, files=files)


def read_document(file: Path, title: str | None = None) -> Document:
    """Returns a YAML file's data with its lines. Errors call the file `title`, by default its path."""
    name = title or str(file)
    return parse_document(text_of(file, name, "Put a file of YAML there"), name)


def text_of(file: Path, name: str, remedy: str) -> str:
    """Returns a file's text. Errors call the file `name`, and say `remedy` where it cannot be read."""
    try:
        return folder.text(file)
    except OSError as error:
        raise SyntaxYamlError(name, f"It cannot be read: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        raise SyntaxYamlError(f"{name}:1", f"Byte {error.start} is not UTF-8", "Save the file as UTF-8") from error


# libyaml's parser, where PyYAML was built with it: the same events, many times as fast.
_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
# Python's recursion and libyaml have limits that differ by release. Ours is below them.
_DEEPEST = 100
_CORE: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    # The plain scalars of YAML 1.2's core schema: `1e-5` is a number, and `no` is a word. Beside it, digits in groups.
    (re.compile(r"null|Null|NULL|~|"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+(_[0-9]+)*"), int),
    (re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


def parse_document(text: str, file: str) -> Document:
    """Returns YAML text as data with its lines; raises with the line of a fault. See `read_document`."""
    lines: dict[Location, int] = {(): 1}
    try:
        events = _plain_events(text, file)
        first = next(events, None)
        data = None if first is None else _Reader(file, events, lines).value(first, ())
        next(events, None)  # refuses a second document
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = " ".join(str(error.problem or error.context).split())
        raise SyntaxYamlError(f"{file}:{line}", f"Not YAML: {problem}", "Mend the syntax") from error
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split()).rstrip(".")[:200]
        raise SyntaxYamlError(f"{file}:1", f"Not YAML: {problem}", "Mend the syntax") from error
    return Document(file, data, lines)


def _plain_events(text: str, file: str) -> Iterator[Any]:
    """Yields what the parser finds in YAML text: a scalar, the start or the end of a mapping or list.

    Refuses aliases, anchors, tags and a second document. `yaml.compose` would lose anchors, and whether a tag was
    written out. No tag constructs anything here, so none executes anything.
    """
    documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise _refusal_at(event, file, "A second document starts here", "Keep one document to a file")
        if isinstance(event, yaml.AliasEvent):
            raise _refusal_at(event, file, f"The alias *{event.anchor} is not plain data", "Write the value out")
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise _refusal_at(event, file, f"The anchor &{event.anchor} is not plain data", "Write the value out")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise _refusal_at(event, file, f"The tag {event.tag} is not plain data", "Remove the tag")
        if isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            yield event


def _refusal_at(event: Any, file: str, fact: str, remedy: str) -> SyntaxYamlError:
    return SyntaxYamlError(f"{file}:{event.start_mark.line + 1}", fact, remedy)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Builds plain data from the events of a document, and notes the line of each value."""

    file: str
    events: Iterator[Any]
    lines: dict[Location, int]

    def value(self, event: Any, path: Location) -> Any:
        """Returns the mapping, list or scalar that starts with an event; refuses what is nested too deep."""
        if len(path) > _DEEPEST:
            fact = f"The value is nested in more than {_DEEPEST} others"
            raise _refusal_at(event, self.file, fact, "Nest it less deeply")
        self.lines.setdefault(path, event.start_mark.line + 1)  # a mapping's value has the line of its key already
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            items = itertools.takewhile(lambda item: not isinstance(item, yaml.SequenceEndEvent), self.events)
            return [self.value(item, (*path, number)) for number, item in enumerate(items)]
        text = str(event.value)
        if event.style:
            return text  # it is quoted, or a block
        for pattern, read in _CORE:
            if pattern.fullmatch(text):
                try:
                    return read(text)
                except ValueError as error:  # thousands of digits
                    raise _refusal_at(event, self.file, f"'{text}' cannot be read", "Quote it") from error
        return text

    def _mapping(self, path: Location) -> dict[str, Any]:
        """Returns a mapping from the events that follow its start; refuses a key that stands there twice."""
        result: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise _refusal_at(event, self.file, "A key is not a plain word", "Use a string as the key")
            key = str(event.value)
            if key in result:
                fact = f"'{key}' stands here and on line {self.lines[*path, key]}"
                raise DuplicateKeyError(f"{self.file}:{line}", fact, "Keep one of the two", key=key)
            self.lines[*path, key] = line
            result[key] = self.value(next(self.events), (*path, key))
        return result


def overridden(document: Document, override: str) -> Document:
    """Returns a document with one field set by a flag `--set`: `mesh.tp=4`, whose value is YAML. Refuses other text."""
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
    inner, depth_of_flag = data, len(keys)
    for depth, key in enumerate(keys[:-1], 1):
        if not isinstance(inner.get(key), dict):
            depth_of_flag = min(depth_of_flag, depth)  # everything below this key comes from the flag
            inner[key] = {}
        inner[key] = {**inner[key]}  # the document's own mappings stay as they are
        inner = inner[key]
    inner[keys[-1]] = value
    return dataclasses.replace(document, data=data, flags={**document.flags, tuple(keys[:depth_of_flag]): place})


def validated(model: type[ModelT], document: Document) -> ModelT:
    """Returns a document's data as a model. The error has every mistake once, each with its line."""
    try:
        return model.model_validate(document.data)
    except pydantic.ValidationError as error:
        mistakes = [_Mistake(document.data, each) for each in error.errors()]
        # Of mistakes that repeat one another the first is kept. So a misspelt key comes before the key that is missing
        # for it; and of a field's alternatives the one that matched furthest: the longest path, then the mistake of a
        # check of ours (`value_error`), which runs after pydantic's.
        mistakes.sort(key=lambda m: (m.kind == "missing", document.line(m.path), -len(m.path), m.kind != "value_error"))
        kept: list[_Mistake] = []
        for mistake in mistakes:
            if not any(mistake.repeats(earlier) for earlier in kept):
                kept.append(mistake)
        raise combined([_refusal(model, document, mistake.path, mistake.error) for mistake in kept]) from error


class _Mistake:
    """One of pydantic's errors, its location divided into keys of the data and names of a union's alternatives.

    `("cache", "magcache", "skips")` has the path `("cache", "skips")`, and `magcache` is an alternative of `cache`.
    """

    def __init__(self, data: Any, error: Any) -> None:
        self.error = error
        self.kind = str(error["type"])
        self.path: Location = ()
        self.alternatives: dict[Location, str] = {}  #: Their names, by the path of the value.
        location = error["loc"]
        for number, part in enumerate(location, 1):
            keys: Any = ()
            if isinstance(data, list):
                keys = range(len(data))
            elif isinstance(data, dict):
                keys = data
            if part in keys:
                data = data[part]
                self.path += (part,)
            elif self.kind == "missing" and number == len(location):
                self.path += (part,)
            else:
                self.alternatives[self.path] = f"{self.alternatives.get(self.path, '')} {part}"

    def repeats(self, earlier: _Mistake) -> bool:
        """Returns whether an earlier mistake is about the same value, or is the misspelt name of this missing key."""
        is_beside = self.path[:-1] == earlier.path[:-1] and (self.kind, earlier.kind) == ("missing", "extra_forbidden")
        if is_beside and closest(str(earlier.path[-1]), [str(self.path[-1])]):
            return True
        shared = self.alternatives.keys() & earlier.alternatives.keys()
        # Of a union's alternatives, only that of the earlier mistake was meant.
        if any(self.alternatives[path] != earlier.alternatives[path] for path in shared):
            return True
        shorter = min(len(self.path), len(earlier.path))
        return self.path[:shorter] == earlier.path[:shorter]


def _refusal(model: type[Frozen], document: Document, location: Location, error: Any) -> TorchportError:
    """Returns our error, with its place and remedy, for one of pydantic's errors."""
    place = document.place(location)
    name = ".".join(str(part) for part in location) or "the file"
    if error["type"] == "extra_forbidden":
        keys = _keys(model, location[:-1], document.data)
        return UnknownKeyError(place, f"Unknown key '{name}'", nearest(str(location[-1]), keys), key=name)
    if error["type"] == "missing":
        return MissingKeyError(place, f"'{name}' is missing", f"Add '{location[-1]}'", key=name)
    if error["type"] == "value_error":
        return WrongTypeError(place, f"'{name}' is {error['input']!r}", str(error["ctx"]["error"]), key=name)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found", "model_attributes_type"):
        return _kind_refusal(model, document, location, error["input"])
    expected = _WANTED.get(error["type"], "").format(**error.get("ctx", {}))
    expected = expected or str(error["msg"]).removeprefix("Input should be ").rstrip(".")
    return WrongTypeError(place, _fact(name, error["input"]), f"It must be {expected}", key=name)


def _fact(name: str, value: Any) -> str:
    """Returns what a value is, with its type: `'steps' is 'ten' (text)`."""
    kind, text = type(value).__name__, repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    return f"'{name}' is empty" if value is None else f"'{name}' is {text} ({_KINDS.get(kind, kind)})"


def _kind_refusal(model: type[Frozen], document: Document, location: Location, value: Any) -> TorchportError:
    """Returns the error for a value that fits no model of a union in which a key, such as `kind`, names the model."""
    name, place = ".".join(str(part) for part in location), document.place(location)
    literals = [_literals(candidate) for candidate in _models(model, location)]
    shared_keys = set(literals[0]).intersection(*literals)
    key = next(key for key in literals[0] if key in shared_keys)
    kinds = [str(values[key][0]) for values in literals]  # the `Literal` has a single value in each model
    all_kinds = f"Write a '{key}': {', '.join(kinds[:-1])} or {kinds[-1]}"
    if not isinstance(value, dict):
        example = "It must be a mapping of keys to values, such as"
        if value in kinds:  # `cache: magcache`
            return WrongTypeError(place, _fact(name, value), f"{example} {{{key}: {value}}}")
        return WrongTypeError(place, _fact(name, value), f"{example} {{{key}: {kinds[0]}}}. {all_kinds}")
    if key not in value:
        return MissingKeyError(place, f"'{name}.{key}' is missing", all_kinds, key=f"{name}.{key}")
    place = document.place((*location, key))
    if isinstance(value[key], str):
        fact = f"'{name}.{key}' is '{value[key]}'"
        return UnknownNameError(place, fact, nearest(value[key], kinds), name=value[key])
    return WrongTypeError(place, _fact(f"{name}.{key}", value[key]), all_kinds, key=f"{name}.{key}")


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "list_type": "a list",
    "too_short": "a list of {min_length} or more",
}
_KINDS = {
    "str": "text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "dict": "a mapping",
    "list": "a list",
}


def _keys(model: type[Frozen], location: Location, data: Any) -> list[str]:
    """Returns the keys that a model reads in the mapping at a location of the data; for a union, those of the
    alternatives that fit the mapping.
    """
    candidates = _models(model, location)
    for part in location:
        data = data[part]
    # An alternative fits if the data has no other value for one of its literals; a key that is absent fits.
    fitting = [c for c in candidates if all(data.get(key, kinds[0]) in kinds for key, kinds in _literals(c).items())]
    return sorted({field.alias or name for c in fitting or candidates for name, field in c.model_fields.items()})


def _literals(model: type[pydantic.BaseModel]) -> dict[str, tuple[Any, ...]]:
    """Returns the allowed values of each field that is a `Literal`, by key: `{"kind": ("magcache",)}`."""
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    return {name: get_args(kind) for name, kind in fields.items() if get_origin(kind) is Literal}


def _models(model: type[Frozen], location: Location) -> list[type[pydantic.BaseModel]]:
    """Returns the models that may lie at a location of a model; several where its annotation is a union."""
    annotation: Any = model
    for part in location:
        annotation = _annotation_of(part, annotation)
    members = _members(annotation)
    return [member for member in members if isinstance(member, type) and issubclass(member, pydantic.BaseModel)]


def _members(annotation: Any) -> list[Any]:
    """Returns the members of a union, also of a union inside `Annotated`; any other annotation is its only member."""
    if get_origin(annotation) is None or get_origin(annotation) in (dict, list, tuple):
        return [annotation]
    return [inner for arg in get_args(annotation) for inner in _members(arg)]


def _annotation_of(part: str | int, annotation: Any) -> Any:
    """Returns the annotation of a field, item or value inside an annotation; None if it has no such part."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, pydantic.BaseModel):
            for name, field in member.model_fields.items():
                if part in (name, field.alias):
                    return field.annotation
        elif get_origin(member) in (list, tuple):
            return get_args(member)[0]
        elif get_origin(member) is dict:
            return get_args(member)[1]
    return None
