"""A model card that is derived from a pipeline of diffusers: it is tried with tiny weights.

It is written once for each pipeline and set of versions, into a pack of the cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchport.compile import stack
from torchport.compile.in_force import hushed
from torchport.config import parse_document, validated
from torchport.config.card import TOKENS, Card, Job, Stack
from torchport.config.pack import DERIVED, derived_folder, find_pack
from torchport.errors import BadValueError, StackError, TorchportError
from torchport.files import atomic, cache
from torchport.load import tiny
from torchport.load.foreign import brief, line_of, refusals
from torchport.load.modular import is_modular
from torchport.patch.declared import reading
from torchport.patch.source import proposal
from torchport.porting.derive.parts import Configurations, absent_parts, parts_of, pipeline_class, plain_arguments
from torchport.porting.derive.trial import (
    ARGUMENTS,
    IMAGES,
    STEPS,
    LoopCall,
    Observed,
    PipelineTrial,
    constants_of,
    embedding_names,
    guidance_argument,
)
from torchport.porting.draft.home import Piece
from torchport.porting.draft.model import flow
from torchport.progress import log
from torchport.save import tree
from torchport.stages.replay import OTHER_LOOP
from torchport.stages.upstream_pipeline import taken_steps

FILES = ("configs/models/{}.yaml", "configs/{}_demo.yaml", "configs/{}.yaml")
"""A model's files in a pack: its card, the job of its demo, and the job of its published weights."""
_FROM_IMAGES = re.compile(r"(?:Image|Video)(?:2(?!\d)|To)|[IV]2[IV]|Img2Img|Inpaint|Edit|Kontext|Control")
"""Names of pipelines that begin with an image, though their argument for it may be None."""


def ensure(model: str) -> None:
    """Derives the card of a pipeline, `diffusers:Class`, and its two jobs, and writes the files into the cache folder,
    unless this code wrote them before. Does nothing for the name of another model.
    """
    if not model.startswith(DERIVED):
        return
    file, *jobs = (derived_folder() / name.format(model) for name in FILES)
    try:
        stamp, _, text = file.read_bytes().partition(b"\n")
        if stamp == _stamp(text, *(job.read_bytes() for job in jobs)):
            return
    except OSError:  # a file is not there, or cannot be read
        stamp = b""
    # The same code and another checksum: a file was changed. Files by older code are made again without a word.
    damaged = ", again, since its file is damaged" if stamp.startswith(f"# {_code()} ".encode()) else ""
    log.info("derive a card for %s%s: upstream's code runs with tiny weights ...", model, damaged)
    card, *texts = derived_card(model)
    cache.make(file.parent)
    for job, job_text in zip(jobs, texts, strict=True):
        atomic.write_text(job, job_text)
    stamp = _stamp(*(document.encode() for document in (card, *texts)))
    atomic.write_text(file, f"{stamp.decode()}\n{card}")


def _stamp(*texts: bytes) -> bytes:
    """Returns the first line of a card's file, `# CODE CHECKSUM`: a hash of the deriving code, and of card and jobs."""
    checksum = hashlib.sha256(b"\0".join(texts)).hexdigest()
    return f"# {_code()} {checksum}".encode()


@functools.cache
def _code() -> str:
    """Returns a hash of the code that derives cards: a card by other code is made again."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(str(tiny.__file__))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def derived_card(model: str, name: str | None = None) -> tuple[str, str, str]:
    """Returns the texts of a pipeline's card, of the job of its demo, and of the job of its published weights.

    Args:
        model: The pipeline, as `diffusers:MochiPipeline`.
        name: The card's name; by default the pipeline's.
    """
    with hushed(True):  # upstream's log warns of small numbers, and of packages that its classes could have
        place = f"--model {model}"
        try:
            cls = pipeline_class(model)
            trial = PipelineTrial(cls, Configurations(parts_of(cls, place)), place, image_argument(cls))
            observed = trial.observed()
            trial.answers = not takes_embeddings(trial, observed)  # then each run calls `encode_prompt` in the pipeline
            data = card_of(trial, observed, name or model)
        except refusals() as error:
            line = line_of(error)
            if not line:
                raise  # our own mistake
            fact = f"It stops at {line}: {brief(error)}"
            raise BadValueError(place, fact, "Write a card for it: docs/cards.md") from error
    demo = job_of(data, observed, cls)
    card, job, published = map(text_of, (data, demo, published_job_of(data, demo, cls)))
    # Our own texts: a mistake in them would be ours, and is seen here.
    kinds: list[Any] = [Card, Job, Job]
    for kind, file, text in zip(kinds, FILES, (card, job, published), strict=True):
        validated(kind, parse_document(text, file.format(name or model)))
    return card, job, published


def pieces(model: str, name: str) -> list[Piece]:
    """Returns the files of a derived card, to be written into a pack and edited there."""
    texts = zip(FILES, derived_card(model, name), strict=True)
    return [Piece(file.format(name), text, mode="new") for file, text in texts]


def image_argument(cls: Any) -> str | None:
    """Returns the argument by which a pipeline takes the image or video that it begins with; None if it needs none."""
    parameters = inspect.signature(cls.__call__).parameters
    parameter = next((parameters[name] for name in IMAGES if name in parameters), None)
    if parameter is None:
        return None
    is_required = parameter.default is parameter.empty  # else its default is None
    return parameter.name if is_required or _FROM_IMAGES.search(cls.__name__) else None


_WHOLE = {torch.bool: "bool", torch.int32: "int32", torch.int64: "int64"}
_PASSED = ("prompt", "negative_prompt", "do_classifier_free_guidance", "device", "dtype")
"""Arguments of `encode_prompt` that every run passes."""


def card_of(trial: PipelineTrial, observed: Observed, model: str) -> dict[str, Any]:
    """Returns the card of a pipeline as YAML's data; raises if its loop calls anything but one network and its VAE."""
    cls = trial.cls
    parts = trial.configurations.parts
    call = _call(trial, observed)
    network = call["network"]
    sound = call.get("sound", {}).get("parts", ())
    # The repository that upstream's own example loads.
    source = inspect.getsource(inspect.getmodule(cls) or cls)
    example = re.search(r'"([A-Za-z][\w.-]*/[A-Za-z][\w.-]*)"', source)
    card: dict[str, Any] = {
        "model": model,
        "title": f"{cls.__name__} of diffusers, by a card that is derived",
        "family": "diffusers",
        "artefacts": cls.__name__,
        "pipeline": f"diffusers:{cls.__name__}",
        "upstream": {**proposal.fits("diffusers"), **proposal.fits("transformers")},
        "checkpoint": f"{example[1]}@main" if example else "owner/repository@revision",
        "demo": f"configs/{model}_demo.yaml",
        "call": call,
        "patches": _patches(trial, call),
        "components": {},
    }
    for name, part in parts.items():
        fields = {"dtype": "bfloat16"} if part.kind in ("network", "encoder") else {}
        if name in sound:
            fields = {"dtype": "float32"}
        if name == "vae":
            fields = {"dtype": "float32", "precision": "high"}
        card["components"][name] = {"class": part.class_path, **fields}
    stacks = observed.stacks.get(network, {})
    # Blocks may know their place. Two blocks of a trial do not show it, so those of the class's own size are compared.
    published: Any = None
    with contextlib.suppress(TypeError, ValueError), torch.device("meta"):  # a class may have no size of its own
        published = parts[network].cls()
    if published is not None:
        for path, fields in list(stacks.items()):
            try:
                stack.stack(published, {path: Stack.model_validate(fields)}, str)
            except StackError:
                del stacks[path]
    if stacks:
        card |= {"stacks": {network: stacks}}
    step = (observed.frames - 1) // 2  # a trial asks for one frame, and twice the VAE's temporal step
    card["frames"] = {"multiple_of": step, "plus": 1} if step > 0 else {"multiple_of": 1, "plus": 0}
    tokenizers = {name: spec for name, spec in trial.configurations.tokenizers.items() if spec is not None}
    tokens = {name: spec.model_dump(exclude_defaults=True) for name, spec in tokenizers.items()}
    small = {"seed": 0, "scale": 1.0, "components": trial.configurations.values, "tokenizers": tokens}
    return {**card, "size_multiple_of": observed.unit, "tiny": small}


def _call(trial: PipelineTrial, observed: Observed) -> dict[str, Any]:
    """Returns the field `call` of a card: the roles of components, `encode_prompt`, and arguments of the pipeline."""
    cls = trial.cls
    roles = _roles(trial, observed)
    takes = inspect.signature(cls.__call__).parameters
    network = roles["network"][0]
    encoders = roles["encoders"]
    sound = roles["sound"]
    call: dict[str, Any] = {"network": network, "encoders": encoders}
    call |= _encoding(trial, observed, network, roles["before"])
    if not sound:
        loop_calls = [loop_call for loop_call in observed.calls if loop_call.network == network]
        call |= _conditions(call["embeddings"], loop_calls, observed)
    settings = {name: field for field, names in ARGUMENTS.items() for name in names if name in takes}
    if scale := guidance_argument(takes):
        settings[scale] = "guidance_scale"
    fields = {
        "before": roles["before"],
        "processors": roles["processors"],
        "answers": trial.answers,
        "asks": not trial.answers and _asks(trial, observed, encoders),
        "guider": "guider" in trial.configurations.parts,
        "host": ["vae"] if observed.changes_decoded else None,
        "sound": {"parts": sound, "rate": _rate(trial, sound)} if sound else None,
        "settings": settings,
        "constants": constants_of(takes),
        "init": {**absent_parts(cls), **plain_arguments(cls)},
        "image": trial.image,
        "edits": trial.edits,
    }
    # A card leaves out a field that says nothing; `settings` it has in any case.
    return call | {name: value for name, value in fields.items() if value or name == "settings"}


def _roles(trial: PipelineTrial, observed: Observed) -> dict[str, list[str]]:
    """Returns the components of a pipeline by their role in its call, such as `{"network": ["transformer"], "encoders":
    [...]}`; raises if a card has no role for a component.
    """
    cls = trial.cls
    parts = trial.configurations.parts
    # What is called after the first step and before the last belongs to the loop; an encoder there is refused below.
    called = dict.fromkeys(call.network for call in observed.calls if 0 < call.step < STEPS)
    networks = [name for name in called if parts[name].kind == "network" and name != "vae"]
    classes = [parts[name].cls for name in networks]
    # A second network of the same class may take the first steps: it is no part that runs before the loop.
    networks += [name for name in observed.before if name not in networks and parts[name].cls in classes]
    if len(networks) != 1 or "vae" not in parts or "scheduler" not in parts:
        found = " and ".join(networks) or "none"
        fact = f"The loop of '{cls.__name__}' calls {found}, and not one network beside 'vae' and 'scheduler'"
        raise BadValueError(trial.place, fact, OTHER_LOOP)
    # With an image the VAE runs before the loop, too, to encode the image: its role stays that of the VAE.
    before = [name for name in observed.before if name not in networks and (name != "vae" or trial.image is None)]
    sound = [name for name in observed.after if name != "vae"] if observed.latents == 2 else []
    # Image processors, which prepare an image for the components that run before the loop.
    processors = [name for name, part in parts.items() if part.kind == "other" and name != "guider" and before]
    others = (*networks, "vae", "scheduler", "guider", *before, *processors, *sound)
    encoders = [name for name in parts if name not in others]
    after = [call.network for call in observed.calls if call.step and call.network in encoders]
    if after:
        fact = f"'{cls.__name__}' calls '{after[0]}' after its first step"
        raise BadValueError(trial.place, f"{fact}, and a card's loop has its network and its VAE", OTHER_LOOP)
    return {"network": networks, "before": before, "processors": processors, "encoders": encoders, "sound": sound}


def text_of(data: Mapping[str, Any]) -> str:
    """Returns data as YAML, a line for each key; a section of dictionaries has a line for each of its keys."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict) and any(isinstance(entry, dict) for entry in value.values()):
            lines.append(f"{key}:")
            lines += [f"  {name}: {flow(entry)}" for name, entry in value.items()]
        else:
            lines.append(f"{key}: {flow(value)}")
    return "\n".join(lines) + "\n"


def job_of(card: Mapping[str, Any], observed: Observed, cls: Any) -> dict[str, Any]:
    """Returns the job of a card's demo as YAML's data."""
    network = card["call"]["network"]
    first = next(call for call in observed.calls if call.network == network)
    tensors = [value for value in first.inputs.values() if isinstance(value, torch.Tensor) and value.ndim]
    # Both prompts of guidance go through the network as a batch of 2, which is split over two devices.
    is_batch = bool(card["call"].get("conditions")) or bool(tensors and tensors[0].shape[0] == 2)
    dtypes = {name: "float32" for name, component in card["components"].items() if "dtype" in component}
    guided = card["call"].get("guider") or "guidance_scale" in card["call"]["settings"].values()
    return {
        "height": observed.size[0],
        "width": observed.size[1],
        "frames": observed.frames,
        "fps": _frame_rate(cls, card, usual=8),
        "steps": 4,
        "guidance_scale": 3.0 if guided else 1.0,
        "machine": "cpu:8",
        "mesh": {"dp": 2, "sp": 4} if is_batch else {"sp": 8},
        "strategy": "ulysses",
        "checkpoint": "tiny",
        "dtypes": dtypes,
    }


def published_job_of(card: Mapping[str, Any], demo: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """Returns the job of the published weights as YAML's data: upstream's own sizes and steps, on eight chips.

    A size that upstream takes from its weights is 1024 x 1024 for a picture, and 480 x 832 and 49 frames for a video.
    The mesh is that of the card's job `demo`, which has eight devices, too.
    """
    takes, unit = inspect.signature(cls.__call__).parameters, card["size_multiple_of"]
    defaults = {field: takes[name].default for name, field in card["call"]["settings"].items()}
    is_picture = not {"frames", "num_frames"} & set(takes)
    usual = {"height": 1024, "width": 1024} if is_picture else {"height": 480, "width": 832, "frames": 49}
    numbers = {field: value for field, value in defaults.items() if field in demo and isinstance(value, int | float)}
    job = {**demo, "steps": 50, **usual, **numbers}
    job["steps"] = taken_steps(cls, job["steps"], arguments={})  # a loop that begins with an image leaves some out
    job |= {field: job[field] // unit * unit for field in ("height", "width")}
    # The example in upstream's docstrings.
    rate = re.search(r"export_to_video\(.*\bfps=(\d+)", inspect.getsource(inspect.getmodule(cls) or cls))
    job |= {"fps": _frame_rate(cls, card, usual=int(rate[1]) if rate else 8)}
    job |= {"machine": "v6e:2x4", "strategy": "fsdp", "checkpoint": card["checkpoint"], "encode": "devices"}
    del job["dtypes"]  # the demo's float32: the card has the dtypes of published weights
    return job


def _frame_rate(cls: Any, card: Mapping[str, Any], usual: int) -> int:
    """Returns the default of a pipeline's argument for frames per second; `usual` if it has no such number."""
    names = [name for name, field in card["call"]["settings"].items() if field == "frame_rate"]
    default = inspect.signature(cls.__call__).parameters[names[0]].default if names else None
    return round(default) if isinstance(default, int | float) else usual


def _encoding(trial: PipelineTrial, observed: Observed, network: str, before: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a card on `encode_prompt`: `encode` (its arguments), `embeddings` (the shapes of its
    results), `dtypes`, `negative_apart`. Raises if the pipeline does not call it, or does not take its results.
    """
    cls = trial.cls
    if not observed.encodings:
        fact = f"'{cls.__name__}' does not call 'encode_prompt'"
        raise BadValueError(trial.place, fact, OTHER_LOOP)
    known = inspect.signature(cls.encode_prompt).parameters
    takes = inspect.signature(cls.__call__).parameters
    encode = {}
    if not trial.answers:
        for name, value in observed.encoding.items():
            is_argument = name in known and name not in (*_PASSED, "kwargs")
            if is_argument and value is not None and value != known[name].default:
                encode[name] = value
    names = embedding_names(cls)
    embeddings: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for number, value in enumerate(observed.embeddings):
        name = names[number] if number < len(names) and names[number] else f"unnamed_{number}"
        if (name not in takes and not trial.answers) or value is None:
            embeddings[name] = None
            continue
        longer = observed.longer[number]
        is_list = isinstance(value, list) and len(value) == 1
        if is_list:
            value, longer = value[0], longer[0]
        if not isinstance(value, torch.Tensor):
            fact = f"'{cls.__name__}.encode_prompt' returns a {type(value).__name__} as '{name}', and no tensor"
            raise BadValueError(trial.place, fact, OTHER_LOOP)
        networks = [network, *(component for component in before if component != "vae")]
        # A size that longer prompts change counts tokens.
        shape = [
            _size(trial, networks, name, dim, size) if size == longer.shape[dim] else TOKENS
            for dim, size in enumerate(value.shape)
        ]
        embeddings[name] = [shape] if is_list else shape
        if value.dtype in _WHOLE:
            dtypes |= {name: _WHOLE[value.dtype]}
    if not any(embeddings.values()):
        fact = f"'{cls.__name__}' takes nothing that its 'encode_prompt' returns ({', '.join(names)})"
        raise BadValueError(trial.place, fact, OTHER_LOOP)
    result: dict[str, Any] = {"encode": encode} if encode else {}
    result |= {"embeddings": embeddings} | ({"dtypes": dtypes} if dtypes else {})
    takes_negatives = all(f"negative_{name}" in takes for name in embeddings if embeddings[name])
    # The negative prompt has a call of `encode_prompt` of its own.
    if observed.negative and (trial.answers or takes_negatives):
        result["negative_apart"] = True
    return result


def takes_embeddings(trial: PipelineTrial, observed: Observed) -> bool:
    """Returns whether a pipeline can be called with embeddings in place of prompts: its output is the same, and a card
    can say all arguments of `encode_prompt`. If not, a call with prompts is tried, where `encode_prompt` returns these
    embeddings; raises if the output differs then, too.
    """
    if not observed.encodings:
        return True  # `_encoding` refuses its card
    refusal = None
    if all(tree.is_packable(value) for name, value in observed.encoding.items() if name not in _PASSED):
        takes, names = inspect.signature(trial.cls.__call__).parameters, embedding_names(trial.cls)
        values = dict(zip(names, observed.embeddings, strict=False))
        values |= {f"negative_{name}": value for name, value in zip(names, observed.negative, strict=False)}
        by_argument = {name: value for name, value in values.items() if name in takes and value is not None}
        try:
            trial.check_replay(observed, by_argument)
            return True
        except BadValueError as error:
            refusal = error
    try:
        trial.check_replay(observed, None)
    except BadValueError as error:
        raise refusal or error from error
    return False


def _size(trial: PipelineTrial, networks: Sequence[str], name: str, dim: int, size: int) -> int | str:
    """Returns a size of an embedding as a card writes it. A width is the name of a network's argument with this value,
    such as `text_embed_dim`, or of two arguments with this product, `heads*head_dim`. Other sizes are numbers.
    """
    if dim == 0 or size < 16 or not re.search(r"embeds|embeddings", name):
        return size
    configurations, likely = trial.configurations, re.compile(r"text|caption|cap_|joint|cross|pooled|encoder")
    for network in dict.fromkeys(networks):
        current = configurations.all_values(network)
        owner = "" if network == networks[0] else f"{network}."  # a card leaves out the name of the loop's network
        # First the arguments that a trial has set: it set them to the widths of text encoders.
        keys = dict.fromkeys([*configurations.mended.get(network, []), *filter(likely.search, current)])
        numbers = {f"{owner}{key}": current[key] for key in keys if type(current.get(key)) is int}
        same = [key for key, value in numbers.items() if value == size]
        same += [f"{a}*{b}" for a, b in itertools.combinations(numbers, 2) if owner and numbers[a] * numbers[b] == size]
        if same:
            return same[0]
    return size


def _conditions(embeddings: Mapping[str, Any], calls: Sequence[LoopCall], observed: Observed) -> dict[str, Any]:
    """Returns the inputs that differ between a step's two calls, each with its two embeddings: `{"conditions":
    {"encoder_hidden_states": ["negative_prompt_embeds", "prompt_embeds"]}}`. Empty if an input is no embedding.
    """
    first = [call for call in calls if call.step == 0]
    # The two calls are to become a batch: embeddings whose lengths follow their prompts cannot.
    if len(first) != 2 or any(TOKENS in str(shape) for shape in embeddings.values()):
        return {}
    values = dict(zip(embeddings, observed.embeddings, strict=True))
    values |= {f"negative_{name}": value for name, value in zip(embeddings, observed.negative, strict=False)}
    pairs: dict[str, list[str]] = {}
    for name in sorted(first[0].inputs.keys() & first[1].inputs.keys()):
        tensor, other = (call.inputs[name] for call in first)
        if not isinstance(tensor, torch.Tensor) or not isinstance(other, torch.Tensor) or _same(tensor, other):
            continue
        names = [next((key for key in values if _same(values[key], given)), None) for given in (tensor, other)]
        if None in names or tensor.shape != other.shape:
            return {}
        pairs[name] = [str(key) for key in names]
    return {"conditions": pairs} if pairs else {}


def _same(value: Any, tensor: torch.Tensor) -> bool:
    has_shape = isinstance(value, torch.Tensor) and value.shape == tensor.shape
    return has_shape and torch.equal(value.to(tensor.dtype), tensor)


def _asks(trial: PipelineTrial, observed: Observed, encoders: Sequence[str]) -> bool:
    """Returns a card's `asks`: whether a pipeline with its encoders alone cannot be built, or cannot encode prompts."""
    cls = trial.cls
    configurations = trial.configurations
    if is_modular(cls):
        return False  # a modular pipeline has all its components anyway
    parts = {name: configurations.built(name) for name in (*encoders, "guider") if name in configurations.parts}
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    needed = {parameter.name: None for parameter in parameters if parameter.default is parameter.empty}
    try:
        with torch.no_grad():
            cls(**{**needed, **absent_parts(cls), **parts}).encode_prompt(**observed.encoding)
    except refusals():
        return True
    return False


def _rate(trial: PipelineTrial, sound: Sequence[str]) -> str:
    """Returns the last component's argument for sound's samples per second, such as `vocoder.sampling_rate`."""
    for name in reversed(sound):
        known = trial.configurations.all_values(name)
        for key in ("output_sampling_rate", "sampling_rate", "sample_rate"):
            if key in known:
                return f"{name}.{key}"
    fact = f"No configuration of {' and '.join(sound)} says how many samples a second its sound has"
    raise BadValueError(trial.place, fact, "Write a card for it: docs/cards.md")


def _patches(trial: PipelineTrial, call: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the files of patches by stage that fit its component's classes: `{"denoise": ["torch/attention"]}`."""
    result: dict[str, list[str]] = {}
    network, encodes = call["network"], trial.image is not None or "vae" in call.get("before", ())
    stages = {"denoise": network} | ({} if "host" in call else {"decode": "vae"})
    built = {name: trial.configurations.on_meta(name, changes={}) for name in stages.values()}
    for stage, name in stages.items():
        classes = set(_class_names(built[name]))
        # A file that is for decoding alone must not change the encoder of an image or a video.
        encoder = getattr(built[name], "encoder", None) if stage == "decode" and encodes else None
        spared = set(_class_names(encoder)) if encoder is not None else set()
        names = [file for file, targets in _files(stage) if targets and targets <= classes and not targets & spared]
        if stage == "denoise":
            names.append("torch/attention")
        if any(isinstance(module, torch.nn.LayerNorm) for module in built[name].modules()) and stage == "denoise":
            names.append("torch/normalization")
        files = {inspect.getsourcefile(type(module)) for module in built[name].modules()}
        sources = [Path(file) for file in files if file and "diffusers" in file]
        if any("autocast(" in source.read_text(encoding="utf-8") for source in sources):
            names.append("torch/autocast")
        if names:
            result[stage] = names
    return result


def _class_names(network: torch.nn.Module) -> Iterator[str]:
    """Yields the classes of a network's modules and of their attention's processors, as `module:Class`."""
    for module in network.modules():
        for part in (module, getattr(module, "processor", None)):
            if part is not None:
                yield from (f"{cls.__module__}:{cls.__qualname__}" for cls in type(part).__mro__)


def _files(stage: str) -> Iterable[tuple[str, set[str]]]:
    """Yields the files of patches for diffusers that are for a stage, with the classes of their targets. The files of
    an implementation that is not the default are left out: a card offers them, and a job chooses.
    """
    pack = find_pack()
    optional: set[str] = set()
    for _, read in pack.cards():  # a card with its document, or why it cannot be read
        for kind in [] if isinstance(read, TorchportError) else read[0].implementations.values():
            for implementation, stages in kind.patches.items():
                if implementation != kind.default:
                    optional.update(*stages.values())
    files = [file for folder in pack.folders for file in folder.glob("diffusers/*.yaml")]
    for name in sorted({f"diffusers/{file.stem}" for file in files if file.stem != "lock"} - optional):
        entries = reading.read(pack.folders, [name])
        if any(stage in entry.must_be_called for entry in entries):
            yield name, {entry.target.rpartition(".")[0] for entry in entries}
