"""Runs upstream's own code over files from elsewhere, and turns whatever it raises into one line."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchport.errors import CheckpointBrokenError, CheckpointForeignError, TorchportError


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Returns the exceptions that upstream raises over unexpected files (tests/load/test_fuzzed_checkpoints.py). They
    are many: a constructor that gets a word for a number fails wherever it first computes with it.
    """
    import jinja2
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (
        ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, OSError,
        RuntimeError, TypeError, ValueError,
        SafetensorError, StrictDataclassError, jinja2.TemplateError, pickle.UnpicklingError,
    )  # fmt: skip


def is_absence(error: BaseException) -> bool:
    """Returns whether an exception says that a package, or a name in one, is not here: no file is at fault."""
    if isinstance(error, ModuleNotFoundError):
        return True
    # A circle of imports is no absence: Python then says "from partially initialized module".
    is_import = isinstance(error, ImportError)
    return is_import and re.match(r"cannot import name .* from '", str(error)) is not None


def is_cuda(error: BaseException) -> bool:
    """Returns whether torch raised an exception because this machine has no CUDA."""
    kinds = (AssertionError, AttributeError, RuntimeError)
    return isinstance(error, kinds) and _CUDA.search(str(error)) is not None


_CUDA = re.compile(r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|requires CUDA|CUDA generator|_cuda_|dummy base")
"""What torch says where it has no CUDA. Source: torch/cuda/__init__.py, streams.py and _utils.py of torch 2.13."""


@contextlib.contextmanager
def reading(kind: type[TorchportError], place: str, fact: str, remedy: str) -> Iterator[None]:
    """Turns what upstream raises over files of a checkpoint into an error of one line: `fact`, and upstream's reason.
    An exception about a package or about CUDA passes: no file is at fault.
    """
    try:
        yield
    except BaseException as error:
        is_of_machine = isinstance(error, ModuleNotFoundError) or is_cuda(error)
        # tokenizers raises the bare class Exception.
        if is_of_machine or not (isinstance(error, refusals()) or type(error) is Exception):
            raise
        raise kind(place, f"{fact}: {brief(error)}", remedy) from error


@contextlib.contextmanager
def tokenizing(place: str) -> Iterator[None]:
    """Turns upstream's errors while a tokenizer encodes a prompt into a CheckpointBrokenError of one line."""
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, IndexError) as error:
        raise CheckpointBrokenError(
            place, f"The prompt cannot be encoded with it: {brief(error)}", "Download the tokenizer again"
        ) from error


def line_of(error: BaseException) -> str:
    """Returns the innermost line of diffusers or transformers that an error passed, as `file:line`; "" if none."""
    frame, place = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if "/site-packages/diffusers/" in name or "/site-packages/transformers/" in name:
            place = f"{name.rpartition('/site-packages/')[2]}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def brief(error: BaseException) -> str:
    """Returns the first cause of an error as one short phrase: upstream wraps errors in errors that say less."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())[:200].rstrip(".")
    needs_class_name = isinstance(error, KeyError | AssertionError) or not text
    return f"{type(error).__name__}{text and ': ' + text}" if needs_class_name else text


def check_values(cls: Any, file: Path, config: Mapping[str, Any]) -> None:
    """Refuses a configuration that names another class, or has a value of another type than the class's default.
    Upstream does not check most of these values. It would stop hours later, where it first computes with one.
    """
    if config.get("_class_name", cls.__name__) != cls.__name__:
        fact, remedy = f"It is of a {str(config['_class_name'])[:80]!r}", f"It must be of a {cls.__name__}"
        raise CheckpointForeignError(str(file), fact, f"{remedy}: name a checkpoint of this model")
    for key, value, default in unlike_defaults(cls, config):
        fact, remedy = f"'{key}' is {str(value)[:80]!r}", f"It must be like its default, {default!r}"
        raise CheckpointForeignError(str(file), fact, f"{remedy}: name a checkpoint of this model", key=key)


def unlike_defaults(cls: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and default of each argument of a class that is of another type than its default."""
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        value = arguments.get(key)
        default = parameter.default
        if value is not None and default is not parameter.empty and not _is_like(value, default):
            yield key, value, default


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value of JSON has a default's type: bool, text, list, or number (finite, or the default's infinity)."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (-1e300 < value < 1e300 or value == default)  # false for NaN, and for 400 digits
    if isinstance(default, list | tuple):
        if not isinstance(value, list):
            return False
        if not default:
            return True
        return all(item is None or _is_like(item, default[0]) for item in value)
    return not isinstance(default, str) or isinstance(value, str)
