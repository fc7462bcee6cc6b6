"""What a model is, and how to run it: model cards and jobs.

It has over 400 lines because the meaning of every field stands beside it: the reference is made of these lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from torchport.config.document import Document, Frozen
from torchport.errors import BadValueError, MissingKeyError, UnknownKeyError, UnknownNameError, nearest

StageName = Literal["encode", "denoise", "decode"]
STAGES: tuple[StageName, ...] = ("encode", "denoise", "decode")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtype names as torch and JAX have them, with their size in bytes."""

DType = Literal["float32", "bfloat16", "float16"]
Axis = Literal["dp", "sp", "tp"]
Implementation = Literal["plain", "splash", "splash_transposed", "cudnn", "xla"]
"""Of attention."""


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"It must be a regular expression: {error}") from error
    return text


def _importable(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        raise ValueError("It must be 'package.module:Class'")
    return text


Regex = Annotated[str, pydantic.AfterValidator(_regex)]
ClassPath = Annotated[str, pydantic.AfterValidator(_importable)]
Word = Annotated[str, pydantic.Field(min_length=1)]


def _beside_patches(text: str) -> str:
    if not re.fullmatch(r"\w+/\w+", text):
        raise ValueError(
            "It must be 'folder/file', a Python file in patches/ without its ending; "
            "before, it was a module of torchport"
        )
    return text


FamilyPath = Annotated[str, pydantic.AfterValidator(_beside_patches)]


def _beside_family(text: str) -> str:
    if not re.fullmatch(r"\w+\.py:[A-Za-z_]\w*", text):
        raise ValueError("It must be 'file.py:function', a Python file in the folder of the card's family")
    return text


def _inside_checkpoint(text: str) -> str:
    if text.startswith("/") or ".." in text.split("/") or text.endswith("/"):
        raise ValueError("It must be the path of a file inside the checkpoint")
    return text


BuilderPath = Annotated[str, pydantic.AfterValidator(_beside_family)]
FilePath = Annotated[Word, pydantic.AfterValidator(_inside_checkpoint)]


def _once_each(split: list[Split]) -> list[Split]:
    axes_of_dims = [axis for axes in dims_of(split) for axis in axes]
    if len(axes_of_dims) != len(set(axes_of_dims)):
        raise ValueError("It must name each axis once at most: an axis splits one dim; fallbacks go under 'otherwise'")
    return split


Split = Axis | Annotated[list[Axis], pydantic.Field(min_length=1)] | None
"""What splits a dim: one axis, several (the first one outermost), or none."""
Spec = Literal["replicate"] | Annotated[list[Split], pydantic.AfterValidator(_once_each)]


def dims_of(spec: Spec | None) -> list[tuple[Axis, ...]]:
    """Returns the axes that split each dim, from the first on; none of `replicate`, and none of null."""
    dims = [] if spec is None or spec == "replicate" else spec
    return [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in dims]


class Rule(Frozen):
    """One sharding rule: the tensors whose whole name matches, and the mesh axes of their dims."""

    match: Regex
    spec: Spec
    otherwise: list[Spec] = []
    """Specs to try in this order where an axis does not divide its dim; without them that is an error."""


class WeightRule(Rule):
    """A rule for weights."""

    gather: bool = False
    """Whether they are gathered where they are used, those of stacked blocks one block at a time: FSDP."""

    @pydantic.model_validator(mode="after")
    def _splits(self) -> WeightRule:
        if self.gather and not any(dims_of(self.spec)):
            raise ValueError("'gather' needs a spec that splits: what is whole everywhere cannot be gathered")
        return self


class ActivationRule(Frozen):
    """One rule for what modules return: those whose whole name matches, and the mesh axes of their outputs' dims."""

    match: Regex
    outputs: list[Spec | None]
    """One for each output tensor, in order; null leaves one to the compiler."""
    uneven: bool = False
    """Whether the compiler may pad a dim that its axes do not divide; otherwise that is an error."""


class Strategy(Frozen):
    """A named set of rules, by component: for its weights, the inputs of its forward, and what its modules return."""

    mesh: dict[Axis, pydantic.PositiveInt]
    """The mesh that it is made for. It is used if a config has no mesh, or if a flag changes only the strategy."""
    weights: dict[str, list[WeightRule]]
    inputs: dict[str, list[Rule]]
    activations: dict[str, list[ActivationRule]] = {}
    divides: dict[Axis, str] = {}
    """For an axis, the `component.key` of the checkpoint's configuration whose value it must divide."""


class RenameRule(Frozen):
    """One rule for names of tensors: those in the file whose whole name matches, and what the module calls them."""

    match: Regex
    """A regular expression for a whole name in the file. What varies stands in groups: `model\\.(.*)`."""
    to: str
    """The module's name for the tensor, with the groups of `match` as `\\1`, `\\2` and so on: `\\1`."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> RenameRule:
        groups = re.compile(self.match).groups
        for escape in re.findall(r"\\(\d+|.?)", self.to):
            if not escape.isdigit() or not 1 <= int(escape) <= groups:
                known = ", ".join(f"\\{n}" for n in range(1, groups + 1)) or "none: 'match' has no group"
                raise ValueError(f"'to' has \\{escape}; the groups of 'match' are {known}")
        return self


class Component(Frozen):
    """One component of a model: its class, and where its files lie in the checkpoint.

    A class of diffusers or transformers reads its configuration from `config.json` in its folder. Any other
    `torch.nn.Module`, and whatever has a `file` or a `build`, takes keyword arguments instead: those of `published`, or
    for the tiny checkpoint those of `tiny.components`. The family then reads them, with the defaults of those that are
    left out, as the module's `config`.
    """

    class_: ClassPath = pydantic.Field(alias="class")
    """The class, as `package.module:Class`."""
    build: BuilderPath | None = None
    """What builds the module where arguments in YAML do not suffice: `file.py:function`, in the folder of the card's
    family. It takes the arguments as keywords, and returns a module of `class`. No file is to be read in it."""
    folder: str | None = None
    """Where it lies in the checkpoint, with `{variant}` filled in; by default its name. `.` is the checkpoint's root,
    which components may share: each of them should name its `file` then."""
    file: FilePath | None = None
    """The file of its tensors, from its folder, with `{variant}` filled in: `*.safetensors`, the `*.index.json` of
    several, or else a file of `torch.save`. By default whatever safetensors its folder holds. Two components may share
    a file. Of a class of transformers, which has no `build`, the tensors are checked here and loaded by upstream."""
    key: Word | None = None
    """Where the state dict is inside a file of `torch.save` that holds more: its key, or `a.b` for a key inside `a`. By
    default the file is the state dict, or has it as `state_dict`."""
    rename: list[RenameRule] = []
    """Rules for tensors that the module calls otherwise than the file. The first rule that matches a whole name counts;
    a name that no rule matches stays. A rule that is no tensor's first match is refused, as are two tensors that get
    one name."""
    dtype: DType | None = None
    """Of its weights; none if torchport loads no weights for it. A config may choose another one under `dtypes`."""
    precision: Literal["default", "high", "highest"] = "default"
    """Of float32 products on a TPU, whose own default rounds their inputs to bfloat16."""
    published: dict[str, Any] = {}
    """The published configuration, if the class's defaults differ; it gives the shapes before any download. For a
    module that has no `config.json`, the keyword arguments that build it."""
    unread: list[Regex] = []
    """Tensors of the published checkpoint that the class does not use, by whole name, as the file calls them; any other
    one is refused."""
    parameters: pydantic.PositiveInt | None = None
    """How many the published checkpoint has, so that the memory is known before any download."""

    @pydantic.model_validator(mode="after")
    def _computes(self) -> Component:
        # A bfloat16 component may have it too: a config can make it float32.
        if self.precision != "default" and self.dtype is None:
            raise ValueError("'precision' is of products, and without a 'dtype' this computes none here")
        if self.build is not None and self.dtype is None:
            raise ValueError("'build' makes a module that is loaded here, and it needs a 'dtype'")
        if self.key is not None and (self.file is None or self.file.endswith((".safetensors", ".json"))):
            raise ValueError("'key' is one inside a file of torch.save, and there is no such 'file'")
        return self


class Stack(Frozen):
    """Repeated blocks that run as one under a scan."""

    carries: list[str]
    """The parameters of a block's `forward` that its outputs become for the next block, in order."""
    last: pydantic.NonNegativeInt = 0
    """How many of the last blocks are not stacked."""


class ScoreBound(Frozen):
    """Attention whose queries and keys leave a norm: the gains of those norms bound its scores."""

    component: str
    queries: Annotated[list[Regex], pydantic.Field(min_length=1)]
    """The gains of every norm that queries leave, by whole name; those of one block have the same number in it."""
    keys: Annotated[list[Regex], pydantic.Field(min_length=1)]


class Checkout(Frozen):
    """An upstream that is no installed package, but a repository that the user has cloned."""

    package: str
    has: str
    """A file that only this upstream has, from the repository's root."""
    others: dict[str, str] = {}
    """Files of other upstreams that have a package of the same name, and what each of these upstreams is."""
    url: str


class FrameRule(Frozen):
    """The number of frames must be `multiple_of` * n + `plus`."""

    multiple_of: pydantic.PositiveInt
    plus: pydantic.NonNegativeInt


class TinyTokenizer(Frozen):
    """A tokenizer trained in a second on a few sentences, for a card's tiny checkpoint."""

    corpus: list[str]
    vocab_size: pydantic.PositiveInt
    special_tokens: list[str]
    eos_token: str
    pad_token: str
    chat_template: str
    """Jinja; `{filler}` in it becomes as many filler tokens as `prefix_tokens` wants."""
    prefix_tokens: pydantic.PositiveInt | None = None
    """Tokens that precede the user's text once the template is applied; only where upstream crops a fixed number."""
    system_message_of: str | None = None
    """The upstream function, `module:Class.function`, whose default argument `system_message` is in the prefix."""


class Tiny(Frozen):
    """The tiny, seeded checkpoint of a card: the real classes with small configurations."""

    seed: int
    scale: pydantic.PositiveFloat
    """Standard deviation times sqrt(fan-in) of every weight of two dims or more."""
    components: dict[str, dict[str, Any]]
    """By component: its small configuration, or the keyword arguments that build it."""
    tokenizers: dict[str, TinyTokenizer] = {}


class Card(Frozen):
    """A model card, `configs/models/<name>.yaml`: what a model is, as data."""

    model: str
    title: str
    family: FamilyPath
    """Its stages: a Python file in `patches/`, named as patches are: `diffusers/some_stages`."""
    artefacts: str
    """Stage files of cards with one value here interchange, as far as shapes allow."""
    pipeline: ClassPath | None = None
    """The diffusers pipeline that reads the checkpoint; none for a layout of upstream's own, where components may name
    a `file` or a `build`."""
    upstream: dict[str, str]
    checkout: Checkout | None = None
    checkpoint: Word
    demo: str = "configs/demo.yaml"
    """The config that runs the tiny checkpoint on a machine without an accelerator."""
    variant: Word | None = None
    """Which of several networks in the checkpoint, where a config names none."""
    patches: dict[StageName, list[str]]
    original: list[str] = []
    """Patches that the original needs too, beside all plumbing: without them it cannot run here."""
    components: dict[str, Component]
    stacks: dict[str, dict[str, Stack]] = {}
    """By component, and by the name of the list of blocks in it."""
    score_bounds: dict[str, ScoreBound] = {}
    """By the name under which a patch's attention refers to it."""
    frames: FrameRule
    size_multiple_of: pydantic.PositiveInt
    strategies: dict[str, Strategy]
    tiny: Tiny

    def folder(self, component: str, variant: str | None) -> str:
        """Returns where a component lies in a checkpoint, relative to its root."""
        return (self.components[component].folder or component).format(variant=variant)

    def file(self, component: str, variant: str | None) -> str | None:
        """Returns a component's one file of tensors, relative to its folder; None if it has whatever lies there."""
        file = self.components[component].file
        return None if file is None else file.format(variant=variant)

    def code(self, family: Path) -> list[Path]:
        """Returns the Python files that the card names: that of its family, and those beside it with builders."""
        names = {component.build.partition(":")[0] for component in self.components.values() if component.build}
        return [family, *(family.with_name(name) for name in sorted(names))]


class Job(Frozen):
    """A config, `configs/<job>.yaml`: what to make of a model, and on which machine."""

    # Limits for any machine: sizes of x264; twelve hours; rates of displays; noise levels in training; 16 bits.
    height: Annotated[int, pydantic.Field(gt=0, le=16_384)]
    width: Annotated[int, pydantic.Field(gt=0, le=16_384)]
    frames: Annotated[int, pydantic.Field(gt=0, le=2**20)]
    fps: Annotated[int, pydantic.Field(gt=0, le=240)]
    steps: Annotated[int, pydantic.Field(gt=0, le=1_000)]
    guidance_scale: Annotated[float, pydantic.Field(ge=1.0, le=1_000.0, allow_inf_nan=False)]
    machine: str
    mesh: dict[Axis, pydantic.PositiveInt] = {}
    """By default the strategy's."""
    strategy: str
    checkpoint: Word | None = None
    variant: Word | None = None
    """Which of several networks in the checkpoint; by default the card's."""
    dtypes: dict[str, DType] = {}
    attention: Implementation | None = None
    """The implementation of attention in compiled programs; by default the platform's own."""
    stacked: bool = True
    """Whether the blocks that the card's `stacks` name are compiled as one."""
    text_bucket: Annotated[int, pydantic.Field(gt=0, le=2**20)] | None = None
    """Text is cut to the longest prompt's tokens, rounded up to a multiple of this; by default it is not cut."""
    vae_tiling: bool | None = None
    """Whether the VAE decodes in overlapping tiles; by default, as upstream does."""
    save_every: pydantic.PositiveInt = 5
    """Denoising steps between two savings of the unfinished latents."""

    @property
    def devices(self) -> int:
        """The number of JAX devices that the mesh takes."""
        return math.prod(self.mesh.values())


def check_job(job: Job, card: Card, document: Document) -> None:
    """Refuses a job that this model cannot do, before anything is loaded.

    Raises:
        BadValueError: Frames or sizes that the VAE cannot divide, or a dtype for what has no weights.
        UnknownNameError: A strategy that the card has not.
        UnknownKeyError: A dtype for a component that the card has not.
    """
    step, plus = card.frames.multiple_of, card.frames.plus
    if job.frames % step != plus % step or job.frames < plus:
        first = plus or step  # zero frames are no video
        below = max(first, (job.frames - plus) // step * step + plus)
        raise BadValueError(
            document.place(["frames"]),
            f"'frames' is {job.frames}",
            f"It must be {step}n+{plus}: the nearest are {below} and {below + step}",
            nearest=(below, below + step),
        )
    for key in ("height", "width"):
        value, unit = getattr(job, key), card.size_multiple_of
        if value % unit:
            below = max(unit, value // unit * unit)
            raise BadValueError(
                document.place([key]),
                f"'{key}' is {value}",
                f"The VAE divides it by {unit}: the nearest are {below} and {below + unit}",
                nearest=(below, below + unit),
            )
    if job.strategy not in card.strategies:
        fact, remedy = f"'{card.model}' has no strategy '{job.strategy}'", nearest(job.strategy, card.strategies)
        raise UnknownNameError(document.place(["strategy"]), fact, remedy, name=job.strategy)
    for name in job.dtypes:
        if name not in card.components:
            fact = f"'{card.model}' has no component '{name}'"
            raise UnknownKeyError(document.place(["dtypes", name]), fact, nearest(name, card.components), key=name)
        if card.components[name].dtype is None:
            fact = f"'{name}' has no weights, and so no dtype"
            raise BadValueError(document.place(["dtypes", name]), fact, "Remove it from 'dtypes'", key=name)


def check_names(card: Card, networks: Collection[str], document: Document) -> None:
    """Refuses a card that has rules for a component that is no network of its family, or no rules for a network.

    Args:
        card: The card.
        networks: The components that the family's stages compile.
        document: The card's.

    Raises:
        UnknownKeyError: A section is named after a component of another kind: nothing would read it.
        MissingKeyError: A network has no rules for its weights or inputs.
        BadValueError: A file of one component in a checkpoint that a diffusers pipeline reads and writes.
    """
    for name, component in card.components.items():
        for key in ("build", "file") if card.pipeline is not None else ():
            if getattr(component, key) is not None:
                fact = f"'{key}' is '{getattr(component, key)}', and 'pipeline' reads a layout that has no such thing"
                raise BadValueError(document.place(["components", name, key]), fact, "Remove 'pipeline', or this")
    sections: list[tuple[list[str | int], Collection[str]]] = [(["stacks"], card.stacks)]
    for name, strategy in card.strategies.items():
        here: list[str | int] = ["strategies", name]
        sections += [([*here, kind], getattr(strategy, kind)) for kind in ("weights", "inputs", "activations")]
        sections += [([*here, "divides", axis], [path.split(".")[0]]) for axis, path in strategy.divides.items()]
        for kind, rules in (("weights", strategy.weights), ("inputs", strategy.inputs)):
            for network in sorted(set(networks) - set(rules)):
                fact, remedy = f"There are no rules for '{network}'", f"Add '{network}', a network of '{card.model}'"
                raise MissingKeyError(document.place([*here, kind]), fact, remedy, key=network)
    sections += [(["score_bounds", what, "component"], [entry.component]) for what, entry in card.score_bounds.items()]
    sections_of_names = [(path, names, "network", networks) for path, names in sections]
    sections_of_names += [(["tiny", "components"], card.tiny.components, "component", card.components)]
    sections_of_names += [(["tiny", "tokenizers"], card.tiny.tokenizers, "component", card.components)]
    for path, names, word, known_names in sections_of_names:
        for name in names:
            if name not in known_names:
                fact = f"'{name}' is no {word} of '{card.model}'"
                raise UnknownKeyError(document.place([*path, name]), fact, nearest(name, known_names), key=name)
