"""Writes a card's tiny checkpoint: the real classes, small and seeded, in the format of the published one.

Every parameter is random, and none keeps its initial value. Diffusion transformers initialise their output layers with
zeros, so a fresh one returns exactly 0, and every comparison with it passes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchport.config.card import Card, TinyTokenizer
from torchport.errors import BadValueError, OutputError
from torchport.files import cache
from torchport.progress import log

if TYPE_CHECKING:
    import torch

FILLER = "<|filler|>"
DONE = ".complete"
"""A file that marks a folder as written to its end."""


def folder_of(card: Card, family: Path) -> Path:
    """Returns where a card's tiny checkpoint lies, or will: named by all that determines its bytes.

    Args:
        card: The model card.
        family: The file of its family, which may arrange it in a layout of upstream's own.
    """
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")}
    text = json.dumps([card.tiny.model_dump(), card.model_dump()["components"], versions], sort_keys=True)
    sha = hashlib.sha256(text.encode())
    for file in (Path(__file__), family):
        sha.update(file.read_bytes())
    return cache.folder() / "tiny" / f"{card.model}-{sha.hexdigest()[:12]}"


Make = Callable[..., Any]
"""Returns one tiny component by its name in the card, drawn; keywords change its configuration."""


def write(card: Card, family: Path, arrange: Callable[[Make, Path], None] | None = None) -> Path:
    """Returns the folder of the card's tiny checkpoint, writing it first if it is not there.

    It is written beside its place and renamed, so that neither two processes nor a killed one leave half of it.

    Args:
        card: The model card.
        family: The file of its family.
        arrange: Saves the components it makes into a folder, in a layout of upstream's own; by default the card's
            pipeline saves itself.

    Raises:
        OutputError: The cache folder cannot be written.
        BadValueError: The card's tokenizer section cannot be fulfilled.
    """
    folder = folder_of(card, family)
    if (folder / DONE).is_file():
        return folder
    log.info("write the tiny checkpoint of %s to %s ...", card.model, folder)
    cache.make(folder.parent)
    cache.remove_leftovers(folder.parent, f"{folder.name}.*")
    try:
        work = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    except OSError as error:
        raise OutputError(
            str(folder.parent),
            f"The cache folder cannot be written: {error.strerror}",
            f"Free some space there, or name another folder with {cache.VARIABLE}",
        ) from error
    try:
        with _Writing(folder.parent):
            make = functools.partial(_component, card)
            if arrange is not None:
                arrange(make, work)
            else:
                assert card.pipeline is not None
                _class_of(card.pipeline)(**{name: make(name) for name in card.components}).save_pretrained(work)
            (work / DONE).touch()
            try:
                work.rename(folder)
            except OSError:
                # Another process was faster; what it wrote is the same, bit for bit.
                if not (folder / DONE).is_file():
                    raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


class _Writing:
    """Turns a failure to write into the cache, in whichever library, into a refusal that names the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        """Nothing is to be done beforehand."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Raises OutputError in place of a system error; anything else passes."""
        from safetensors import SafetensorError

        reason = None
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif isinstance(error, SafetensorError) or kind is Exception:  # which is what tokenizers raises
            reason = _os_error(str(error))
        if reason is not None:
            remedy = f"Free some space there, or name another folder with {cache.VARIABLE}"
            raise OutputError(str(self.folder), f"The cache folder cannot be written: {reason}", remedy) from error


def _os_error(text: str) -> str | None:
    """Returns the system's reason in an error of Rust's standard library; None for any other error."""
    match = re.search(r"([^:]*) \(os error \d+\)", text)
    return match[1].strip() if match else None


def _component(card: Card, name: str, **changes: Any) -> Any:
    """Returns one tiny component."""
    cls = _class_of(card.components[name].class_)
    if name in card.tiny.tokenizers:
        return _tokenizer(cls, card.tiny.tokenizers[name], f"tiny.tokenizers.{name} of {card.model}")
    part = _part(cls, {**card.tiny.components.get(name, {}), **changes})
    if hasattr(part, "named_parameters"):
        randomise(part, card.tiny.seed, name, card.tiny.scale)
    return part


def _class_of(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _part(cls: Any, config: dict[str, Any]) -> Any:
    """Returns a small object of a class: transformers' models take a configuration object, all else keywords."""
    config_class = getattr(cls, "config_class", None)
    return cls(config_class(**config)) if config_class else cls(**config)


def randomise(module: torch.nn.Module, seed: int, what: str, scale: float) -> None:
    """Draws every parameter from its own generator, so that the order of modules does not matter.

    Args:
        module: In host memory; changed in place.
        seed: The card's.
        what: The component's name; two components with equal shapes differ.
        scale: Standard deviation times sqrt(fan-in) of weights; gains lie around 1, biases around 0.
    """
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            word = hashlib.sha256(f"{seed}/{what}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(word[:7], "little"))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.squeeze().ndim <= 1:
                gain = name.endswith(("weight", "gamma"))
                parameter.copy_(float(gain) + 0.1 * noise)
            else:
                parameter.copy_(noise * scale / parameter[0].numel() ** 0.5)


def _tokenizer(cls: Any, spec: TinyTokenizer, place: str) -> Any:
    """Returns a tokenizer of the real class, trained on a few sentences.

    Upstream crops a fixed number of tokens, its template's prefix; the tiny one is filled up to exactly that number,
    or template tokens would count as prompt.
    """
    from tokenizers import Tokenizer

    system = _system_message(spec.system_message_of) if spec.system_message_of else ""
    trained: Tokenizer = cls()._tokenizer
    from tokenizers import pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    trained.train_from_iterator([*spec.corpus, system], trainer)
    model = json.loads(trained.to_str())["model"]
    arguments: dict[str, Any] = {
        "vocab": model["vocab"],
        "merges": [tuple(merge) for merge in model["merges"]],
        "eos_token": spec.eos_token,
        "pad_token": spec.pad_token,
        "padding_side": "right",
        "additional_special_tokens": [*spec.special_tokens, FILLER],
    }
    bare = cls(**arguments, chat_template=spec.chat_template.replace("{filler}", ""))
    if spec.prefix_tokens is None:
        return bare
    used = _prefix_length(bare, system)
    if used > spec.prefix_tokens:
        raise BadValueError(
            place,
            f"'vocab_size' is {spec.vocab_size}, and the template's prefix takes {used} tokens",
            f"Raise it until the prefix takes at most {spec.prefix_tokens}",
        )
    filler = FILLER * (spec.prefix_tokens - used)
    return cls(**arguments, chat_template=spec.chat_template.replace("{filler}", filler))


def _prefix_length(tokenizer: Any, system: str) -> int:
    """Returns how many tokens precede the user's text, by where two different texts begin to differ."""
    first, second = (
        tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": text}], tokenize=True, return_dict=True
        )["input_ids"]
        for text in ("0", "1")
    )
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)


def _system_message(path: str) -> str:
    """Returns the default of the argument `system_message` of an upstream function, `module:Class.function`."""
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for attribute in name.split("."):
        function = getattr(function, attribute)
    return str(inspect.signature(function).parameters["system_message"].default)
