"""Builds a module without storage, fills it from its files, and accounts for every key."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchport.errors import (
    BadValueError,
    CheckpointForeignError,
    MissingKeyError,
    TorchportError,
    UnfilledWeightError,
    UnknownKeyError,
    UnknownNameError,
    nearest,
)
from torchport.load import checkpoint, modular, renaming
from torchport.load.foreign import reading
from torchport.load.layout import DIFFUSERS, Layout, Stored
from torchport.progress import track

SAME = "Name a checkpoint of this model and version"
"""The remedy for files of another model."""


def class_of(path: str, place: str | None = None) -> Any:
    """Returns the class that a card names as `package.module:Class`; patches must be in place by now.

    Of a modular pipeline of diffusers it returns the subclass of `modular.as_pipeline`.

    Raises:
        UnknownNameError: There is no such module or name; its place is `place`, by default the path itself.
    """
    module, _, name = path.partition(":")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module itself may be there, and import another that is not.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        package, _, missing = error.name.rpartition(".")
        if not package:
            fact, remedy = f"There is no package '{missing}' for '{module}'", "Install it, or mend the name"
        else:
            siblings = pkgutil.iter_modules(getattr(sys.modules[package], "__path__", ()))
            fact = f"'{package}' has no module '{missing}'"
            remedy = _closest(missing, [sibling.name for sibling in siblings])
        raise UnknownNameError(place or path, fact, remedy, name=error.name) from error
    try:
        return modular.as_pipeline(getattr(home, name))
    except AttributeError as error:
        if name in dir(home):  # a lazy package imports it now, and that fails
            raise
        fact = f"'{module}' has no class '{name}'"
        raise UnknownNameError(place or path, fact, _closest(name, dir(home)), name=name) from error


def _closest(name: str, names: Iterable[str]) -> str:
    """Returns a remedy with the few names that are closest to a name; a package has too many to list all."""
    public = sorted(other for other in names if not other.startswith("_"))
    close = difflib.get_close_matches(name, public, n=3, cutoff=0.6)
    if not close:
        return nearest(name, public) if len(public) <= 10 else f"None of its {len(public)} names is like it"
    words = ", ".join(map(repr, close))
    verb = "are" if len(close) > 1 else "is"
    return f"The nearest {verb} {words}"


@dataclasses.dataclass(frozen=True)
class Builder:
    """A card's function that builds a module."""

    function: Callable[..., torch.nn.Module]
    class_path: str  #: What it must return a module of, `package.module:Class`.
    reference: str  #: How the card names it, `file.py:function`.


Maker = str | Builder
"""What builds a module: a class as `package.module:Class`, or a function."""


class Recipe(NamedTuple):
    """How a module is built: by what, and from which configuration."""

    maker: Maker
    config: Mapping[str, Any]
    place: str
    """Where the configuration is written, for errors."""


def build(maker: Maker, config: Mapping[str, Any], dtype: str, place: str) -> torch.nn.Module:
    """Returns a module without storage: weights on meta, buffers real, in evaluation mode.

    Buffers that no file holds are computed by the class's own constructor, under the default dtype that upstream's
    own loading would set.

    Args:
        config: As the checkpoint's `config.json` has it, or else keyword arguments.
        dtype: Of floating-point weights; what the class keeps in float32 stays float32.
    """
    from accelerate import init_empty_weights

    with default_dtype(getattr(torch, dtype)):
        with init_empty_weights(include_buffers=False):
            module = _construct(maker, config, place)
        return _cast(module, getattr(torch, dtype))


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts floating-point weights, except those that the class keeps in float32, as upstream's own loading does."""
    float32_names = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if float32_names & set(name.split(".")) else dtype)
    return module


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets PyTorch's default dtype while the context lasts, for tensors that upstream creates without naming one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def published(
    maker: Maker, config: Mapping[str, Any], place: str = "the card", dtype: str | None = None
) -> torch.nn.Module:
    """Returns a module with all weights and buffers on meta: shapes for planning, without a checkpoint; see `build`."""
    from accelerate import init_empty_weights

    with contextlib.nullcontext() if dtype is None else default_dtype(getattr(torch, dtype)):
        if _takes_arguments(maker):
            # Its buffers are real first: many constructors read values that they compute.
            with init_empty_weights(include_buffers=False):
                module = _construct(maker, config, place)
            for part in module.to("meta").modules():
                # `to` has moved parameters and buffers, and no tensors that are plain attributes.
                attributes = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
                vars(part).update({name: value.to("meta") for name, value in attributes.items()})
        else:
            with torch.device("meta"):
                module = _construct(maker, config, place)
        return module if dtype is None else _cast(module, getattr(torch, dtype))


def _takes_arguments(maker: Maker) -> bool:
    """Whether a module is built from keyword arguments, and not by diffusers' `from_config`."""
    return isinstance(maker, Builder) or not hasattr(class_of(maker), "from_config")


def configuration(module: torch.nn.Module) -> dict[str, Any]:
    """Returns a module's configuration by name: diffusers' own, or the arguments that it was built from."""
    config: Any = module.config
    return dict(config if isinstance(config, Mapping) else vars(config))


def _construct(maker: Maker, config: Mapping[str, Any], place: str) -> torch.nn.Module:
    """Returns a module in evaluation mode, built from keyword arguments or by diffusers' `from_config`."""
    if _takes_arguments(maker):
        return from_arguments(maker, config, place).eval().requires_grad_(False)
    cls = class_of(str(maker))
    with building(cls.__name__, place):
        module: torch.nn.Module = cls.from_config(dict(config))
    return module.eval().requires_grad_(False)


def from_arguments(maker: Maker, config: Mapping[str, Any], place: str) -> torch.nn.Module:
    """Returns a module that a class's constructor or a card's function makes; refuses a module of another class."""
    function: Callable[..., torch.nn.Module]
    if isinstance(maker, Builder):
        function = maker.function
        cls = class_of(maker.class_path)
        name = maker.reference
    else:
        function = cls = class_of(maker)
        name = cls.__name__
        if hasattr(cls, "config_class"):  # transformers' take a configuration object
            function = lambda **values: cls(cls.config_class(**values))  # noqa: E731
    arguments = _arguments(function, config, name, place)
    with building(name, place, BadValueError, "Mend the arguments"):
        module = function(**config)
    is_right: bool = isinstance(module, cls)
    if not is_right:
        fact = f"{name} returns a '{type(module).__name__}'"
        raise BadValueError(place, fact, f"It must return a {cls.__name__}, the component's 'class'")
    # Families read it.
    if not hasattr(module, "config"):
        vars(module)["config"] = arguments
    return module


def _arguments(function: Callable[..., Any], config: Mapping[str, Any], name: str, place: str) -> dict[str, Any]:
    """Returns a call's arguments by name, with defaults; refuses unknown and missing ones."""
    signature = inspect.signature(function)
    kinds = {key: parameter.kind for key, parameter in signature.parameters.items()}
    var_keyword = next((key for key, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), None)
    known = [key for key, kind in kinds.items() if key != var_keyword and kind is not inspect.Parameter.VAR_POSITIONAL]
    unknown = [key for key in config if key not in known]
    if unknown and var_keyword is None:
        fact = f"{name} has no argument '{unknown[0]}'"
        raise UnknownKeyError(place, fact, nearest(unknown[0], known), key=unknown[0])
    bound = signature.bind_partial(**config)
    bound.apply_defaults()
    needed = [key for key in known if key not in bound.arguments]
    if needed:
        raise MissingKeyError(place, f"{name} needs the argument '{needed[0]}'", f"Add '{needed[0]}'", key=needed[0])
    arguments = {key: value for key, value in bound.arguments.items() if key in known}
    return arguments | (bound.arguments[var_keyword] if var_keyword is not None else {})


MOST = 20_000
"""Parameters of a module, at most: building more than any real model has would use up the memory."""


@contextlib.contextmanager
def building(
    name: str, place: str, kind: type[TorchportError] = CheckpointForeignError, remedy: str = SAME
) -> Iterator[None]:
    """Turns failures of code that builds a module into an error; refuses a module of more than `MOST` parameters."""
    count = itertools.count(1)

    def check_count(*_: object) -> None:
        if next(count) > MOST:
            raise ValueError(f"it asks for more than {MOST} parameters")

    fact = f"{name} cannot be built from it"
    with register_module_parameter_registration_hook(check_count), reading(kind, place, fact, remedy):
        yield


def tensors(
    module: torch.nn.Module, folder: Path, what: str, layout: Layout = DIFFUSERS
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and values of every parameter and buffer of a module, from a component's files with LoRAs merged in.

    Args:
        module: Built without storage. The tensors are cast to its dtypes.
        what: What the progress bar calls it.
    """
    state = module.state_dict()
    stored = account(module, folder, layout)
    added = layout.additions(state, stored)
    for name, buffer in module.named_buffers():
        if name not in state:
            yield name, check_filled(name, buffer, folder)
    for name, tensor in track(layout.tensors(stored), f"load {what}", "tensor", total=len(stored)):
        yield name, added.merged(name, tensor).to(state[name].dtype)


def account(module: torch.nn.Module, folder: Path, layout: Layout = DIFFUSERS) -> dict[str, Stored]:
    """Returns where each tensor of a module is; refuses files with other keys, shapes or dtypes than the module's."""
    state = module.state_dict()
    stored = layout.stored(folder)
    missing = sorted(set(state) - set(stored))
    foreign = sorted(set(stored) - set(state))
    if missing or foreign:
        parts = []
        if missing:
            parts.append(f"lacks {len(missing)} of the model's tensors (first '{missing[0][:120]}')")
        if foreign:
            parts.append(f"holds {len(foreign)} that the model has not (first '{foreign[0][:120]}')")
        fact, remedy = f"It {' and '.join(parts)}", "or name a checkpoint of this model"
        if layout == DIFFUSERS and hasattr(module, "from_config"):
            remedy = SAME
        elif missing and foreign:
            remedy = f"{renaming.closest(missing[0], foreign)}: mend the rules under 'rename', {remedy}"
        elif missing:
            remedy = f"Mend 'unread' and the rules under 'rename', {remedy}"
        else:
            remedy = f"Name what the model does not use under 'unread', {remedy}"
        raise CheckpointForeignError(str(layout.place(folder)), fact, remedy, missing=missing, foreign=foreign)
    for name, (file, name_in_file, dtype, shape) in stored.items():
        if tuple(shape) != tuple(state[name].shape):
            fact = f"'{name_in_file}' has shape {shape}"
            remedy = f"The model's has {list(state[name].shape)}: name a checkpoint of this model"
            raise CheckpointForeignError(str(file), fact, remedy, name=name)
        check_dtype(file, name_in_file, dtype, state[name].dtype)
    return stored


def check_dtype(file: Path, name: str, dtype: str, target: torch.dtype) -> None:
    """Refuses a tensor whose dtype in the file cannot become the module's: only floats may be cast, to floats."""
    word = str(target).removeprefix("torch.")
    loadable = list(checkpoint.FLOATS) if target.is_floating_point else [checkpoint.CODES[word]]
    if dtype not in loadable:
        fact = f"'{name}' is of dtype {dtype}, and the model's is {word}"
        remedy = f"Name a checkpoint whose '{name}' is of {' or '.join(loadable)}"
        raise CheckpointForeignError(str(file), fact, remedy, name=name)


def check_filled(name: str, tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """Returns a tensor; refuses one that is still on meta after loading."""
    if tensor.is_meta:
        fact = f"'{name}' has no storage after loading"
        remedy = "It is a buffer that the files do not hold: report it, the class must compute it"
        raise UnfilledWeightError(str(folder), fact, remedy, name=name)
    return tensor


def fill_buffers(module: torch.nn.Module, folder: Path, layout: Layout = DIFFUSERS) -> None:
    """Fills a module's buffers, such as the mean of a VAE's latents, from a component's files; weights stay on meta."""
    state = module.state_dict()
    names = {name for name, _ in module.named_buffers()} & state.keys()
    if names:
        stored = {name: where for name, where in layout.stored(folder).items() if name in names}
        buffers = {name: tensor.to(state[name].dtype) for name, tensor in layout.tensors(stored)}
        module.load_state_dict(buffers, assign=True, strict=False)


def fill(module: torch.nn.Module, folder: Path, what: str, layout: Layout = DIFFUSERS) -> torch.nn.Module:
    """Fills every tensor of a module, in host memory, and returns the module; refuses the same files as `tensors`."""
    filled = dict(tensors(module, folder, what, layout))
    names = module.state_dict().keys()
    state = {name: tensor for name, tensor in filled.items() if name in names}
    module.load_state_dict(state, assign=True, strict=True)
    module.requires_grad_(False)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_filled(name, tensor, folder)
    return module
