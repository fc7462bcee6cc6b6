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
from torchport.porting.draft.target_source import Target, find, folders_of, is_literal
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
_DEPTH = 2
_HEAD_SIZE = 32
_CHANNELS = 32
"""`_DEPTH` and the constants below it: the largest numbers in a tiny network."""
_LARGEST: tuple[tuple[str, int], ...] = (
    (r"layers_per_block", 1),
    (r"hidden_channels", 64),
    (r"(?:.*_)?base_(?:dim|channels|width)", 16),
    (r"(?:.*_)?(?:heads?|heads_num|n_heads?)", 4),
    (r"(?:.*_)?(?:head_dim|dim_head|head_size|d_kv)", _HEAD_SIZE),
    (r"(?:.*_)?(?:layers?|blocks?|depths?)|n_layers?", _DEPTH),
    (r".*(?:ffn|intermediate|mlp_dim|mlp_hidden|feedforward|d_ff).*", 128),
    (r"(?:.*_)?vocab(?:_size|ulary)?", 1024),
    (r"(?:.*_)?groups", 8),
    (r"(?:.*_)?(?:dim|dims|hidden_size|d_model|n_embd|features)|width", 64),
)
"""The largest value in a tiny network of arguments with these names; the first pattern that fits counts."""
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
    """A component of the model, with the arguments of its class."""

    name: str
    target: Target
    tiny: dict[str, Any]  #: Small values, by argument.
    lacking: list[str]  #: Required arguments without a value.
    objects: list[str]  #: Required arguments that YAML cannot say.


def parts(request: ModelDraftRequest) -> list[Part]:
    """Returns the components that the flags name; refuses a name or class that cannot be a component. Upstream must be
    on the search path, and only its source is read.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", request.name, re.ASCII):
        fact = f"'{request.name}' is no name for a folder of patches"
        raise BadValueError(request.place, fact, "Write letters, digits and underscores")
    if request.checkpoint != UNKNOWN_CHECKPOINT:
        from torchport.load import checkpoint  # with torch, which nothing else here needs

        checkpoint.check_name(request.checkpoint)
    result: list[Part] = []
    for number, entry in enumerate(request.entries):
        place = f"--entry {entry}"
        name, equals, path = entry.rpartition("=")
        if equals and not name:
            raise BadValueError(place, "No component stands before '='", "Write NAME=MODULE:CLASS")
        target = find(path, place)
        name = name or ("network" if number == 0 else name_of(target.path))
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name in {part.name for part in result}:
            raise BadValueError(place, f"'{name}' is no new name of a component", "Write NAME=MODULE:CLASS")
        if not isinstance(target.node, ast.ClassDef):
            fact = f"{target.name} ({target.place}) is a {target.kind}"
            remedy = "Name a class, and a function that builds it under 'build'"
            raise TargetError(place, fact, remedy, target=target.name)
        with parsing.nesting(target.source.shown, target.node.lineno):
            given = card_arguments(target.source, target.node) or []
        small, lacking = tiny_arguments([argument for argument in given if argument.plain])
        objects = [argument.name for argument in given if argument.required and not argument.plain]
        result.append(Part(name, target, small, lacking, objects))
        if number == 0 and _is_no_module(target.source, target.node):
            fact = f"{target.name} ({target.place}) is no torch.nn.Module, and the first class is the network"
            raise BadValueError(place, fact, "Name the network first, and this one after it as NAME=MODULE:CLASS")
    return result


def tiny_arguments(arguments: Sequence[Argument]) -> tuple[dict[str, Any], list[str]]:
    """Returns small values by argument, `{"num_layers": 2}`, and the names of required arguments that get no value. The
    values are chosen by the arguments' names: depth, heads, widths, channels. Other arguments keep the class's default.
    Whether the numbers fit each other is not known before the class is built.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        value = _small_value(argument)
        is_smaller = argument.default is not None and value != argument.default
        if value is not None and (argument.required or is_smaller):
            values[argument.name] = value
    values |= _dependent_sizes(values, {argument.name: argument.default for argument in arguments})
    return values, [argument.name for argument in arguments if argument.required and argument.name not in values]


def _small_value(argument: Argument) -> Any:
    """Returns a small value for an argument, by its name and its default: 2 for `num_layers`; None without a rule."""
    name = argument.name
    default = argument.default
    limit = next((limit for pattern, limit in _LARGEST if re.fullmatch(pattern, name)), None)
    if isinstance(default, bool | str):
        return None
    if default is None:  # a list gets no value, as its length is not known; `int | list[int]` gets a number
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
    is_depth = limit == _DEPTH and "layers" in name  # the list may hold numbers of layers, as `skip_layers` does
    return None if limit is None or is_depth else [min(item, limit) for item in default]


def _dependent_sizes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values that other sizes determine: a width (heads times head size), the dims of each rotary axis."""
    numbers = {name: value for name, value in {**defaults, **values}.items() if type(value) is int}
    head_counts = r"(?:num_)?(?:attention_)?(?:heads?|heads_num|n_heads?)|num_attention_heads"
    head_sizes = r"(?:attention_)?(?:head_dim|dim_head|head_size)"
    heads = next((numbers[name] for name in numbers if re.fullmatch(head_counts, name)), None)
    size = next((numbers[name] for name in numbers if re.fullmatch(head_sizes, name)), None)
    result: dict[str, Any] = {}
    if heads is not None and size is None:
        result |= {name: heads * _HEAD_SIZE for name in values if _MODEL_WIDTH.fullmatch(name)}
    rotary = {name: value for name, value in defaults.items() if is_rotary(name, value)}
    return result | {name: shares(value, size or _HEAD_SIZE) for name, value in rotary.items()}


def is_rotary(name: str, value: Any) -> bool:
    """Returns whether an argument splits the dims of an attention head between the axes of rotary embeddings."""
    several = isinstance(value, list | tuple) and len(value) > 1 and all(type(item) is int for item in value)
    return several and bool(re.search(r"rope|axes", name)) and "len" not in name and sum(value) > 0


def shares(parts: Sequence[int], total: int) -> list[int]:
    """Returns even numbers of the sum `total`, about in proportion to `parts`: [8, 8, 8] for [1, 1, 1] and 24."""
    numbers = [max(2, part * total // sum(parts) // 2 * 2) for part in parts]
    numbers[-1] += total - sum(numbers)
    return numbers


def write(request: ModelDraftRequest, home: Home, checkout: Path | None) -> list[str]:
    """Writes a card, its job and its family into a pack, all or nothing. Returns the lines to print."""
    pack = find_pack(())
    if request.name in pack.models():
        fact = f"There is a model '{request.name}' already, in {as_named(pack.home(request.name).root)}"
        raise TakenNameError(request.place, fact, "Choose another name", name=request.name)
    components = parts(request)
    network = components[0].target
    package = network.source.module.partition(".")[0]
    # In the folder of upstream's package: its patches lie there, too.
    family = f"{package}/stages" if package == request.name else f"{package}/{request.name}_stages"
    # A file that speaks of images or of 2D layers, and of no video, is of a network that makes images.
    text = network.source.text
    of_images = bool(_IMAGE.search(text)) and not _VIDEO.search(text)
    card_text = _card_text(request, components, checkout, family, of_images)
    job_text = (
        f"{{height: 64, width: 64, frames: {1 if of_images else 5}, fps: 8, steps: 2, guidance_scale: 1.0,\n"
        ' machine: "cpu:1", strategy: replicated, checkpoint: tiny}\n'
    )
    # Our own text: a mistake in it would be ours, and is seen here.
    validated(Card, parse_document(card_text, f"configs/models/{request.name}.yaml"))
    validated(Job, parse_document(job_text, f"configs/{request.name}_demo.yaml"))
    texts = {f"configs/models/{request.name}.yaml": card_text, f"configs/{request.name}_demo.yaml": job_text}
    texts[f"patches/{family}.py"] = _family_text(request, components)
    lines = home.write([Piece(file, text, mode="new") for file, text in texts.items()])
    left = _left_to_fill_in(request, components, card_text)
    left.append(f"The stages in patches/{family}.py: encode, like, denoise, decode (docs/families.md)")
    return [*lines, *(f"fill in     {item}." for item in left)]


def upstreams(request: ModelDraftRequest, checkout: Path | None) -> list[Path]:
    """Returns the folders of upstream's source, where no draft may be written."""
    modules = [re.split(r"[=:]", entry)[-2] for entry in request.entries if ":" in entry]
    return [*([checkout] if checkout else []), *folders_of(modules)]


def _left_to_fill_in(request: ModelDraftRequest, components: Sequence[Part], card_text: str) -> list[str]:
    result = []
    for part in components:
        field = f"tiny.components.{part.name}"
        if part.objects:
            names = ", ".join(part.objects)
            result.append(f"build of {part.name}: its class takes {names}, which YAML cannot say (docs/cards.md)")
        if part.lacking:
            result.append(f"{field}: {', '.join(part.lacking)}, which have no default")
        if not part.tiny and not part.lacking and not part.objects:
            result.append(f"{field}: the source of {part.target.name} shows no argument that is large")
    if request.checkpoint == UNKNOWN_CHECKPOINT:
        result.append("checkpoint: the published weights, and 'published' where their configuration is not the class's")
    if UNKNOWN_URL in card_text:
        result.append("checkout.url: where the repository is cloned from")
    return [*result, "frames and size_multiple_of: what the VAE divides time and space by"]


def _card_text(
    request: ModelDraftRequest, components: Sequence[Part], checkout: Path | None, family: str, of_images: bool
) -> str:
    target = components[0].target
    package = target.source.module.partition(".")[0]
    values: dict[str, Any] = {"upstream": proposal.fits(package)}
    if checkout is not None:
        has = Path(target.source.file).resolve().relative_to(checkout).as_posix()
        values = {"upstream": {}, "checkout": {"package": package, "has": has, "url": _clone_url(checkout)}}
    values |= {"name": request.name, "title": f"{target.path[-1]}, from {package}", "checkpoint": request.checkpoint}
    values |= {"family": family, "of_images": of_images, "flow": flow}
    return page.rendered(CARD, components=components, **values)


def flow(value: Any) -> str:
    """Returns a value as YAML in one line, such as `{heads: 4, rope: [8, 12, 12]}`."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _clone_url(checkout: Path) -> str:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string((checkout / ".git" / "config").read_text(encoding="utf-8"))
    except (OSError, ValueError, configparser.Error):
        return UNKNOWN_URL
    url = parser.get('remote "origin"', "url", fallback=UNKNOWN_URL)
    # A name and password in the URL are left out.
    return re.sub(r"//[^/@]*@", "//", url) if url.startswith(("https://", "http://")) else UNKNOWN_URL


def _family_text(request: ModelDraftRequest, components: Sequence[Part]) -> str:
    """Returns the text of a family to fill in, with the inputs of the network's `forward`."""
    target = components[0].target
    assert isinstance(target.node, ast.ClassDef)
    forwards = (_method_of(base, "forward") for _, base in _lineage(target.source, target.node))
    forward = next((method for method in forwards if method is not None), None)
    inputs = [argument.name for argument in _arguments_of(forward)] if forward is not None else []
    others = [part.name for part in components[1:]]
    return page.rendered(FAMILY, name=request.name, network=components[0].name, inputs=inputs[:8], others=others)


DEEPEST = 8
"""How many classes are looked at: the class, and those above it."""
_PLAIN = {"int", "float", "bool", "str", "list", "tuple", "dict", "List", "Tuple", "Dict", "Optional", "Union"}
_PLAIN |= {"Literal", "Sequence", "Any", "None", "typing"}


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a class's constructor."""

    name: str
    default: Any = None  #: None also without a default, and for a default that is no literal.
    required: bool = False
    annotation: str = ""
    plain: bool = True  #: Whether YAML can say it, as far as its annotation tells.


def arguments(source: SourceFile, node: ast.ClassDef) -> list[Argument] | None:
    """Returns the arguments of a class's constructor; None where its source, and that of its bases, shows none."""
    for _, base in _lineage(source, node):
        init = _method_of(base, "__init__")
        if init is not None:
            return list(_arguments_of(init))
        assigned = [statement for statement in base.body if isinstance(statement, ast.AnnAssign)]
        fields = [statement for statement in assigned if isinstance(statement.target, ast.Name)]
        decorators = " ".join(map(ast.unparse, base.decorator_list))
        if fields and ("dataclass" in decorators or "strict" in decorators):  # `@strict` of huggingface_hub
            return [_argument(ast.unparse(field.target), field.annotation, field.value) for field in fields]
    return None


def card_arguments(source: SourceFile, node: ast.ClassDef) -> list[Argument] | None:
    """Returns the arguments that a card gives for a class; None if no source shows the arguments of its constructor.

    A class of transformers takes its configuration alone, as in `LlamaModel(config: LlamaConfig)`. For such a class a
    card gives the arguments of `LlamaConfig`.
    """
    of_constructor = arguments(source, node)
    required = [argument for argument in of_constructor or () if argument.required]
    if source.module.partition(".")[0] != "transformers" or len(required) != 1:
        return of_constructor
    names = tuple(required[0].annotation.split("."))
    configuration = next(_classes(Classes(package=None).names(source.module, names)), None)
    return of_constructor if configuration is None else arguments(*configuration)


def _method_of(node: ast.ClassDef, name: str) -> Function | None:
    return next((part for part in node.body if isinstance(part, Function) and part.name == name), None)


def _arguments_of(method: Function) -> Iterator[Argument]:
    """Yields the arguments of a method, without `self`, `*args` and `**kwargs`."""
    for parameter in parameters(method)[1:]:
        if parameter.kind not in STARRED:
            yield _argument(parameter.name, parameter.argument.annotation, parameter.default)


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None) -> Argument:
    """Returns an argument from its source: its default, or None if this is no literal, and its annotation as text."""
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
        pending += _classes(Classes(package=None).bases(home.module, base))  # None: in any package


def _classes(homes: Iterable[SourceHome]) -> Iterator[Place]:
    for place in map(definition, homes):
        if place is not None and isinstance(place[1], ast.ClassDef):
            yield place[0], place[1]


def _is_no_module(source: SourceFile, node: ast.ClassDef) -> bool:
    """Returns whether a class is no `torch.nn.Module` for certain: the source shows all bases, and none is torch's."""
    for home, base in _lineage(source, node):
        bases = [parent for parent in base.bases if ast.unparse(parent) != "object"]
        shown = list(_classes(Classes(package=None).bases(home.module, base)))
        if home.module.partition(".")[0] == "torch" or len(shown) < len(bases):
            return False
    return True
