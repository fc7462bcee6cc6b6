"""Checkpoints and stage files as they come from elsewhere: damaged, of another model, or made to do harm.

Each mutation is drawn from a seed, so that a case is found again by its number.
"""

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTILE = (
    None, True, False, 0, -1, 1, 2, 3, 7, 0.5, -1.5, 1e308, 2**31, 2**63, 2**64, 10**400, float("nan"), float("inf"),
    "", "nope", "0", "a" * 5000, "\x00", "\ud800", "../../x", "/dev/zero", "{{ 1 / 0 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for", "float8_e4m3fn", "int8", "meta", "Qwen2Model",
    [], [1], [None], [[]], {}, {"a": 1}, {"a": {"a": []}},
)  # fmt: skip
"""Values in place of any other."""
TEXTS = (
    b"", b"{", b"[]", b"null", b"3", b'"a"', b"\xff\xfe\x00", b"[" * 200_000, b'{"a":' * 200_000,
    b'{"a": ' + b"9" * 5000 + b"}", b'{"a": NaN}', b'{"model": null}', b"version https://git-lfs.github.com/spec/v1\n",
)  # fmt: skip
"""Texts in place of a whole JSON file."""
HOSTILE_KEYS = {
    "quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoModel": "evil--evil.Evil"}, "torch_dtype": "int8",
    "dtype": "no dtype", "model_type": "llama", "architectures": ["Nope"], "tokenizer_class": "Nope",
    "chat_template": "{{ ''.__class__ }}", "_class_name": "Nope", "hidden_act": "nope", "is_decoder": True,
    "added_tokens_decoder": {"x": 1}, "rope_parameters": {"rope_type": "yarn"}, "attn_implementation": "nope",
    "id2label": 3, "use_cache": "x", "extra_special_tokens": 3,
}  # fmt: skip
"""Keys that upstream gives a meaning to, with values that it cannot use."""
DTYPES = (
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL", "C64", "F4", "", "X",
)  # fmt: skip
NAMES = ("", "a", "../x.safetensors", "/etc/passwd", "x" * 5000, "\x00", "\ud800", ".", "..", "sub/x.safetensors")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutated(value: Any, draw: random.Random) -> Any:
    """Returns a JSON object with one to three of its values exchanged, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(places(value))[:2000]
        path = draw.choice(found) if found else ()
        kind = draw.choice(("exchange", "exchange", "exchange", "remove", "add", "scale"))
        if kind == "add" or not path:
            key = draw.choice(sorted(HOSTILE_KEYS))
            value[key] = HOSTILE_KEYS[key]
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        if kind == "remove":
            del holder[path[-1]]
        elif kind == "scale" and isinstance(holder[path[-1]], int | float):
            holder[path[-1]] = holder[path[-1]] * draw.choice((-1, 0, 2, 0.5, 10**6))
        else:
            holder[path[-1]] = draw.choice(HOSTILE)
    return value


def mutate_json(file: Path, draw: random.Random) -> None:
    """Changes a JSON file: its values, its text, or its bytes."""
    data = file.read_bytes()
    kind = draw.choice(("values",) * 6 + ("text", "bytes"))
    if kind == "text":
        file.write_bytes(draw.choice(TEXTS))
    elif kind == "bytes":
        file.write_bytes(flipped(data, draw))
    else:
        try:
            text = json.dumps(mutated(json.loads(data), draw))
        except ValueError:  # a number that Python does not write
            text = data.decode().replace("1", "9" * 5000, 1)
        file.write_text(text, encoding="utf-8")


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Returns bytes of which a few are others, or some are lost, doubled or added at the end."""
    found = bytearray(data)
    kind = draw.choice(("flip", "cut", "drop", "double", "append"))
    if kind == "flip" or not found:
        for _ in range(draw.randint(1, 8)):
            if found:
                found[draw.randrange(len(found))] = draw.randrange(256)
        return bytes(found)
    place = draw.randrange(len(found))
    end = min(len(found), place + draw.randint(1, 64))
    if kind == "cut":
        return bytes(found[:place])
    if kind == "append":
        return bytes(found) + draw.randbytes(end - place)
    return bytes(found[:place] + (found[place:end] * 2 if kind == "double" else b"") + found[end:])


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns a safetensors file's header and its data."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: Any, data: bytes) -> bytes:
    """Returns a safetensors file of a header, which may be none, and data."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mutate_safetensors(file: Path, draw: random.Random) -> None:
    """Changes a safetensors file: names, dtypes, shapes or offsets in its header, or its bytes."""
    data = file.read_bytes()
    if draw.random() < 0.2:
        file.write_bytes(flipped(data, draw))
        return
    header, rest = split(data)
    names = [name for name in header if name != "__metadata__"]
    for _ in range(draw.choice((1, 1, 1, 2))):
        name = draw.choice(names)
        if name not in header:
            continue
        entry = header[name]
        if not sound(entry):
            continue
        kind = draw.choice(("rename", "drop", "dtype", "dtype", "shape", "offsets", "swap", "other", "head", "retype"))
        if kind == "rename":
            header[draw.choice(NAMES) or name + "x"] = header.pop(name)
        elif kind == "drop":
            rest = without(header, name, rest)
        elif kind == "dtype":
            entry["dtype"] = draw.choice(DTYPES)
        elif kind == "retype":
            rest = retyped(header, name, rest, draw)
        elif kind == "shape":
            entry["shape"] = draw.choice(([], [0], [-1], [2**63], [3], entry["shape"][::-1], "x", None, [1.5]))
        elif kind == "offsets":
            entry["data_offsets"] = draw.choice(([0, 0], [0, 2**63], [-4, 0], ["0", "4"], None, [4], {}))
        elif kind == "swap":
            other = draw.choice(names)
            if other in header:
                header[name], header[other] = header[other], header[name]
        elif kind == "other":
            header[name] = draw.choice(HOSTILE[:20])
        else:
            header["__metadata__"] = draw.choice((None, 3, {"format": "tf"}, {"format": 3}, {}, {"a": None}))
    file.write_bytes(joined(header, rest))


def without(header: dict[str, Any], name: str, data: bytes) -> bytes:
    """Removes a tensor of a header, and returns the data without its own."""
    start, end = header.pop(name)["data_offsets"]
    for entry in header.values():
        if isinstance(entry, dict) and isinstance(entry.get("data_offsets"), list):
            entry["data_offsets"] = [moved(n, end, end - start) for n in entry["data_offsets"]]
    return data[:start] + data[end:]


def sound(entry: Any) -> bool:
    """Whether a tensor of a header is as it was written."""
    try:
        start, end = entry["data_offsets"]
        return 0 <= start <= end < 2**40 and all(0 <= extent < 2**40 for extent in entry["shape"])
    except (TypeError, ValueError, KeyError):
        return False


def moved(offset: Any, end: int, less: int) -> Any:
    """Returns an offset after what ends at `end` has become so much less; one that is no number stays."""
    return offset - less if isinstance(offset, int) and offset >= end else offset


def retyped(header: dict[str, Any], name: str, data: bytes, draw: random.Random) -> bytes:
    """Gives a tensor a dtype of one byte, and returns the data with as many bytes as that takes."""
    entry = header[name]
    start, end = entry["data_offsets"]
    size = 1
    for extent in entry["shape"]:
        size *= extent
    entry["dtype"] = draw.choice(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"))
    entry["data_offsets"] = [start, start + size]
    less = end - start - size
    for other in header.values():
        if other is not entry and isinstance(other, dict) and isinstance(other.get("data_offsets"), list):
            other["data_offsets"] = [moved(n, end, less) for n in other["data_offsets"]]
    return data[:start] + bytes(size) + data[end:]


def mutate_index(folder: Path, draw: random.Random) -> None:
    """Gives a component's one file an index, whose map is sound or not."""
    (file,) = folder.glob("*.safetensors")
    header, _ = split(file.read_bytes())
    names: Any = {name: file.name for name in header if name != "__metadata__"}
    index: Any = {"metadata": {"total_size": 0}, "weight_map": names}
    for _ in range(draw.randint(0, 3)):
        if isinstance(names, dict) and names:
            names[draw.choice(sorted(names))] = draw.choice((*NAMES, *HOSTILE[:20]))
    if draw.random() < 0.2:
        index["weight_map"] = draw.choice(HOSTILE[:20])
    file.with_name(file.name + ".index.json").write_text(json.dumps(index, default=str))


def mutate(folder: Path, draw: random.Random) -> str:
    """Changes one file of a component's folder, and returns which and how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".complete")
    file = draw.choice(files)
    weights = [path for path in files if path.suffix == ".safetensors"]
    how = draw.random()
    if weights and how < 0.08:
        mutate_index(folder, draw)
        return "index"
    if how < 0.14:
        file.unlink()
        return f"without {file.name}"
    if how < 0.17:
        file.unlink()
        file.mkdir()
        return f"folder {file.name}"
    if file.suffix == ".safetensors":
        mutate_safetensors(file, draw)
    elif file.suffix == ".json":
        mutate_json(file, draw)
    elif file.suffix == ".jinja":
        file.write_text(str(draw.choice([value for value in HOSTILE if isinstance(value, str) and value != "\ud800"])))
    else:
        file.write_bytes(flipped(file.read_bytes(), draw))
    return file.name


SEEDS = (
    {"latents": (1, 16, 2, 4, 4)}, {"latent": (1, 16, 2, 4, 4)}, {"latents": (3,)}, {"latents": ()}, {},
    {"latents": (1, 16, 2, 4, 4), "more": (1,)}, {"latents": (1, 16, 0, 4, 4)}, {"latents": (2, 16, 2, 4, 4)},
)  # fmt: skip
"""Names and shapes of a stage file's tensors; those of the first are what a hand-written port writes."""


def write_latents(folder: Path, draw: random.Random) -> None:
    """Writes a hand-written port's latents and configuration, and changes either, or what they hold."""
    import torch
    from safetensors.torch import save_file

    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.bool, torch.int64, torch.complex64)
    dtype = draw.choice((torch.bfloat16, torch.float32, *dtypes))
    shapes = draw.choice((SEEDS[0], SEEDS[0], *SEEDS))
    words = ("64", "64", "64", "5", "-1", "9" * 5000, "inf", "nan", "", "x", "\u0664", "1e3", "64.0", " 64 ")
    noted = {key: draw.choice(words) for key in ("height", "width", "video_length") if draw.random() < 0.2}
    if draw.random() < 0.4:
        noted["dtype_info"] = draw.choice(
            (
                json.dumps({"latents": draw.choice(("torch.bfloat16", "bfloat17", "int64", None, 3, []))}),
                *(text.decode() for text in TEXTS[:6]),
                "[" * 100_000,
                '{"latents": ' + "9" * 5000 + "}",
            )
        )
    file, beside = folder / "stage2_latents.safetensors", folder / "generation_config.json"
    save_file({name: torch.ones(shape).to(dtype) for name, shape in shapes.items()}, file, noted)
    beside.write_text(json.dumps({"prompt": "A cat", "height": 64, "width": 64, "video_length": 5, "seed": 42}))
    if draw.random() < 0.5:
        mutate_json(beside, draw)
    if draw.random() < 0.3:
        file.write_bytes(flipped(file.read_bytes(), draw))
