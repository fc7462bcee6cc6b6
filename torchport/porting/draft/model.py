"""A model card before it is filled in, with its job and its family, from the source of the model's classes."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torchport.config import parse_document, validated
from torchport.config.card import Card, Job
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, TakenNameError, TargetError
from torchport.files import page
from torchport.files.folder import as_named
from torchport.patch.source import proposal
from torchport.porting.draft import name_of
from torchport.porting.draft.home import Home, Piece
from torchport.porting.draft.target_source import Target, find, folder_of, is_literal
from torchport.source import parsing
from torchport.source.bindings import STARRED, Function, parameters
from torchport.source.names import Classes, definition
from torchport.source.names import Home as SourceHome
from torchport.source.parsing import SourceFile

CARD, FAMILY = (Path(__file__).with_name(f"{name}.jinja") for name in ("card", "family"))
UNKNOWN_CHECKPOINT = "owner/repository@revision"
UNKNOWN_URL = "https://example.com/repository"
_IMAGE = re.compile(r"Conv2d|PatchEmbed|\b(images?|imgs?)\b", re.IGNORECASE)
_VIDEO = re.compile(r"Conv3d|frame|video|temporal", re.IGNORECASE)
_DEPTH, _HEADS, _HEAD_SIZE, _WIDTH, _MLP, _VOCABULARY, _GROUPS, _CHANNELS = 2, 4, 32, 64, 128, 1024, 8, 32
"""The largest numbers in a tiny network."""
_RULES: tuple[tuple[str, int], ...] = (
    (r"layers_per_block", 1),
    (r"hidden_channels", _WIDTH),
    (r"(?:.*_)?base_(?:dim|channels|width)", 16),
    (r"(?:.*_)?(?:heads?|heads_num|n_heads?)", _HEADS),
    (r"(?:.*_)?(?:head_dim|dim_head|head_size|d_kv)", _HEAD_SIZE),
    (r"(?:.*_)?(?:layers?|blocks?|depths?)|n_layers?", _DEPTH),
    (r".*(?:ffn|intermediate|mlp_dim|mlp_hidden|feedforward|d_ff).*", _MLP),
    (r"(?:.*_)?vocab(?:_size|ulary)?", _VOCABULARY),
    (r"(?:.*_)?groups", _GROUPS),
    (r"(?:.*_)?(?:dim|dims|hidden_size|d_model|n_embd|features)|width", _WIDTH),
)
_MODEL_WIDTH = re.compile(r"(?:hidden_size|dim|d_model|embed_dim|model_dim|inner_dim|width|n_embd)")


@dataclasses.dataclass(frozen=True)
class ModelDraftRequest:
    name: str
    entries: Sequence[str]  #: The classes, as `[component=]package.module:Class`; the first one is the network.
    checkpoint: str = UNKNOWN_CHECKPOINT

    @property
    def place(self) -> str:
        return f"torchport new model {self.name}"


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    target: Target
    tiny: dict[str, Any]  #: Small values.
    lacking: list[str]  #: Without a value.
    objects: list[str]  #: Not for YAML.


def parts(wish: ModelDraftRequest) -> list[Part]:
    """Returns the components that the flags name, or raises. Upstream must be on the search path; it is only read."""
    if not re.fullmatch(r"[A-Za-z_]\w*", wish.name, re.ASCII):
        fact = f"'{wish.name}' is no name for a folder of patches"
        raise BadValueError(wish.place, fact, "Write letters, digits and underscores")
    if wish.checkpoint != UNKNOWN_CHECKPOINT:
        from torchport.load import checkpoint  # with torch, which nothing else here needs

        checkpoint.check_name(wish.checkpoint)
    result: list[Part] = []
    for number, entry in enumerate(wish.entries):
        place = f"--entry {entry}"
        name, equals, path = entry.rpartition("=")
        if equals and not name:
            raise BadValueError(place, "No component stands before '='", "Write NAME=MODULE:CLASS")
        target = find(path, place)
        name = name or ("network" if number == 0 else name_of(target.path))
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name in {argument.name for argument in result}:
            raise BadValueError(place, f"'{name}' is no new name of a component", "Write NAME=MODULE:CLASS")
        result.append(_part(name, target, place))
        if number == 0 and isinstance(target.node, ast.ClassDef) and _derives_from_nothing(target.source, target.node):
            fact = f"{target.name} ({target.place}) is no torch.nn.Module, and the first class is the network"
            raise BadValueError(place, fact, "Name the network first, and this one after it as NAME=MODULE:CLASS")
    return result


def _part(name: str, target: Target, place: str) -> Part:
    """Returns one component with the arguments of its class; refuses a target that is no class."""
    if not isinstance(target.node, ast.ClassDef):
        fact = f"{target.name} ({target.place}) is a {target.kind}"
        raise TargetError(place, fact, "Name a class, and a function that builds it under 'build'", target=target.name)
    with parsing.nesting(target.source.shown, target.node.lineno):
        arguments = configuration(target.source, target.node) or []
    plain = [argument for argument in arguments if argument.plain]
    small, lacking = tiny_arguments(plain)
    objects = [argument.name for argument in arguments if argument.required and not argument.plain]
    return Part(name, target, small, lacking, objects)


def tiny_arguments(arguments: Sequence[Argument]) -> tuple[dict[str, Any], list[str]]:
    """Returns small values by argument, and the names of the required arguments that get none. The rules go by names,
    as diffusers, transformers and most repositories have them: depth, heads, widths, channels. What no rule names keeps
    the class's default. Nobody but the class can say whether the numbers fit each other.
    """
    numbers = {argument.name: argument.default for argument in arguments}
    values: dict[str, Any] = {}
    lacking = []
    for argument in arguments:
        value = _small_value(argument)
        if value is None and argument.required:
            lacking.append(argument.name)
        elif value is not None and (argument.required or (argument.default is not None and value != argument.default)):
            values[argument.name] = value
    values |= _consistent(values, numbers)
    return values, [name for name in lacking if name not in values]


def _small_value(argument: Argument) -> Any:
    """Returns a small value for an argument, by its name and its default; None if there is no rule for it."""
    name, default = argument.name, argument.default
    limit = next((limit for pattern, limit in _RULES if re.fullmatch(pattern, name)), None)
    if isinstance(default, bool | str):
        return None
    if default is None:  # of a list without a default nobody knows the length
        rest = re.sub(r"(?i)(list|tuple|sequence)(\[[^]]*\])?", "", argument.annotation)
        return limit if rest == argument.annotation or "int" in rest else None
    if isinstance(default, int):
        return None if limit is None else min(default, limit)
    is_ints = isinstance(default, list | tuple) and default and all(type(item) is int for item in default)
    if not is_ints:
        return None
    if "channels" in name:  # in the same proportion, and still a multiple of the usual number of groups
        unit = max(1, min(default) // _CHANNELS)
        return [item // unit // _CHANNELS * _CHANNELS or item for item in default]
    is_depth = limit == _DEPTH and "layers" in name  # of a few layers it may be their numbers
    return None if limit is None or is_depth else [min(item, limit) for item in default]


def _consistent(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values that other sizes determine: a width (heads times head size), the rotary dims of a head."""
    known = {**defaults, **values}
    heads = _first_number(known, r"(?:num_)?(?:attention_)?(?:heads?|heads_num|n_heads?)|num_attention_heads")
    size = _first_number(known, r"(?:attention_)?(?:head_dim|dim_head|head_size)")
    result: dict[str, Any] = {}
    if heads is not None and size is None:
        result |= {name: heads * _HEAD_SIZE for name in values if _MODEL_WIDTH.fullmatch(name)}
    for name, value in defaults.items():
        if is_rotary(name, value):
            result[name] = shares(value, size or _HEAD_SIZE)
    return result


def is_rotary(name: str, value: Any) -> bool:
    """Returns whether an argument splits the dims of an attention head between the axes of rotary embeddings."""
    several = isinstance(value, list | tuple) and len(value) > 1 and all(type(item) is int for item in value)
    return several and bool(re.search(r"rope|axes", name)) and "len" not in name and sum(value) > 0


def _first_number(values: Mapping[str, Any], pattern: str) -> int | None:
    found = (value for name, value in values.items() if re.fullmatch(pattern, name) and type(value) is int)
    return next(found, None)


def shares(parts: Sequence[int], total: int) -> list[int]:
    """Returns even numbers in about the proportion of `parts` that add up to `total`."""
    shares = [max(2, part * total // sum(parts) // 2 * 2) for part in parts]
    shares[-1] += total - sum(shares)
    return shares


def write(wish: ModelDraftRequest, home: Home, checkout: Path | None) -> list[str]:
    """Writes a card, its job and its family into a pack, all or nothing. Returns lines on files and what is left."""
    pack = find_pack(())
    if wish.name in pack.models():
        fact = f"There is a model '{wish.name}' already, in {as_named(pack.home(wish.name).root)}"
        raise TakenNameError(wish.place, fact, "Choose another name", name=wish.name)
    components = parts(wish)
    card_text, job_text = card(wish, components, checkout), job(components)
    # Our own text: a mistake in it would be ours, and is seen here.
    validated(Card, parse_document(card_text, f"configs/models/{wish.name}.yaml"))
    validated(Job, parse_document(job_text, f"configs/{wish.name}_demo.yaml"))
    texts = {f"configs/models/{wish.name}.yaml": card_text, f"configs/{wish.name}_demo.yaml": job_text}
    texts[f"patches/{_family_name(wish, components)}.py"] = family(wish, components)
    lines = home.write([Piece(file, text, mode="new") for file, text in texts.items()])
    return [*lines, *(f"fill in     {each}." for each in left(wish, components, card_text))]


def upstreams(wish: ModelDraftRequest, checkout: Path | None) -> list[Path]:
    folders = [folder_of(re.split(r"[=:]", entry)[-2]) for entry in wish.entries if ":" in entry]
    return [*([checkout] if checkout else []), *(folder for folder in folders if folder is not None)]


def _family_name(wish: ModelDraftRequest, components: Sequence[Part]) -> str:
    """Returns the family as a card names it, in the folder of upstream's package: its patches lie there, too."""
    package = components[0].target.module.partition(".")[0]
    return f"{package}/stages" if package == wish.name else f"{package}/{wish.name}_stages"


def left(wish: ModelDraftRequest, components: Sequence[Part], text: str) -> list[str]:
    """Returns a line for each thing that a person has to fill in after a draft of a card, whose YAML is `text`."""
    result = []
    for class_path in components:
        here = f"tiny.components.{class_path.name}"
        if class_path.objects:
            names = ", ".join(class_path.objects)
            result.append(f"build of {class_path.name}: its class takes {names}, which YAML cannot say (docs/cards.md)")
        if class_path.lacking:
            result.append(f"{here}: {', '.join(class_path.lacking)}, which have no default")
        if not class_path.tiny and not class_path.lacking and not class_path.objects:
            result.append(f"{here}: the source of {class_path.target.name} shows no argument that is large")
    if wish.checkpoint == UNKNOWN_CHECKPOINT:
        result.append("checkpoint: the published weights, and 'published' where their configuration is not the class's")
    result += ["checkout.url: where the repository is cloned from"] if UNKNOWN_URL in text else []
    result.append("frames and size_multiple_of: what the VAE divides time and space by")
    stages = f"patches/{_family_name(wish, components)}.py"
    return [*result, f"The stages in {stages}: encode, like, denoise, decode (docs/families.md)"]


def card(wish: ModelDraftRequest, components: Sequence[Part], checkout: Path | None) -> str:
    """Returns the text of a model card to fill in."""
    target = components[0].target
    package = target.module.partition(".")[0]
    values: dict[str, Any] = {"upstream": proposal.fits(package)}
    if checkout is not None:
        has = Path(target.source.file).resolve().relative_to(checkout).as_posix()
        values = {"upstream": {}, "checkout": {"package": package, "has": has, "url": _url(checkout)}}
    values |= {"name": wish.name, "title": f"{target.path[-1]}, from {package}", "checkpoint": wish.checkpoint}
    values |= {"family": _family_name(wish, components), "of_images": _is_of_images(target), "flow": flow}
    return page.rendered(CARD, components=components, **values)


def _is_of_images(target: Target) -> bool:
    """Returns whether a network makes images: its file speaks of images or of 2D layers, and of no video."""
    text = target.source.text
    return bool(_IMAGE.search(text)) and not _VIDEO.search(text)


def job(components: Sequence[Part]) -> str:
    frames = 1 if _is_of_images(components[0].target) else 5
    return (
        f"{{height: 64, width: 64, frames: {frames}, fps: 8, steps: 2, guidance_scale: 1.0,\n"
        ' machine: "cpu:1", strategy: replicated, checkpoint: tiny}\n'
    )


def flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _url(checkout: Path) -> str:
    """Returns where a checkout was cloned from, as its git folder says; else a text to fill in."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string((checkout / ".git" / "config").read_text(encoding="utf-8"))
    except (OSError, ValueError, configparser.Error):
        return UNKNOWN_URL
    url = parser.get('remote "origin"', "url", fallback=UNKNOWN_URL)
    # A name and password in a URL are nobody else's.
    return re.sub(r"//[^/@]*@", "//", url) if url.startswith(("https://", "http://")) else UNKNOWN_URL


def family(wish: ModelDraftRequest, components: Sequence[Part]) -> str:
    target = components[0].target
    assert isinstance(target.node, ast.ClassDef)
    inputs = [argument.name for argument in forward(target.source, target.node)]
    others = [argument.name for argument in components[1:]]
    return page.rendered(FAMILY, name=wish.name, network=components[0].name, inputs=inputs[:8], others=others)


DEEPEST = 8
"""Bases that are followed, one above the other."""
_PLAIN = {"int", "float", "bool", "str", "list", "tuple", "dict", "List", "Tuple", "Dict", "Optional", "Union"}
_PLAIN |= {"Literal", "Sequence", "Any", "None", "typing"}


@dataclasses.dataclass(frozen=True)
class Argument:
    name: str
    default: Any
    required: bool
    annotation: str
    plain: bool  #: Whether YAML can say it, as far as its annotation tells.


def arguments(source: SourceFile, node: ast.ClassDef) -> list[Argument] | None:
    """Returns the arguments of a class's constructor; None where its source, and that of its bases, shows none."""
    for _, base in _lineage(source, node):
        init = _method_of(base, "__init__")
        if init is not None:
            return list(_args_of(init))
        fields = [each for each in base.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
        is_strict = any(word in ast.unparse(each) for each in base.decorator_list for word in ("dataclass", "strict"))
        if fields and is_strict:
            return [_argument(str(ast.unparse(each.target)), each.annotation, each.value) for each in fields]
    return None


def configuration(source: SourceFile, node: ast.ClassDef) -> list[Argument] | None:
    """Returns the arguments that a card gives to a class. If a class of transformers takes one object of configuration
    (`config.json`), they are the arguments of that object's class.
    """
    given = arguments(source, node)
    required = [argument for argument in given or () if argument.required]
    if source.module.partition(".")[0] != "transformers" or len(required) != 1:
        return given
    annotated = _classes(Classes(None).names(source.module, tuple(required[0].annotation.split("."))))
    return next((arguments(*place) for place in annotated), given)


def _method_of(node: ast.ClassDef, name: str) -> Function | None:
    return next((part for part in node.body if isinstance(part, Function) and part.name == name), None)


def _args_of(init: Function) -> Iterator[Argument]:
    for parameter in parameters(init)[1:]:
        if parameter.kind not in STARRED:
            yield _argument(parameter.name, parameter.argument.annotation, parameter.default)


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None) -> Argument:
    """Returns what the source says about an argument: its default if it is a literal, and its annotation."""
    value = ast.literal_eval(default) if default is not None and is_literal(default) else None
    nodes = ast.walk(annotation) if annotation is not None else ()
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    written = ast.unparse(annotation) if annotation is not None else ""
    return Argument(name, value, default is None, written, words <= _PLAIN)


Place = tuple[SourceFile, ast.ClassDef]
"""A class, with its module."""


def _lineage(source: SourceFile, node: ast.ClassDef) -> Iterator[Place]:
    """Yields a class and the classes above it, as far as their source is there."""
    pending: list[Place] = [(source, node)]
    for _ in range(DEEPEST):
        if not pending:
            return
        home, base = pending.pop(0)
        yield home, base
        pending += _classes(Classes(None).bases(home.module, base))


def _classes(homes: Iterable[SourceHome]) -> Iterator[Place]:
    for place in map(definition, homes):
        if place is not None and isinstance(place[1], ast.ClassDef):
            yield place[0], place[1]


def _derives_from_nothing(source: SourceFile, node: ast.ClassDef) -> bool:
    """Returns whether the source shows all bases of a class, and none of them is torch's."""
    return all(
        home.module.partition(".")[0] != "torch"
        and len(list(_classes(Classes(None).bases(home.module, base))))
        >= sum(ast.unparse(parent) != "object" for parent in base.bases)
        for home, base in _lineage(source, node)
    )


def forward(source: SourceFile, node: ast.ClassDef) -> list[Argument]:
    """Returns the arguments of a class's `forward`; none where its source does not show it."""
    found = (_method_of(base, "forward") for _, base in _lineage(source, node))
    return next((list(_args_of(method)) for method in found if method is not None), [])
