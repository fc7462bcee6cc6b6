"""What a model is, and how to run it: model cards and jobs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from torchport.config.document import Document, Frozen
from torchport.config.step_cache import StepCache
from torchport.config.strategy import Axis, Regex, Strategy, shared_strategies
from torchport.errors import (
    BadValueError,
    MissingKeyError,
    TorchportError,
    UnknownKeyError,
    UnknownNameError,
    closest,
    combined,
    nearest,
)

StageName = Literal["encode", "encode_image", "denoise_first", "denoise", "decode"]
STAGES: tuple[StageName, ...] = ("encode", "encode_image", "denoise_first", "denoise", "decode")
"""All stages that a family can have, in their order."""
DENOISING: tuple[StageName, ...] = ("denoise_first", "denoise")
"""Those that take denoising steps. Where there are two, the second goes on from the state that the first leaves."""
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtype names as torch and JAX have them, with their size in bytes."""

DType = Literal["float32", "bfloat16", "float16"]
Implementation = Literal["plain", "splash", "splash_transposed", "splash_int8", "cudnn", "xla"]
"""Of attention; `splash_int8` is lossy."""


_CLASS_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


def _matching(pattern: str, remedy: str) -> pydantic.AfterValidator:
    """Returns a validator that refuses text which does not match the whole pattern; its error says `remedy`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(remedy)
        return text

    return pydantic.AfterValidator(check)


ClassPath = Annotated[
    str,
    _matching(_CLASS_PATH, "It must be 'package.module:Class'"),
    pydantic.WithJsonSchema({"type": "string", "pattern": f"^{_CLASS_PATH}$"}),
]
Word = Annotated[str, pydantic.Field(min_length=1)]


GENERIC = "diffusers"
"""The family that is made from a card, of any pipeline of diffusers."""
_FAMILY_PATH = rf"\w+/\w+|{GENERIC}"


FamilyPath = Annotated[
    str,
    _matching(
        _FAMILY_PATH,
        "It must be 'folder/file', a Python file in patches/ without its ending, or 'diffusers'; "
        "before, it was a module of torchport",
    ),
    pydantic.WithJsonSchema({"type": "string", "pattern": f"^({_FAMILY_PATH})$"}),
]


def _inside_checkpoint(text: str) -> str:
    """Returns the path of a file as it is, if it lies inside a checkpoint's folder; raises a ValueError otherwise."""
    if text.startswith("/") or ".." in text.split("/") or text.endswith("/"):
        raise ValueError("It must be the path of a file inside the checkpoint")
    return text


BuilderPath = Annotated[
    str,
    _matching(
        r"\w+\.py:[A-Za-z_]\w*",
        "It must be 'file.py:function', a Python file in the folder of the card's family",
    ),
]
FilePath = Annotated[Word, pydantic.AfterValidator(_inside_checkpoint)]


class RenameRule(Frozen):
    """One rule for names of tensors: those in the file whose whole name matches, and what the module calls them."""

    match: Regex
    """A regular expression for a whole name in the file. What varies stands in groups: `model\\.(.*)`."""
    to: str
    """The module's name for the tensor, with the groups of `match` as `\\1`, `\\2` and so on: `\\1`."""

    @pydantic.model_validator(mode="after")
    def _check_groups(self) -> RenameRule:
        """Refuses escapes in `to` but groups of `match`: `\\2` where that has one, `\\0`, `\\n`, and a last `\\`."""
        groups = re.compile(self.match).groups
        for escape in re.findall(r"\\(\d+|.?)", self.to):  # `.?`: another letter, or none at the end
            if not escape.isdigit() or not 1 <= int(escape) <= groups:
                known = ", ".join(f"\\{n}" for n in range(1, groups + 1)) or "none: 'match' has no group"
                raise ValueError(f"'to' has \\{escape}; the groups of 'match' are {known}")
        return self


class LoraName(RenameRule):
    """One rule for names in LoRA files: the layers whose whole name matches, and what such files call them."""

    match: Regex
    """A regular expression for the whole name of a layer: `blocks\\.(\\d+)\\.attn1\\.to_q`, without `.weight`."""
    to: str
    """What LoRA files call the layer, with the groups of `match`: `blocks.\\1.self_attn.q`."""


class Component(Frozen):
    """One component of a model: its class, and where its files lie in the checkpoint.

    A class of diffusers or transformers reads its configuration from `config.json` in its folder. Any other
    `torch.nn.Module`, and whatever has a `file` or a `build`, takes keyword arguments instead: those of `published`, or
    for the tiny checkpoint those of `tiny.components`. The family then reads them, with the defaults of those that are
    left out, as the module's `config`.
    """

    class_: ClassPath = pydantic.Field(alias="class")
    """Its Python class, `package.module:Class`. docs/cards.md says which classes are taken."""
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
    lora_names: list[LoraName] = []
    """Rules for layers that published LoRA files call otherwise than the module and the checkpoint do. The first rule
    that matches a whole name counts; one that is no layer's first match is refused, when a job has a LoRA."""
    dtype: DType | None = None
    """The dtype of its weights. A component for which torchport loads no weights (tokenizer, scheduler) has none."""
    precision: Literal["default", "high", "highest"] = "default"
    """The precision of its float32 products on a TPU. The TPU's own default rounds their inputs to bfloat16."""
    published: dict[str, Any] = {}
    """The published configuration, if the class's defaults differ; it gives the shapes before any download. For a
    module that has no `config.json`, the keyword arguments that build it."""
    unread: list[Regex] = []
    """Tensors of the published checkpoint that the class does not use, by whole name, as the file calls them; any other
    one is refused."""
    parameters: pydantic.PositiveInt | None = None
    """The number of parameters in the published checkpoint, so that the memory is known before any download."""
    like: Word | None = None
    """Another component of the same shapes: what the card says of that one under `published`, `lora_names`, `tiny`,
    `stacks` and `strategies` also goes for this one, where it does not say otherwise."""

    @pydantic.model_validator(mode="after")
    def _check_fields(self) -> Component:
        """Refuses `precision` or `build` without a `dtype`, and `key` without a file of `torch.save`."""
        # A bfloat16 component may have it too: a config can make it float32.
        if self.precision != "default" and self.dtype is None:
            raise ValueError("'precision' is for a component that computes here, and such a component has a 'dtype'")
        if self.build is not None and self.dtype is None:
            raise ValueError("'build' makes a module that is loaded here, and it needs a 'dtype'")
        if self.key is not None and (self.file is None or self.file.endswith((".safetensors", ".json"))):
            raise ValueError("'key' is for a file of torch.save, and 'file' names none")
        return self


class Stack(Frozen):
    """Repeated blocks that run as one under a scan."""

    carries: list[str]
    """The parameters of a block's `forward` that receive the outputs of the block before it, in order."""
    first: pydantic.NonNegativeInt = 0
    """The number of blocks at the beginning that are not stacked: those in which a carry gets another dtype, for
    example."""
    last: pydantic.NonNegativeInt = 0
    """The number of blocks at the end that are not stacked."""


class ScoreBound(Frozen):
    """Attention whose queries and keys leave a norm: the gains of those norms bound its scores."""

    component: str
    """The network that the attention is in."""
    queries: Annotated[list[Regex], pydantic.Field(min_length=1)]
    """Regular expressions for the gains of the norms that queries leave. The gains of one block have its number."""
    keys: Annotated[list[Regex], pydantic.Field(min_length=1)]
    """The same for keys."""


class HandWritten(Frozen):
    """How the pipeline has latents that a hand-written port's stage file has as [B, C, T, H, W]."""

    order: Annotated[list[Literal["B", "C", "T", "H", "W"]], pydantic.Field(min_length=5, max_length=5)]
    """The order of their dims: `[B, T, C, H, W]`."""
    leading: pydantic.NonNegativeInt = 0
    """The most latent frames that it has before the first one, and removes before it decodes. Those files lack them."""

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> HandWritten:
        if len(set(self.order)) < len(self.order):
            raise ValueError("'order' must name each dim once")
        return self


TOKENS = "tokens"
"""The size in an embedding's shape that is the number of the prompt's tokens."""
_NUMBER = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?"
Size = Annotated[str, pydantic.StringConstraints(pattern=rf"^{_NUMBER}(\*{_NUMBER})*$")]
Shape = Annotated[list[pydantic.PositiveInt | Size], pydantic.Field(min_length=1)]


class Sound(Frozen):
    """How a pipeline makes sound: its network returns two outputs. Its loop steps the video's latents with the first
    and the scheduler, then the sound's with the second and a deep copy of the scheduler."""

    parts: Annotated[list[Word], pydantic.Field(min_length=1)]
    """The components that make it of the second latents, after the last step. They are on the host."""
    rate: str
    """The number in a component's configuration that says its samples a second: `vocoder.output_sampling_rate`."""


class PipelineCall(Frozen):
    """How `family: diffusers` calls the card's `pipeline`: what differs between pipelines.

    The pipeline's scheduler is the component `scheduler`, and what decodes is `vae`.
    """

    network: Word | Annotated[list[Word], pydantic.Field(min_length=2, max_length=2)]
    """The component that the pipeline's loop calls. It is compiled. Or two, if its loop calls a second one after the
    first: each of them has a stage, `denoise_first` and `denoise`, so that one is on the devices at a time."""
    encoders: Annotated[list[Word], pydantic.Field(min_length=1)]
    """The components that its `encode_prompt` uses: text encoders and tokenizers."""
    encode: dict[str, Any] = {}
    """Arguments of `encode_prompt` that are always the same."""
    embeddings: dict[str, Shape | Annotated[list[Shape], pydantic.Field(min_length=1, max_length=1)] | None]
    """What `encode_prompt` returns, in its order: the argument of the pipeline that takes it, with its shape. A name in
    a shape is a number in the network's configuration, `component.name` one in another's, and `a*b` is a product;
    `tokens` are as many as the prompt has. `[[tokens, 64]]` is a list of a tensor for each prompt. `null` is a value
    that the pipeline computes again. Without guidance there are none whose names begin with `negative_`."""
    tokens: pydantic.PositiveInt = 512
    """What `plan` and `trace` take for `tokens` in a shape: there is no prompt then."""
    negative_apart: bool = False
    """Whether `encode_prompt` takes one prompt, and is called again for the negative one. What it returns then has the
    names of `embeddings` with `negative_` before them."""
    conditions: dict[str, Annotated[list[Word], pydantic.Field(min_length=2, max_length=2)]] = {}
    """For a loop that calls the network once for each condition of guidance: the inputs of the network that differ,
    with the embeddings that they are in the first and in the second call. torchport computes both calls as one batch,
    which the mesh's `dp` splits."""
    dtypes: dict[str, Literal["bool", "int32", "int64"]] = {}
    """The dtypes of those among `embeddings` that are no floating-point numbers: masks of tokens, or in one dim the
    cumulative numbers of tokens of the prompts."""
    before: list[Word] = []
    """The components that its loop's function calls before the first step; one that it calls later, too, is refused
    then. They run in `encode`, and return tensors in tuples, lists, dicts and objects with fields. `vae` is among them
    if it encodes something, and there is no `image`."""
    settings: dict[str, Literal["height", "width", "area", "frames", "frame_rate", "steps", "guidance_scale"]]
    """By argument of the pipeline, the field of the config that it gets; `area` is height times width, and `frame_rate`
    is `fps`."""
    constants: dict[str, Any] = {}
    """Arguments of the pipeline that are the same in all jobs, unless a job's `call` replaces them."""
    init: dict[str, Any] = {}
    """Arguments of the pipeline's constructor that are no components, as the published `model_index.json` has them."""
    image: Word | None = None
    """The argument of the pipeline that takes the first frame; its VAE must encode it before the first step. With it,
    `--image` must be given where it is encoded, and without it must not."""
    answers: bool = False
    """Whether the pipeline's own call calls `encode_prompt`, with all that it prepares for it, such as an image: in
    `encode`, up to the first step. In later stages `encode_prompt` returns what it returned there. For a pipeline that
    does not take its embeddings as arguments. `null` in `embeddings` is a value that is None then."""
    edits: bool = False
    """Whether `image` takes a list of frames, as many as the job has. `--image` names a video then."""
    host: list[Literal["vae"]] = []
    """Components that stay on the host, in PyTorch: `[vae]` if the VAE cannot be compiled, or if the pipeline does more
    with the decoded video than to post-process it."""
    asks: bool = False
    """Whether its constructor or `encode_prompt` asks network and VAE for their configurations."""
    guider: bool = False
    """Whether it takes a guider, the component `guider`, which combines the predictions with the job's scale."""
    processors: list[Word] = []
    """The components without weights that its loop's function uses itself, such as one that prepares an image for
    what is in `before`. They stand in the pipeline in all stages."""
    sound: Sound | None = None
    """How it makes sound, for a pipeline that does. The video has it."""
    hand_written: HandWritten | None = None
    """What the latents in stage files of hand-written ports are to the pipeline. Without it they are refused."""

    @property
    def networks(self) -> tuple[str, ...]:
        """The components that the loop calls, in its order."""
        return (self.network,) if isinstance(self.network, str) else tuple(self.network)

    @property
    def components(self) -> list[str]:
        """All components of the card that the pipeline uses."""
        sound = [] if self.sound is None else self.sound.parts
        guider = ["guider"] if self.guider else []
        return [*self.networks, *self.encoders, *self.before, *self.processors, *sound, *guider, "scheduler", "vae"]

    @property
    def encodes_video(self) -> bool:
        """Whether the VAE encodes an image or a video before the first step."""
        return self.image is not None or "vae" in self.before

    @property
    def shapes(self) -> dict[str, list[int | str] | None]:
        """The shape of each embedding by name; for a list, the shape of an item. With `negative_apart` each shape is
        there as `negative_NAME`, too.
        """
        shapes: dict[str, Any] = dict(self.embeddings)
        for name, shape in self.embeddings.items():
            if shape is not None and isinstance(shape[0], list):
                shapes[name] = shape[0]
        if not self.negative_apart:
            return shapes
        return shapes | {f"negative_{name}": shape for name, shape in shapes.items()}

    @property
    def takes_negative(self) -> bool:
        """Whether there are embeddings of a negative prompt."""
        return any(name.startswith("negative_") and shape is not None for name, shape in self.shapes.items())

    @property
    def takes_guidance(self) -> bool:
        """Whether the scale of guidance changes what the pipeline makes."""
        return self.guider or self.takes_negative or "guidance_scale" in self.settings.values()

    @property
    def lists(self) -> frozenset[str]:
        """The embeddings that the pipeline and its network take as a list, with one tensor for each prompt."""
        names = [name for name, shape in self.embeddings.items() if shape is not None and isinstance(shape[0], list)]
        return frozenset([*names, *(f"negative_{name}" for name in names)])

    @property
    def compiled(self) -> tuple[str, ...]:
        """The components that are compiled: the networks, and the VAE unless it stays on the host."""
        return self.networks if "vae" in self.host else (*self.networks, "vae")

    @pydantic.model_validator(mode="after")
    def _check_fields(self) -> PipelineCall:
        """Refuses `conditions` that name no embedding, one `network` twice, and `sound` beside conditions or lists."""
        known = {name for name, shape in self.shapes.items() if shape is not None}
        unknown = [name for names in self.conditions.values() for name in names if name not in known]
        if unknown:
            raise ValueError(f"'conditions' has '{unknown[0]}', which is none of 'embeddings'")
        if len(set(self.networks)) < len(self.networks):
            raise ValueError(f"'network' has '{self.networks[0]}' twice: a loop with one network names it alone")
        if self.sound is not None and (self.conditions or len(self.networks) > 1 or self.lists):
            raise ValueError("'sound' goes with one network that is called once a step and takes no lists")
        return self


class Checkout(Frozen):
    """An upstream that is no installed package, but a repository that the user has cloned."""

    package: str
    """The package in the checkout, a folder at its root, or `NAME.py` there. It is importable during a run."""
    has: str
    """A file that only this upstream has, as a path from the root of the checkout."""
    others: dict[str, str] = {}
    """For other upstreams with a package of the same name: a file that one of them has, and what that upstream is."""
    url: str
    """Where to clone it from. Errors show it."""


class FrameRule(Frozen):
    """The number of frames must be `multiple_of` * n + `plus`."""

    multiple_of: pydantic.PositiveInt
    """The frames that the VAE makes of one latent frame."""
    plus: pydantic.NonNegativeInt
    """The frames beside those, such as a first frame that is encoded alone."""


class TinyTokenizer(Frozen):
    """A tokenizer trained in a second on a few sentences, for a card's tiny checkpoint."""

    corpus: list[str] = [
        "A cat walks on the grass, realistic style, in the evening light.",
        "Two dogs play in the snow while the camera pans slowly to the left.",
        'The word "torchport" is written on a red sign in front of a small house.',
        "Waves break on a rocky shore, birds fly over the water, clouds move.",
    ]
    """The sentences that it is trained on."""
    vocab_size: pydantic.PositiveInt = 200
    """The number of tokens in its vocabulary, at most."""
    special_tokens: list[str] = []
    """Tokens that are never split."""
    eos_token: str = "</s>"
    """The token that ends a text."""
    pad_token: str = "<pad>"
    """The token that pads a text."""
    model_max_length: pydantic.PositiveInt | None = None
    """The number of tokens that it takes; by default the class's own."""
    chat_template: str | None = None
    """A template in Jinja, where the tokenizer has one. `{filler}` in it becomes as many filler tokens as
    `prefix_tokens` asks for."""
    prefix_tokens: pydantic.PositiveInt | None = None
    """The number of tokens that the template puts before the user's text. Set it only if upstream crops that many."""
    system_message_of: str | None = None
    """An upstream function, `module:Class.function`. The default of its argument `system_message` is in the prefix."""


TINY, RANDOM = "tiny", "tiny:random"
"""What `--checkpoint` calls a card's tiny checkpoint: with what the card has trained weights of, and all random."""


def is_tiny(checkpoint: str) -> bool:
    """Whether `--checkpoint` names a card's tiny checkpoint."""
    return checkpoint in (TINY, RANDOM)


class Trained(Frozen):
    """Trained tensors of a tiny component. Those that the file lacks stay as the seed draws them."""

    file: Word
    """A file of safetensors, relative to the card's folder, with the module's own names."""
    sha256: Annotated[str, pydantic.Field(pattern="[0-9a-f]{64}")]
    """The file's checksum."""


class Tiny(Frozen):
    """The tiny checkpoint of a card: the real classes with small configurations, seeded, and some of them trained."""

    seed: int
    """The seed of all weights."""
    scale: pydantic.PositiveFloat
    """The standard deviation times sqrt(fan-in) of every weight that has two dims or more."""
    components: dict[str, dict[str, Any]]
    """By component: its small configuration, or the keyword arguments that build it."""
    tokenizers: dict[str, TinyTokenizer] = {}
    """By component, the tokenizer to train for it."""
    trained: dict[str, Trained] = {}
    """By component, weights that were trained. `--checkpoint tiny:random` leaves them out."""
    prompt: Word = "A cat walks on the grass"
    """A prompt that the model can take; `torchport check --model` runs the demo with it."""


Several = Literal["vae"]
"""Components that may have more than one implementation."""


class Implementations(Frozen):
    """Ways to compute one component. Each of them has patches of its own, and a config names one."""

    default: Word
    """The one that is used if a config names none."""
    patches: dict[Word, dict[StageName, list[str]]]
    """By implementation, and by stage: the patches that the stage has beside those of the card's `patches`."""

    @pydantic.model_validator(mode="after")
    def _check_default(self) -> Implementations:
        if self.default not in self.patches:
            raise ValueError(f"'default' is '{self.default}'; the names in 'patches' are {', '.join(self.patches)}")
        return self


class Card(Frozen):
    """A model card, `configs/models/<name>.yaml`: what a model is, as data."""

    model: str
    """The model's name, which is also the name of this file without its ending. `--model` takes it."""
    extends: Word | None = None
    """Another card, of which this one says only what differs; `null` removes what that one has (docs/cards.md)."""
    title: str
    """One line for `torchport models`."""
    family: FamilyPath
    """Its stages: a Python file in `patches/`, without its ending: `diffusers/some_stages`. Or `diffusers`: they are
    made of `pipeline` and `call` (docs/families.md)."""
    artefacts: str
    """A name for the format of its stage files. Cards with the same name can read each other's, if the shapes agree."""
    pipeline: ClassPath | None = None
    """The diffusers pipeline that reads the checkpoint. Leave it out if the checkpoint has a layout of its own, where
    components may name a `file` or a `build`."""
    call: PipelineCall | None = None
    """With `family: diffusers`, how the pipeline is called."""
    upstream: dict[str, str]
    """The installed packages that the model's code comes from, each with a range of versions: `">=0.42,<0.43"`."""
    checkout: Checkout | None = None
    """The model's code, if it is a repository that the user clones (`--upstream-path`) and no installed package."""
    checkpoint: Word
    """The published weights, `owner/repo@revision`, or a folder. `--checkpoint` and a config replace it."""
    demo: str = "configs/demo.yaml"
    """The config that runs the tiny checkpoint on a machine without an accelerator."""
    variant: Word | None = None
    """Which of several networks in the checkpoint is used if the config names none."""
    patches: dict[StageName, list[str]]
    """By stage, its patches: `folder` for all files in `patches/folder/`, `folder/file` for one."""
    implementations: dict[Several, Implementations] = {}
    """By component, the ways to compute it, if there are several. A config names one: `vae: {implementation: flax}`."""
    original: list[str] = []
    """The patches that `--backend original` needs too. Entries with `plumbing: true` are always among them."""
    script: list[str] = []
    """The patches that a whole script of upstream's needs beside those of the stages (`torchport exec`)."""
    components: dict[str, Component]
    """The parts of the checkpoint, by name."""
    stacks: dict[str, dict[str, Stack]] = {}
    """By network, and by the path of a list of blocks in it: the blocks that are compiled as one."""
    score_bounds: dict[str, ScoreBound] = {}
    """Attention with bounded scores, by the name that a patch's attention calls it by."""
    operators: dict[str, Word] = {}
    """Operators that may compute something else than PyTorch (engine.md), each with the reason why it may here."""
    frames: FrameRule
    """The numbers of frames that the model can make."""
    size_multiple_of: pydantic.PositiveInt
    """Height and width must be multiples of this, in pixels."""
    strategies: dict[str, Strategy] = {}
    """The sharding strategies, by name (docs/sharding.md). With `family: diffusers`, a network that a strategy `tp`,
    `ulysses` or `fsdp` has no rules for gets the shared ones of that name. Without strategies it has all three."""
    tiny: Tiny
    """A small copy of the model, for demos and tests. Its weights are random, or trained if the card says where."""
    overrides: bool = False
    """Whether it takes the place of the card with the same name in a pack under its own (docs/packs.md)."""

    @pydantic.model_validator(mode="after")
    def _copy_for_like(self) -> Card:
        """Copies the fields and rules of NAME to each component with `like: NAME` that has none of its own."""
        sections: list[dict[str, Any]] = [self.tiny.components, self.stacks]
        for strategy in self.strategies.values():
            sections += [strategy.weights, strategy.inputs, strategy.activations]
        for name, component in self.components.items():
            source = component.like  # an unknown name is refused by `check_names`
            if source is None:
                continue
            for section in sections:
                if source in section:
                    section.setdefault(name, section[source])
            if source in self.components and not component.published:
                component.published.update(self.components[source].published)
            if source in self.components and not component.lora_names:
                component.lora_names.extend(self.components[source].lora_names)
        return self

    @pydantic.model_validator(mode="after")
    def _complete_strategies(self) -> Card:
        """Completes each strategy's rules by those of the strategy in its `like`. With `call` or `shared`, it gets the
        shared rules, too.
        """
        strategies = dict(self.strategies)
        if not strategies and self.call:
            strategies = dict.fromkeys(shared_strategies(), Strategy())
        if self.call is not None:
            compiled = {*self.call.compiled}
        else:
            compiled = {"vae"}.union(*(strategy.weights for strategy in strategies.values()))
        networks = [name for name in self.components if name in compiled]
        for name, strategy in strategies.items():
            base = strategies.get(strategy.like) if strategy.like else None
            merged = strategy if base is None else strategy.over(base)
            has_shared = self.call is not None or strategy.shared is not None
            self.strategies[name] = merged.with_shared_rules(name, networks) if has_shared else merged
        return self

    @property
    def makes_pictures(self) -> bool:
        """Whether its pipeline takes no number of frames: what it makes is one picture."""
        return self.call is not None and "frames" not in self.call.settings.values()

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The components with weights that its pipeline encodes prompts with."""
        names = [] if self.call is None else self.call.encoders
        return tuple(name for name in names if self.components[name].dtype is not None)

    @property
    def edits(self) -> bool:
        """Whether its pipeline takes the frames of a video."""
        return self.call is not None and self.call.edits

    def with_trained(self, trained: Mapping[str, Trained]) -> Card:
        """Returns the same card with other trained weights of the tiny components, or with none."""
        return self.model_copy(update={"tiny": self.tiny.model_copy(update={"trained": dict(trained)})})

    def patch_names(self, stage: StageName, implementations: Mapping[Several, str]) -> list[str]:
        """Returns the names of a stage's patches: `["diffusers/some_network", "torch/cuda"]`. `implementations` is what
        a job chooses by component, `{"vae": "flax"}`; any other component has the card's default.
        """
        names = list(self.patches.get(stage, []))
        for component, choice in self.implementations.items():
            names += choice.patches[implementations.get(component, choice.default)].get(stage, [])
        return names

    def patch_sets(self) -> Iterator[tuple[StageName, list[str]]]:
        """Yields each stage with each list of patches that it can have: one for every choice of implementations."""
        # [[("vae", "torchax"), ("vae", "flax")]] -> {"vae": "torchax"} and {"vae": "flax"}
        options = [[(component, name) for name in kinds.patches] for component, kinds in self.implementations.items()]
        choices = [dict(pairs) for pairs in itertools.product(*options)]
        stages = set(self.patches)
        for kinds in self.implementations.values():
            stages.update(*kinds.patches.values())
        for stage in sorted(stages, key=STAGES.index):
            sets = dict.fromkeys(tuple(self.patch_names(stage, choice)) for choice in choices)
            yield from ((stage, list(names)) for names in sets)

    def rule_key(self, component: str) -> str:
        """Returns the name under which the card has a component's rules: its own, or the name in its `like`.

        For a `transformer_2` with `like: transformer`, that is `"transformer"`.
        """
        return self.components[component].like or component

    def folder(self, component: str, variant: str | None) -> str:
        """Returns where a component lies in a checkpoint, relative to its root."""
        return (self.components[component].folder or component).format(variant=variant)

    def file(self, component: str, variant: str | None) -> str | None:
        """Returns the file of a component's tensors, relative to its folder; None if the card names none."""
        file = self.components[component].file
        return None if file is None else file.format(variant=variant)

    def python_files(self, family: Path) -> list[Path]:
        """Returns the Python files that the card names: the file of its family, and files beside it with builders."""
        names = {component.build.partition(":")[0] for component in self.components.values() if component.build}
        return [family, *(family.with_name(name) for name in sorted(names))]


class Choice(Frozen):
    """What a config chooses of one component."""

    implementation: Word | None = None
    """One of the card's `implementations`. By default the card's own default."""


class LoraFile(Frozen):
    """A LoRA file, which is merged into the weights of a network before they are split over the mesh."""

    path: Word
    """The file, in safetensors, with pairs `lora_A` and `lora_B`, as diffusers and PEFT write it, or `lora_down` and
    `lora_up`."""
    scale: Annotated[float, pydantic.Field(ge=-100.0, le=100.0, allow_inf_nan=False)] = 1.0
    """How much of it is added. A pair of matrices is also multiplied by alpha / rank."""
    component: Word = "transformer"
    """The network that it is for. Of a model with two, the second has a file of its own: `transformer_2`."""


class Job(Frozen):
    """A config, `configs/<job>.yaml`: what to make of a model, and on which machine."""

    # Limits for any machine: sizes of x264; twelve hours; rates of displays; noise levels in training; 16 bits.
    height: Annotated[int, pydantic.Field(gt=0, le=16_384)]
    """The video's height in pixels."""
    width: Annotated[int, pydantic.Field(gt=0, le=16_384)]
    """The video's width in pixels."""
    frames: Annotated[int, pydantic.Field(gt=0, le=2**20)]
    """The number of frames. The card's `frames` says which numbers the model can make."""
    fps: Annotated[int, pydantic.Field(gt=0, le=240)]
    """Frames per second of video.mp4."""
    steps: Annotated[int, pydantic.Field(gt=0, le=1_000)]
    """The number of denoising steps."""
    guidance_scale: Annotated[float, pydantic.Field(ge=1.0, le=1_000.0, allow_inf_nan=False)]
    """The scale of classifier-free guidance. 1.0 is off."""
    guider: dict[str, Any] | None = None
    """What combines the predictions with and without the prompt, if the pipeline takes a guider: a class of
    `diffusers.guiders` and its arguments, `{class: ClassifierFreeZeroStarGuidance, zero_init_steps: 1}`. Its scale is
    `guidance_scale`. By default the checkpoint's."""
    scheduler: dict[str, Any] | None = None
    """With `family: diffusers`, what takes the steps: a class of diffusers and its arguments, `{class:
    FlowMatchEulerDiscreteScheduler, shift: 5.0}`, in place of the checkpoint's."""
    machine: str
    """The devices: `v6e:2x4` is a TPU slice of v6e chips, `cpu:8` is 8 virtual CPU devices."""
    mesh: dict[Axis, pydantic.PositiveInt] = {}
    """The number of devices along each axis, `{dp: 2, tp: 4}`. Without it, the strategy's mesh is used."""
    strategy: str
    """One of the card's strategies."""
    checkpoint: Word | None = None
    """The weights: a folder, `owner/repo@revision`, or `tiny` for small ones: trained if the card has such, else
    random, as `tiny:random` always is. By default the card's."""
    lora: list[LoraFile] = []
    """LoRA files that are added to the weights, in their order: `[{path: style.safetensors, scale: 0.8}]`. Compiled
    programs stay the same."""
    variant: Word | None = None
    """Which of several networks in the checkpoint is used. By default the card's."""
    dtypes: dict[str, DType] = {}
    """By component, a dtype that replaces the card's."""
    attention: Implementation | None = None
    """The implementation of attention in compiled programs. By default the platform's own (docs/attention.md)."""
    encode: Literal["host", "devices"] = "host"
    """Where the prompt is encoded: in PyTorch on the host, or by programs on the devices (docs/jobs.md)."""
    stacked: bool = True
    """Whether the blocks that the card's `stacks` name are compiled as one."""
    text_bucket: Annotated[int, pydantic.Field(gt=0, le=2**20)] | None = None
    """Text is cut to the tokens of the longest prompt, rounded up to a multiple of this. By default it is not cut."""
    vae: Choice = Choice()
    """How the VAE is computed: `{implementation: flax}`."""
    vae_tiling: bool | None = None
    """Whether the VAE decodes in overlapping tiles. By default it does what upstream does. A port of
    `family: diffusers` does not."""
    call: dict[str, Any] = {}
    """With `family: diffusers`, arguments of the pipeline: `{use_dynamic_cfg: true}`. They replace those of the card's
    `call.constants`."""
    cache: StepCache | None = None
    """A step cache: steps that take what the blocks compute from earlier steps. It is lossy (docs/step-caches.md)."""
    save_every: pydantic.PositiveInt = 5
    """The number of denoising steps between two savings of the unfinished latents."""
    price_per_chip_hour: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = None
    """What a chip costs in an hour, in US dollars. `torchport plan` then says what a clip costs."""
    keep_steps: bool = False
    """Whether the latents after each denoising step are kept, for `torchport compare` (docs/runs.md)."""
    overrides: bool = False
    """Whether it takes the place of the config with the same name in a pack under its own (docs/packs.md)."""

    @property
    def devices(self) -> int:
        """The number of JAX devices that the mesh takes."""
        return math.prod(self.mesh.values())

    @property
    def implementations(self) -> dict[Several, str]:
        """The implementations that it names, by component."""
        return {} if self.vae.implementation is None else {"vae": self.vae.implementation}


Cards = Iterable[tuple[str, tuple[Card, Document] | TorchportError]]
"""Models' names, each with its card or with why it cannot be read."""


def check_job(job: Job, card: Card, document: Document, cards: Cards = ()) -> None:
    """Refuses a job that this model cannot do, with all its mistakes; a refusal may name others of `cards`."""
    mistakes = list(job_mistakes(job, card, document, cards))
    if mistakes:
        raise combined(mistakes)


def _cache_mistakes(job: Job, document: Document) -> Iterator[TorchportError]:
    """Yields the mistakes in a job's `cache`, each at the flag or the line that sets the wrong field."""
    if job.cache is None:
        return
    try:
        job.cache.computed(job.steps)  # raises if the cache's fields do not fit
    except BadValueError as error:
        keys = getattr(error, "keys", ())  # a flag that sets one of them is at fault, or else a line
        flags = [key for key in keys if ("cache", key) in document.flags]
        lines = [key for key in keys if ("cache", key) in document.lines]
        yield BadValueError(document.place(["cache", *(flags or lines)[:1]]), error.fact, error.remedy)
    if not job.stacked:
        fact = "A step cache reuses what stacked blocks compute, and 'stacked' is false"
        remedy = "Remove one of the two: --set cache=null, or --set stacked=true"
        yield BadValueError(document.place(["cache"]), fact, remedy)


def job_mistakes(job: Job, card: Card, document: Document, cards: Cards = ()) -> Iterator[TorchportError]:
    """Yields an error for each field of a job that its card cannot do: frames, size, strategy, dtypes and so on."""
    yield from _cache_mistakes(job, document)
    if card.makes_pictures and job.frames != 1:
        fact = f"'frames' is {job.frames}, and '{card.model}' makes pictures"
        yield BadValueError(document.place(["frames"]), fact, "It must be 1", nearest=(1, 1))
        yield from _guider_mistakes(job, card, document, cards)
        return
    if card.call is not None and not card.call.takes_guidance and job.guidance_scale != 1.0:
        fact = f"'guidance_scale' is {job.guidance_scale}, and '{card.model}' takes none"
        yield BadValueError(document.place(["guidance_scale"]), fact, "It must be 1.0")
    multiple = card.frames.multiple_of
    plus = card.frames.plus
    if job.frames % multiple != plus % multiple or job.frames < plus:
        first = plus or multiple  # zero frames are no video
        below = max(first, (job.frames - plus) // multiple * multiple + plus)
        remedy = f"It must be {multiple}n+{plus}: the nearest are {below} and {below + multiple}"
        pair = (below, below + multiple)
        yield BadValueError(document.place(["frames"]), f"'frames' is {job.frames}", remedy, nearest=pair)
    unit = card.size_multiple_of
    for key, pixels in (("height", job.height), ("width", job.width)):
        if pixels % unit:
            below = max(unit, pixels // unit * unit)
            remedy = f"The VAE divides it by {unit}: the nearest are {below} and {below + unit}"
            pair = (below, below + unit)
            yield BadValueError(document.place([key]), f"'{key}' is {pixels}", remedy, nearest=pair)
    if job.strategy not in card.strategies:
        fact, remedy = f"'{card.model}' has no strategy '{job.strategy}'", nearest(job.strategy, card.strategies)
        yield UnknownNameError(document.place(["strategy"]), fact, remedy, name=job.strategy)
    yield from _component_mistakes(job, card, document)
    yield from _argument_mistakes(job, card, document)
    yield from _guider_mistakes(job, card, document, cards)


def _component_mistakes(job: Job, card: Card, document: Document) -> Iterator[TorchportError]:
    """Yields the mistakes in what a job says of components: their dtypes and implementations."""
    for name in job.dtypes:
        if name not in card.components:
            fact = f"'{card.model}' has no component '{name}'"
            yield UnknownKeyError(document.place(["dtypes", name]), fact, nearest(name, card.components), key=name)
        elif card.components[name].dtype is None:
            fact = f"'{name}' has no weights, and so no dtype"
            yield BadValueError(document.place(["dtypes", name]), fact, "Remove it from 'dtypes'", key=name)
    for component, name in job.implementations.items():
        place = document.place([component, "implementation"])
        kinds = card.implementations.get(component)
        if kinds is None:
            fact = f"'{card.model}' has one implementation of '{component}', and it has no name"
            yield UnknownKeyError(place, fact, "Remove 'implementation'", key="implementation")
        elif name not in kinds.patches:
            fact = f"'{card.model}' has no implementation '{name}' of '{component}'"
            yield UnknownNameError(place, fact, nearest(name, kinds.patches), name=name)
    networks = () if card.call is None else card.call.networks
    dtypes = {job.dtypes.get(name, card.components[name].dtype) for name in networks if name in card.components}
    if len(dtypes) > 1:
        fact = f"{' and '.join(map(repr, networks))} have two dtypes, and the pipeline gives both the same latents"
        yield BadValueError(document.place(["dtypes"]), fact, "Give them one", key="dtypes")


def _guider_mistakes(job: Job, card: Card, document: Document, cards: Cards) -> Iterator[TorchportError]:
    """Yields the mistake in a job's `guider`, if there is one; it may name those of `cards` that take a guider."""
    if job.guider is None:
        return
    place = document.place(["guider"])
    if "guider" not in card.components:
        fact = f"'{card.model}' has no guider: its pipeline combines the predictions itself, by 'guidance_scale'"
        models = [name for name, read in cards if isinstance(read, tuple) and "guider" in read[0].components]
        remedy = f"Remove 'guider', or take a card whose pipeline has one: {', '.join(models) or 'none here has'}"
        yield UnknownKeyError(place, fact, remedy, key="guider")
    elif not isinstance(job.guider.get("class"), str):
        fact = f"'guider' has {'no' if job.guider.get('class') is None else 'a number for its'} 'class'"
        yield MissingKeyError(place, fact, "Name a class of diffusers.guiders: docs/jobs.md", key="class")
    elif "guidance_scale" in job.guider:
        fact = "'guidance_scale' is there twice, in the job and in its guider"
        yield BadValueError(document.place(["guider", "guidance_scale"]), fact, "Keep the job's", key="guidance_scale")
    elif job.guidance_scale == 1.0:
        fact = "'guidance_scale' is 1.0, and a guider needs two predictions"
        yield BadValueError(place, fact, "Raise 'guidance_scale', or remove 'guider'", key="guidance_scale")


PASSED = ("prompt", "negative_prompt", "generator", "latents", "output_type", "return_dict")
"""Arguments of pipelines that torchport passes, or keeps to itself."""


def _argument_mistakes(job: Job, card: Card, document: Document) -> Iterator[TorchportError]:
    """Yields the arguments in a job's `call` that the job may not set, or `call` itself if the family takes none."""
    if card.call is None:
        for key, arguments in (("call", job.call), ("scheduler", job.scheduler)):
            if arguments:
                fact = f"'{key}' is for models with 'family: {GENERIC}', and '{card.model}' has '{card.family}'"
                first = next(iter(arguments))
                yield UnknownKeyError(document.place([key, first]), fact, f"Remove '{key}'", key=key)
        return
    for name in job.call:
        place = document.place(["call", name])
        if name in card.call.settings:
            # In the job's words: `area` and `frame_rate` are no fields of a job.
            field = card.call.settings[name].replace("area", "height' and 'width").replace("frame_rate", "fps")
            fact = f"'{name}' gets the field '{field}'"
            yield BadValueError(place, fact, f"Set '{field}', and remove it from 'call'", key=name)
        elif name in (*PASSED, *card.call.shapes, card.call.image):
            yield BadValueError(place, f"torchport passes '{name}' itself", "Remove it from 'call'", key=name)
        elif name in card.call.encode:
            fact = f"'{name}' is for the prompts, which are encoded before, and the card sets it"
            yield BadValueError(place, fact, "Change it in the card's 'encode'", key=name)


def check_call(card: Card, document: Document) -> None:
    """Refuses `family: diffusers` without `pipeline` or `call`, and `call` beside any other family."""
    if card.family != GENERIC:
        if card.call is not None:
            fact = f"'call' is for 'family: {GENERIC}', and the family is '{card.family}'"
            raise UnknownKeyError(document.place(["call"]), fact, "Remove 'call', or change 'family'", key="call")
        return
    for key in ("pipeline", "call"):
        if getattr(card, key) is None:
            fact = f"'family' is '{GENERIC}', and there is no '{key}'"
            raise MissingKeyError(document.place(["family"]), fact, f"Add '{key}': docs/cards.md", key=key)


def check_names(card: Card, networks: Collection[str], document: Document) -> None:
    """Refuses a card with unknown names, without rules for a network, or with `build` or `file` beside `pipeline`.

    The error has all these mistakes. A component that does not exist is one mistake, however many sections name it.
    `networks` are the components that the family's stages compile.
    """
    mistakes: list[TorchportError] = []
    for name, component in card.components.items():
        for key in ("build", "file"):
            if card.pipeline is not None and getattr(component, key) is not None:
                fact = f"'{key}' is '{getattr(component, key)}', and 'pipeline' reads a layout that has no such thing"
                place = document.place(["components", name, key])
                mistakes.append(BadValueError(place, fact, "Remove 'pipeline', or this"))
    mistakes += _missing_rules(card, networks, document)
    mistakes += _unknown_names(card, networks, document)
    if mistakes:
        raise combined(mistakes)


def _missing_rules(card: Card, networks: Collection[str], document: Document) -> Iterator[TorchportError]:
    """Yields an error for each network that a strategy has no rules for; a strategy with `like` may have none."""
    needed = set(networks) & set(card.components)  # `_unknown_names` refuses a network that is no component
    for name, strategy in card.strategies.items():
        if strategy.like is not None:
            continue
        for kind, rules in (("weights", strategy.weights), ("inputs", strategy.inputs)):
            # Networks whose name in the rules is misspelt: that name is refused, and is mistake enough.
            misspelt = {closest(key, networks) for key in set(rules) - set(networks)}
            for network in sorted(needed - set(rules) - misspelt):
                fact, remedy = f"There are no rules for '{network}'", f"Add '{network}', a network of '{card.model}'"
                yield MissingKeyError(document.place(["strategies", name, kind]), fact, remedy, key=network)


def _unknown_names(card: Card, networks: Collection[str], document: Document) -> Iterator[TorchportError]:
    """Yields an error for each name in a card that is no network, component or strategy, where it must be one."""
    known: dict[str, Collection[str]] = {"network": networks, "component": card.components}
    known["strategy"] = [name for name, strategy in card.strategies.items() if strategy.like is None]
    absent: set[str] = set()  # components that are reported already
    # Where a network is no component, rules for a component may be meant for it: they are no second mistake.
    tolerated = set(card.components) if set(networks) - set(card.components) else set()
    for kind, path, names in _names(card, networks, document):
        for name in names:
            if name in known[kind] or name in absent or (kind == "network" and name in tolerated):
                continue
            if kind == "component":
                absent.add(name)
            fact = f"'{name}' is no {kind} of '{card.model}'"
            yield UnknownKeyError(document.place([*path, name]), fact, nearest(name, known[kind]), key=name)


def _names(
    card: Card, networks: Collection[str], document: Document
) -> Iterator[tuple[str, list[str | int], Collection[str]]]:
    """Yields the kind, the path and the names of each section of a card with names of networks, components, strategies.

    For example `"network", ["strategies", "tp", "weights"], ["transformer", "vae"]`: they must be names of networks.
    """
    yield "network", ["stacks"], card.stacks
    for name, strategy in card.strategies.items():
        for key in ("weights", "inputs", "activations"):
            path: list[str | int] = ["strategies", name, key]
            # Rules that come from another strategy, by `like`, are refused there.
            rules = getattr(strategy, key)
            yield "network", path, [n for n in rules if strategy.like is None or (*path, n) in document.lines]
        for axis, number in strategy.divides.items():
            yield "network", ["strategies", name, "divides", axis], [number.split(".")[0]]
    yield "network", ["implementations"], list(card.implementations)
    for name, bound in card.score_bounds.items():
        yield "network", ["score_bounds", name, "component"], [bound.component]
    yield "component", ["tiny", "components"], card.tiny.components
    for name, component in card.components.items():
        yield "component", ["components", name, "like"], [] if component.like is None else [component.like]
    for name, strategy in card.strategies.items():
        yield "strategy", ["strategies", name, "like"], [] if strategy.like is None else [strategy.like]
    yield "component", ["tiny", "trained"], card.tiny.trained
    yield "component", ["tiny", "tokenizers"], card.tiny.tokenizers
    if card.call is None:
        yield "component", ["components"], networks
    else:
        yield "component", ["call"], card.call.components
