"""What a family of models is made of: stages as plain functions of tensors, and what they are called with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from torchport.config.card import StageName
from torchport.errors import ArtefactForeignError, BadValueError, ReplacementError, nearest
from torchport.files.folder import as_named
from torchport.progress import log

Parts = Mapping[str, Any]
"""Components of a model, by name."""
Tensors = dict[str, torch.Tensor]
"""Tensors by name, such as the inputs or outputs of a stage."""


class Call(Protocol):
    """One network, ready to be called: the module itself in PyTorch, or its program on the mesh."""

    batches: bool = False
    """Whether it takes the conditions of guidance as one batch, or one after the other as upstream does."""
    drops: bool = False
    """Whether masked tokens are left out before the call; the original keeps them."""

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns inputs of many calls, moved to where the network wants them: the devices, or by default nowhere."""
        return inputs

    def __call__(self, **inputs: Any) -> Any:
        """Calls the network.

        Args:
            **inputs: Tensors in host memory; what `place` or an earlier call returned; and tuples, lists and dicts of
                these, None among them, whose tensors the card's rules call by their paths: `cache.0`, `cache.conv1.0`.
                Anything else is a static argument: there is one program for each of its values.

        Returns:
            The network's first output as a tensor in host memory. If the stage names its outputs (`Stage.outputs`), a
            tuple with all of them: tensors, and tuples, lists and dicts of tensors, in host memory. Those in
            `Stage.keeps` stay on the devices. They can only be passed to a later call, and each once: that call may
            write its own outputs over them.
        """


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to make: the fields of the config, and the flags of the command line."""

    prompt: str
    """What the video shows."""
    negative_prompt: str
    """What the video does not show."""
    seed: int
    """The seed of the noise."""
    height: int
    """The video's height in pixels."""
    width: int
    """The video's width in pixels."""
    frames: int
    """The video's number of frames."""
    steps: int
    """The number of denoising steps."""
    guidance_scale: float
    """The scale of classifier-free guidance; 1.0 is off."""
    dtypes: Mapping[str, torch.dtype]
    """The dtype of each component that has weights, by name."""
    vae_tiling: bool | None
    """Whether the VAE decodes in overlapping tiles; None: as upstream does."""
    variant: str | None = None
    """Which of several networks in the checkpoint is used."""
    image: Path | None = None
    """A file with the first frame, or the video to edit."""
    text_bucket: int | None = None
    """Text tokens are cut to the longest prompt's, rounded up to a multiple of this; None: none are cut."""
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the pipeline that the config sets."""
    guider: Mapping[str, Any] | None = None
    """The class of the guider that the config sets, under `class`, and its arguments; None: the checkpoint's."""
    scheduler: Mapping[str, Any] | None = None
    """The same of the scheduler."""
    frame_rate: int = 24
    """The video's frames a second."""

    def traced(self) -> Settings:
        """Returns the settings that a network is called with while it is traced: those its program may depend on. The
        others are blank, so that no program can depend on them unseen.
        """
        return dataclasses.replace(self.shared(), steps=0, guider=None, scheduler=None)

    def shared(self) -> Settings:
        """Returns the settings that a stage is loaded with: those in which all videos of one shape agree. The others
        are blank, so that a stage that is loaded once can serve several videos.
        """
        image = None if self.image is None else Path("image")
        return dataclasses.replace(self, prompt="", negative_prompt="", seed=0, image=image)


ALWAYS = "always"
"""`TAKES_IMAGE` of a family that makes no video without an image."""

PIECE = 256
"""Attention kernels read keys in pieces of this many. A sequence of whole pieces needs no padding in each block."""


def fit_text(
    values: Sequence[Sequence[torch.Tensor]], bucket: int | None, others: int | None = None
) -> list[list[torch.Tensor]]:
    """Returns tokens and masks of prompts with the padding that suits the program; a masked token changes nothing.

    Args:
        values: Tokens [1, L, D] of each condition of guidance, their masks [1, L], nonzero if valid, and so on in
            pairs, one pair for each text encoder.
        bucket: Padding that all conditions share is cut, to a multiple of this, so that similar prompts share a
            program; None: it stays.
        others: Tokens of the text's stream beside these: the first pair is padded until all are a multiple of
            `PIECE`; None: it is not.
    """
    fitted = [list(value) for value in values]
    if bucket:
        for n in range(0, len(fitted), 2):  # tokens at n, their masks at n + 1
            lengths = [int(mask.bool().nonzero()[:, 1].max()) + 1 if mask.any() else 1 for mask in fitted[n + 1]]
            length = -(-max(lengths) // bucket) * bucket  # of the longest prompt, rounded up
            fitted[n], fitted[n + 1] = ([part[:, :length] for part in group] for group in fitted[n : n + 2])
    if others is not None:
        padding = -(others + sum(group[0].shape[1] for group in fitted[::2])) % PIECE
        fitted[0] = [torch.nn.functional.pad(tokens, (0, 0, 0, padding)) for tokens in fitted[0]]
        fitted[1] = [torch.nn.functional.pad(mask, (0, padding)) for mask in fitted[1]]
    return fitted


Kept = Callable[[], Mapping[str, torch.Tensor]]
"""Returns what is saved beside a loop's state, on the host."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """The loop's progress bar, its callback after each step, and the state from which it resumes."""

    track: Callable[..., Iterable[Any]] = lambda items, done, total: items
    """Iterates the remaining steps under a progress bar: `track(items, done=, total=)`."""
    finished: Callable[..., None] = lambda number, state, timestep=None, kept=None: None
    """To be called after each step, `finished(number, state, timestep=None, kept=None)`: its number, from 1; all
    tensors that the loop needs to continue after it, by names of the family's own, a scheduler's history among them;
    its timestep, for errors; and a function of further tensors to save, which the loop does not know. It saves the
    state if it is time, and stops the run if that is requested. NaN or infinity in the state is refused."""
    resume: tuple[int, Mapping[str, torch.Tensor]] | None = None
    """The number of finished steps and the state that a stopped run passed to `finished` after them; None for a loop
    that starts at its beginning."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a family."""

    name: StageName
    """encode, encode_image, denoise_first, denoise or decode. A family has encode_image only if an image goes through a
    network that is compiled, and denoise_first only if two networks take turns."""
    run: Callable[..., dict[str, torch.Tensor]]
    """The stage's function: `run(parts, call, settings, steps, **inputs)` returns its outputs, tensors by name."""
    uses: tuple[str, ...]
    """The names of the settings that change its outputs. A stage is made again if one of these differs."""
    needs: tuple[StageName, ...] = ()
    """The stages whose outputs are its inputs."""
    parts: tuple[str, ...] = ()
    """The components that it uses whole, on the host."""
    network: str | None = None
    """The component that is compiled; None for a stage that runs in PyTorch on the host."""
    submodule: str = ""
    """The part of the network that is compiled, such as `decoder`; "" for all of it. The other parts have their weights
    on the host."""
    without: tuple[str, ...] = ()
    """Modules of the network that this stage never calls, such as `encoder`: they are removed before its weights are
    placed, and their tensors in the checkpoint are not read. Names that it lacks are skipped."""
    meta: tuple[str, ...] = ()
    """The components of which it needs only the configuration. They are built without weights."""
    prepare: Callable[[Mapping[str, Any], Settings], None] | None = None
    """Changes the network after it is built and before its weights are placed, `prepare(parts, settings)`: constants
    that depend on the settings become buffers here. The network serves several videos: prompts, the seed and the
    image's name are blank."""
    like: Callable[[Mapping[str, Any], Settings], dict[str, torch.Tensor]] | None = None
    """Returns tensors with the shapes and dtypes of its inputs, `like(parts, settings)`; the checks before a run,
    `shard show` and `plan` call the stage with them."""
    open_dims: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    """By input, the dims that may have another size than there: the number of a prompt's tokens."""
    load: Callable[[Path, Settings], dict[str, Any]] | None = None
    """Returns the parts that upstream loads with functions of its own: `load(folder of the checkpoint, settings)`, with
    the settings of `prepare`."""
    loads: Callable[[Settings], tuple[str, ...]] = lambda settings: ()
    """Returns the names of the components that `load` reads, `loads(settings)`; their files are checked first."""
    call: Callable[..., Any] | None = None
    """How the network is called, `call(module, settings=..., **inputs)`; by default with the inputs as keywords. It is
    traced. A tensor that it makes on the host becomes a constant of the program when it meets one of the network's."""
    outputs: tuple[str, ...] = ()
    """Names of what the network returns, in the order of a tuple or list, or else its keys or attributes: `("frames",
    "cache")`. With them a call returns a tuple of all; without them the first output alone."""
    keeps: tuple[str, ...] = ()
    """Those of `outputs` that stay on the devices: caches, which are inputs of the same name in a later call. The
    card's rules for inputs say where each of their tensors lies, by its path: `cache.0`."""

    def __post_init__(self) -> None:
        # A text in place of a tuple is refused as one name, not letter by letter.
        for name in (self.keeps,) if isinstance(self.keeps, str) else self.keeps:
            if name not in self.outputs:
                fact = f"'{name}' in `keeps` is no name in `outputs`"
                raise BadValueError(f"Stage '{self.name}'", fact, nearest(name, self.outputs), name=name)


def with_image(stages: Iterable[Stage]) -> list[str]:
    """Returns the names of the stages that read the image."""
    return [stage.name for stage in stages if "image" in stage.uses]


def check_outputs(stage: Stage, outputs: Any) -> None:
    """Raises if a stage returned no dict of tensors, a tensor on meta, or as `denoise_first` no step count `done`."""
    remedy = "Return the stage's outputs as a dict of tensors by name"
    if not isinstance(outputs, dict):
        fact = f"a {type(outputs).__name__}"
    else:
        wrong = [name for name, x in outputs.items() if not isinstance(x, torch.Tensor) or x.is_meta]
        if wrong and isinstance(outputs[wrong[0]], torch.Tensor):
            fact = f"'{wrong[0]}' without values: it was computed with weights on meta"
            remedy = "Add what computes it to the stage's `parts`"
        elif wrong:
            fact = f"a {type(outputs[wrong[0]]).__name__} as '{wrong[0]}'"
        elif stage.name == "denoise_first" and "done" not in outputs:
            fact = "no 'done', the number of steps that it took"
        else:
            return
    code = inspect.unwrap(stage.run).__code__
    place = f"{as_named(Path(code.co_filename))}:{code.co_firstlineno}"
    raise ReplacementError(place, f"'{code.co_name}' returns {fact}", remedy)


def check_inputs(stage: Stage, parts: Mapping[str, Any], settings: Settings, inputs: Mapping[str, Any]) -> None:
    """Refuses inputs, which earlier stages returned, of other shapes than these settings have."""
    for name, example in stage.like(parts, settings).items() if stage.like is not None else ():
        if name not in inputs:
            continue
        # Dims are open for an input, or for all inputs whose names begin with the same word: `before.0`.
        open_dims = stage.open_dims.get(name, stage.open_dims.get(name.partition(".")[0], ()))
        sizes = enumerate(zip(inputs[name].shape, example.shape, strict=False))
        differing = {dim for dim, (size, expected) in sizes if size != expected}
        if inputs[name].ndim != example.ndim or differing - set(open_dims):
            fact = f"'{name}' has shape {list(inputs[name].shape)}, and this run takes {list(example.shape)}"
            remedy = f"Run --stage {stage.needs[0]} with this model, checkpoint and size"
            raise ArtefactForeignError(f"{stage.needs[0]}.safetensors", fact, remedy, name=name)


def latents_like(
    parts: Mapping[str, Any], settings: Settings, *, space: str, time: str, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Returns latents of the shape and dtype that a VAE decodes: `like` of a stage.

    Args:
        parts: The VAE.
        space: The name in its configuration of the pixels along a side of a latent position.
        time: The name of the frames of a latent frame.
        dtype: Of the latents, by default the transformer's.
    """
    config = parts["vae"].config
    sides = [
        1 + (settings.frames - 1) // config[time],
        settings.height // config[space],
        settings.width // config[space],
    ]
    latents = torch.zeros(1, config["latent_channels"], *sides, dtype=dtype or settings.dtypes["transformer"])
    return {"latents": latents}


def check_noise(latents: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Refuses latents to start from that do not have the job's shape, [1, *sizes] with C, T, H, W as `sizes`. Dims in
    another order would pass all later checks.
    """
    if tuple(latents.shape) != (1, *sizes):
        fact = f"It has the shape {list(latents.shape)}"
        raise BadValueError("noise", fact, f"For this height, width and frames it must be {[1, *sizes]}")


def note_tiles(latents: torch.Tensor, count: int) -> None:
    """Warns in the log that decoding in `count` tiles computes another function than decoding the whole video. Logs
    nothing for one tile, or for latents without values.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if count > 1 and not isinstance(latents, FakeTensor):
        log.warning(
            "decode: %d tiles are another function than the whole decoder, with seams where they are blended. "
            "`vae_tiling: false` decodes the whole video.",
            count,
        )


class CallModule(torch.nn.Module):
    """Takes the place of a module with one input in upstream's code, and passes the input on to a call.

    Args:
        call: What computes in its place.
        name: The input, as the module's `forward` names it.
        progress: Advanced before each call.
    """

    def __init__(self, call: Callable[..., torch.Tensor], name: str, progress: Iterator[Any]) -> None:
        super().__init__()
        self.call = call
        self.name = name
        self.progress = progress

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        next(self.progress, None)
        output: torch.Tensor = self.call(**{self.name: tensor})
        return output
