"""Writes a card's tiny checkpoint: the real classes, small and seeded, in the format of the published one.

Where the card has trained weights of a component, they take the place of the random ones.

Its components are saved by the card's pipeline, by the family's `arrange_tiny`, or where and as the card says.

Every parameter is random, and none keeps its initial value. Diffusion transformers initialise their output layers with
zeros, so a fresh one returns exactly 0, and every comparison with it passes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import io
import json
import os
import pkgutil
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchport.config.card import Card, TinyTokenizer, Trained
from torchport.errors import (
    BadValueError,
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    OutputError,
)
from torchport.files import cache
from torchport.load import renaming
from torchport.load.layout import Layout
from torchport.load.module import Builder, Maker, class_of, from_arguments
from torchport.progress import log

if TYPE_CHECKING:
    import torch

FILLER = "<|filler|>"
DONE = ".complete"
"""A file that marks a folder as written to its end: it has the checksum of each of the other files."""


def folder_of(card: Card, family: Path) -> Path:
    """Returns the folder of a card's tiny checkpoint, named by a hash of all that determines its bytes."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")}
    init = {} if card.call is None else card.call.init
    parts = [card.tiny.model_dump(exclude={"trained"}), card.model_dump()["components"], init, versions]
    if card.tiny.trained:
        parts.append({name: each.sha256 for name, each in card.tiny.trained.items()})
    text = json.dumps(parts, sort_keys=True)
    sha = hashlib.sha256(text.encode())
    for file in (Path(__file__), Path(str(renaming.__file__)), *card.python_files(family)):
        sha.update(file.read_bytes() if file.is_file() else b"")
    return cache.folder() / "tiny" / f"{card.model}-{sha.hexdigest()[:12]}"


Make = Callable[..., Any]
"""Returns one tiny component by its name in the card, drawn; keywords change its configuration."""

Arrange = Callable[[Make, Path], None]
"""Saves the components that it makes into an empty folder, in a layout of upstream's own."""


def write(card: Card, family: Path, arrange: Arrange | None = None, makers: Mapping[str, Maker] | None = None) -> Path:
    """Returns the folder of the card's tiny checkpoint, after writing the checkpoint if the folder has none.

    The files are written into a folder beside it, which is then renamed: neither two processes nor a killed process
    leave half a checkpoint.

    Args:
        arrange: Saves the components; by default the card's pipeline saves itself.
        makers: What builds each component, by name; by default its class.
    """
    folder = folder_of(card, family)
    if _is_whole(folder):
        return folder
    why = " again, since a file of it is damaged" if os.path.lexists(folder) else ""
    log.info("write the tiny checkpoint of %s to %s%s ...", card.model, folder, why)
    cache.make(folder.parent)
    cache.remove_leftovers(folder.parent, f"{folder.name}.*")
    with _writing(folder.parent):
        work = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
        damaged = work.with_name(f"{work.name}.damaged")
        try:
            make = functools.partial(_component, card, makers or {})
            if arrange is not None:
                arrange(make, work)
            else:
                assert card.pipeline is not None
                init = {} if card.call is None else card.call.init
                pipe = class_of(card.pipeline)(**{name: make(name) for name in card.components}, **init)
                pipe.save_pretrained(work)
            (work / DONE).write_bytes(_checksums(work))
            try:
                if os.path.lexists(folder) and not _is_whole(folder):
                    folder.rename(damaged)
                work.rename(folder)
            except OSError:
                # Another process was faster; what it wrote is the same, bit for bit.
                if not _is_whole(folder):
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(damaged, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Returns whether a folder holds a tiny checkpoint, every byte as it was written."""
    try:
        return (folder / DONE).read_bytes() == _checksums(folder)
    except OSError:  # a file is missing, or cannot be read
        return False


def _checksums(folder: Path) -> bytes:
    """Returns a line for each file in a folder, with its SHA-256."""
    files = sorted(file for file in folder.rglob("*") if not file.is_dir() and file != folder / DONE)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}\n" for file in files]
    return os.fsencode("".join(lines))


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns a failure to write into the cache, in whichever library, into a refusal that names the folder."""
    from safetensors import SafetensorError

    try:
        yield
    except BaseException as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else None
        if isinstance(error, SafetensorError) or type(error) is Exception:  # tokenizers raises the bare class
            match = re.search(r"([^:]*) \(os error \d+\)", str(error))  # as Rust's standard library writes it
            reason = match[1].strip() if match else None
        if reason is None:
            raise
        remedy = f"Free some space there, or name another folder with {cache.VARIABLE}"
        raise OutputError(str(folder), f"The cache folder cannot be written: {reason}", remedy) from error


def _component(card: Card, makers: Mapping[str, Maker], name: str, /, **changes: Any) -> Any:
    """Returns one component of a tiny checkpoint: a tokenizer, or an object with seeded or trained weights. `changes`
    are fields of its configuration in place of the card's; one of them may be called `name`, too.
    """
    maker = makers.get(name, card.components[name].class_)
    if name in card.tiny.tokenizers:
        return tokenizer(class_of(str(maker)), card.tiny.tokenizers[name], f"tiny.tokenizers.{name} of {card.model}")
    import torch

    config, place = {**card.tiny.components.get(name, {}), **changes}, f"tiny.components.{name} of {card.model}"
    cls = None if isinstance(maker, Builder) else class_of(maker)
    # Classes of diffusers record their configuration themselves; for other modules `from_arguments` does it.
    is_plain_module = cls is None or (hasattr(cls, "forward") and not hasattr(cls, "from_config"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(card.tiny.seed)  # a constructor may draw buffers
        if is_plain_module:
            part: Any = from_arguments(maker, config, place)
        else:
            part = class_of(str(maker))(**config)
    if hasattr(part, "named_parameters"):
        randomise(part, card.tiny.seed, name, card.tiny.scale)
    if name in card.tiny.trained:
        _copy_trained(part, card.tiny.trained[name])
    return part


def _copy_trained(module: torch.nn.Module, trained: Trained) -> None:
    """Copies trained tensors from the card's file into a module; refuses another file, name or shape."""
    import safetensors.torch
    import torch

    file, remedy = Path(trained.file), "Restore the file, or run with --checkpoint tiny:random"
    if not file.is_file():
        raise CheckpointMissingError(trained.file, "There is no such file of trained tiny weights", remedy)
    raw = file.read_bytes()
    if hashlib.sha256(raw).hexdigest() != trained.sha256:
        raise CheckpointBrokenError(trained.file, "Its checksum is not the one in the card", remedy)
    state = module.state_dict()
    for name, tensor in safetensors.torch.load(raw).items():
        if name not in state or state[name].shape != tensor.shape:
            fact = f"It has '{name}' of {list(tensor.shape)}, and the {type(module).__name__} of the card has not"
            raise CheckpointForeignError(trained.file, fact, "Train it again for this card", name=name)
        with torch.no_grad():
            state[name].copy_(tensor)


_SINGLE = "model.safetensors"
"""The file of tensors where a card names none, and the class does not write its own."""


def save_in_layouts(card: Card, layouts: Mapping[str | None, Mapping[str, Layout]], make: Make, folder: Path) -> None:
    """Saves components by `save_pretrained`, or in their layouts, which are by variant and then component."""
    #: The files of components without a format of their own, which may share a file: what each is to hold.
    contents: dict[Path, dict[str, Any]] = {}
    for variant, by_component in layouts.items():
        for name, layout in by_component.items():
            part, place = make(name), folder / card.folder(name, variant)
            if layout.file is None and not layout.rename and hasattr(part, "save_pretrained"):
                part.save_pretrained(place)
                continue
            if not hasattr(part, "state_dict") or not hasattr(part, "forward"):
                remedy = "Write the function 'arrange_tiny' in the family, which saves it"
                raise BadValueError(f"components.{name}", f"A {type(part).__name__} has no 'save_pretrained'", remedy)
            if layout.file is None and hasattr(part, "save_config"):
                part.save_config(place)
            state = {key: tensor.detach().clone() for key, tensor in part.state_dict().items()}
            names = renaming.file_names(state, layout.rename, layout.places, layout.is_unread)
            tree = contents.setdefault(place / (layout.file or _SINGLE), {})
            words = [] if layout.key is None else layout.key.split(".")
            for word in words:
                tree = tree.setdefault(word, {})
            tree.update({names[key]: tensor.contiguous() for key, tensor in state.items()})
    for file, tree in contents.items():
        _write_tensors(file, tree)


def _write_tensors(file: Path, tensors: dict[str, Any]) -> None:
    """Writes a file of tensors in the format of its name: safetensors, an index with one shard, or `torch.save`."""
    import safetensors.torch
    import torch

    file.parent.mkdir(parents=True, exist_ok=True)
    if file.name.endswith(".index.json"):
        shard = file.name.removesuffix(".safetensors.index.json") + "-00001-of-00001.safetensors"
        file.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}))
        file = file.with_name(shard)
    # The bytes are written here: the libraries' own writers do not say that a disk is full.
    if file.name.endswith(".safetensors"):
        file.write_bytes(safetensors.torch.save(tensors, {"format": "pt"}))
        return
    stream = io.BytesIO()
    torch.save(tensors, stream)
    file.write_bytes(stream.getvalue())


def randomise(module: torch.nn.Module, seed: int, what: str, scale: float) -> None:
    """Draws every parameter from its own generator, so that the order of modules does not matter.

    Args:
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


def is_processor(cls: Any) -> bool:
    """Returns whether a class is a processor of transformers: a tokenizer with what prepares images and videos."""
    import transformers

    return issubclass(cls, transformers.ProcessorMixin)


def tokenizer_class(cls: Any, model_type: str | None = None) -> Any:
    """Returns a tokenizer's class of transformers: the class itself; of a processor, the class of its tokenizer; of
    `AutoTokenizer`, the class that it loads for models of the kind `model_type`.
    """
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    if not is_processor(cls) and cls is not transformers.AutoTokenizer:
        return cls
    name = TOKENIZER_MAPPING_NAMES.get(_model_type(cls) if is_processor(cls) else model_type)
    # A TokenizersBackend is made of its file alone. A T5Tokenizer, which can be trained, takes its place.
    return getattr(transformers, name if name and name != "TokenizersBackend" else "T5Tokenizer")


def _model_type(processor: Any) -> str:
    """Returns the kind of model that a class of processors belongs to."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kinds: dict[str, str] = PROCESSOR_MAPPING_NAMES
    return next(kind for kind, name in kinds.items() if name == processor.__name__)


def processor(cls: Any, text_part: Any) -> Any:
    """Returns a processor with a tokenizer, `text_part`; its parts for images and videos have their default values."""
    parts = {name: part() for name, part in processor_classes(cls).items()}
    return cls(tokenizer=text_part, chat_template=text_part.chat_template, **parts)


def processor_classes(cls: Any) -> dict[str, Any]:
    """Returns the classes of a processor's parts for images and videos, by their names: `image_processor`."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
    from transformers.utils import is_torchvision_available

    kind, backend = _model_type(cls), "torchvision" if is_torchvision_available() else "pil"
    kinds = {"image_processor": IMAGE_PROCESSOR_MAPPING_NAMES, "video_processor": VIDEO_PROCESSOR_MAPPING_NAMES}
    parts = {name: kinds[name][kind].get(backend) for name in cls.get_attributes() if name != "tokenizer"}
    return {name: getattr(transformers, part) for name, part in parts.items() if part is not None}


def _marks(processor: Any) -> list[str]:
    """Returns the tokens by which a processor marks images and videos in a text, such as its `image_token`."""
    tokens = [value for name, value in vars(processor).items() if name.endswith("_token")]
    return list(dict.fromkeys(str(token) for token in tokens if token))


def tokenizer(cls: Any, spec: TinyTokenizer, place: str) -> Any:
    """Returns a tokenizer of the real class, trained on a few sentences; or a processor with such a tokenizer.

    Upstream crops a fixed number of tokens, the beginning of its chat template. The tiny template is filled up to this
    number with filler tokens, or upstream would crop words of the prompt.
    """
    if is_processor(cls):
        plain = tokenizer_class(cls)
        marks = _marks(processor(cls, plain()))
        spec = spec.model_copy(update={"special_tokens": [*spec.special_tokens, *marks]})
        return processor(cls, tokenizer(plain, spec, place))
    system = ""
    if spec.system_message_of:
        parameters = inspect.signature(pkgutil.resolve_name(spec.system_message_of)).parameters
        system = str(parameters["system_message"].default)
    longest = {} if spec.model_max_length is None else {"model_max_length": spec.model_max_length}
    arguments: dict[str, Any] = {
        **longest,
        **_vocabulary(cls()._tokenizer, spec, [*spec.corpus, system]),
        "eos_token": spec.eos_token,
        "pad_token": spec.pad_token,
        "padding_side": "right",
        "additional_special_tokens": [*spec.special_tokens, FILLER],
    }
    if spec.chat_template is None:
        return cls(**arguments)
    bare = cls(**arguments, chat_template=spec.chat_template.replace("{filler}", ""))
    if spec.prefix_tokens is None:
        return bare
    used = _prefix_length(bare, system)
    if used > spec.prefix_tokens:
        fact = f"'vocab_size' is {spec.vocab_size}, and the template's prefix takes {used} tokens"
        raise BadValueError(place, fact, f"Raise it until the prefix takes at most {spec.prefix_tokens}")
    filler = FILLER * (spec.prefix_tokens - used)
    return cls(**arguments, chat_template=spec.chat_template.replace("{filler}", filler))


def _vocabulary(tokenizer: Any, spec: TinyTokenizer, sentences: list[str]) -> dict[str, Any]:
    """Trains a tokenizer's model on sentences; returns the vocabulary as arguments of the tokenizer's constructor."""
    from tokenizers import models, pre_tokenizers, trainers

    if isinstance(tokenizer.model, models.Unigram):
        # The first three are where the class expects them.
        special = [spec.pad_token, spec.eos_token, "<unk>"]
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=spec.vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    elif isinstance(tokenizer.model, models.WordPiece):
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=spec.vocab_size, special_tokens=special, show_progress=False)
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        unknown = [tokenizer.model.unk_token] if getattr(tokenizer.model, "unk_token", None) else []
        trainer = trainers.BpeTrainer(
            vocab_size=max(spec.vocab_size, len(alphabet) + 50) if unknown else spec.vocab_size,
            initial_alphabet=alphabet,
            special_tokens=unknown,
            show_progress=False,
        )
    tokenizer.train_from_iterator(sentences, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    if isinstance(tokenizer.model, models.Unigram):
        # Its trainer takes another order each time. That decides last digits, and the scores of rare characters.
        lowest = min(score for _, score in model["vocab"])
        scores = {token: round(lowest if len(token) == 1 else score, 6) for token, score in model["vocab"]}
        trained = sorted(scores.keys() - set(special), key=lambda token: (-scores[token], token))
        return {"vocab": [(token, scores[token]) for token in [*special, *trained]]}
    if isinstance(tokenizer.model, models.WordPiece):
        return {"vocab": model["vocab"]}
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def _prefix_length(tokenizer: Any, system: str) -> int:
    """Returns how many tokens precede the user's text, by where two different texts begin to differ."""
    first, second = (
        tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": text}], tokenize=True, return_dict=True
        )["input_ids"]
        for text in ("0", "1")
    )
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
