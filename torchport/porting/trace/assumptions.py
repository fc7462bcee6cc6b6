"""What a trace assumes where it would stop: values, packages that are absent, CUDA and other processes.

They are put into torch and into the import system, and stay there: only a process that ends with its trace may do so.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from torchport import engine
from torchport.compile.failure import OURS, running_frames
from torchport.errors import HostTensorError
from torchport.load.foreign import is_cuda
from torchport.porting.trace.notes import PACKAGE, Notes, Raised
from torchport.source import parsing
from torchport.stages import constants

_ASSUMED_TRUE = {"all", "equal", "allclose", "isfinite", "isclose", "__ge__", "__le__", "ge", "le"}
"""Functions whose answer is assumed to be true: code asserts it, or raises where it is not."""
_SCALARS = {"item", "__float__", "__int__", "__index__", "__bool__", "is_nonzero"}


def is_networks(value: Any) -> bool:
    """Returns whether a value is a tensor of the network: the engine's, or one on meta."""
    return engine.is_traced(value) or (isinstance(value, torch.Tensor) and value.is_meta)


class GoingOn(TorchFunctionMode):
    """A mode that notes functions of torch that raise, and returns plausible values; if `counts`, also constants."""

    def __init__(self, notes: Notes, counts: bool) -> None:
        super().__init__()
        self.notes = notes
        self.counts = counts
        self.made: Any = WeakIdKeyDictionary()  # by tensor of the host, the line that made it
        self.function_of: Any = WeakIdKeyDictionary()  # by tensor of a truth value, the function that made it

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, or notes why it raises and assumes a result. Notes host tensors in the network."""
        kwargs = kwargs or {}
        if self.counts:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for tensor in tensors if any(map(is_networks, tensors)) else ():
                if constants.is_host(tensor) and tensor.ndim:  # the program has it as a constant
                    used = constants.place()
                    self.notes.note_constant(tensor, self.made.get(tensor, used), used)
        with Raised() as raised:
            output = function(*args, **kwargs)
        if raised.error is not None:
            return self._result_after(raised.error, function, args, kwargs)
        if isinstance(output, torch.Tensor):
            if constants.is_host(output) and output.ndim and output not in self.made:
                self.made[output] = constants.place()
            if output.dtype == torch.bool and not output.ndim:
                self.function_of[output] = getattr(function, "__name__", "")
        return output

    def _result_after(self, error: BaseException, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns a plausible result for a function that raised, or raises the error if there is none."""
        name = getattr(function, "__name__", "")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = next(filter(is_networks, tensors), None)
        if isinstance(error, HostTensorError) or engine.is_host_tensor(error):
            return self._result_without_host(error, function, args, kwargs)
        if is_cuda(error):
            self.notes.record(error, "the tensor stays where it is")
            args, kwargs = pytree.tree_map(_off_cuda, (args, kwargs))
            return args[0] if name == "cuda" else function(*args, **kwargs)
        if name in _SCALARS and tensors and engine.is_traced_value(error):
            return self._assumed_scalar(error, name, tensors[0])
        if first is not None and engine.is_traced_value(error):
            return self._result_by_value(error, name, first, args, kwargs)
        is_unlowered = engine.missing_operator(error) is not None or engine.difference(error) is not None
        if first is not None and is_unlowered:
            return self._result_of_unlowered(error, function, first, args, kwargs)
        raise error

    def _assumed_scalar(self, error: BaseException, name: str, tensor: torch.Tensor) -> Any:
        """Returns an assumed value for a tensor: 1, or a truth value if it is of dtype bool or code asks for one."""
        frames = reversed(running_frames(self.notes.owners))
        frame = next((frame for frame in frames if frame.owner in OURS), None)  # the innermost that a port can change
        statement = frame.statement if frame is not None else ""
        is_truth = name in ("__bool__", "is_nonzero") or tensor.dtype == torch.bool
        if is_truth:
            # The answer with which checks pass: true for `assert x.isfinite()`, false for `if isnan(x).any(): raise`.
            value: Any = statement.startswith("assert") or self.function_of.get(tensor, "") in _ASSUMED_TRUE
        else:
            value = 1.0 if tensor.dtype.is_floating_point and name != "__int__" else 1
        self.notes.record(error, f"the value is {value}")
        return value

    def _result_by_value(self, error: BaseException, name: str, first: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """Returns an assumed result of a function whose output's shape depends on values: a mask selects everything."""
        if name == "tolist":
            self.notes.record(error, "all values are 1")
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
        if name in ("nonzero", "argwhere", "nonzero_static"):
            self.notes.record(error, "all values are true")
            return torch.ones(args[0].shape, dtype=torch.bool).nonzero(**kwargs)
        if name in ("__getitem__", "masked_select") and isinstance(args[1], torch.Tensor):
            self.notes.record(error, "the mask is true everywhere")
            return args[0].flatten(0, args[1].ndim - 1)
        self.notes.record(error, f"the result is zeros like the first argument, {list(first.shape)}")
        return torch.zeros_like(first)

    def _result_of_unlowered(
        self, error: BaseException, function: Callable[..., Any], first: torch.Tensor, args: Any, kwargs: Any
    ) -> Any:
        """Returns zeros as the result of an operator that is not lowered. The meta device computes their shapes."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda leaf: torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta"), (args, kwargs)
        )
        self.notes.record(error, "the result is zeros")
        with torch._C.DisableTorchFunction():
            output = function(*args, **kwargs)
        return pytree.tree_map_only(
            torch.Tensor, lambda leaf: first.new_zeros(tuple(leaf.shape), dtype=leaf.dtype), output
        )

    def _result_without_host(self, error: BaseException, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns a result for a function that met a tensor of the host: zeros of the network take its place."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        hosts = [leaf for leaf in tensors if constants.is_host(leaf)]
        made = next((self.made[leaf] for leaf in hosts if leaf in self.made), None)
        if not any(map(is_networks, tensors)):  # numbers that are drawn: their shape alone counts
            self.notes.record(error, "the numbers are drawn once", made)
            with torch._C.DisableTorchFunction():
                return torch.zeros(tuple(function(*args, **kwargs).shape))
        template = next(leaf for leaf in tensors if is_networks(leaf))
        if "writes" in str(error):
            self.notes.record(error, "nothing is written", made)
            return args[0]
        self.notes.record(error, "the host's tensor is zeros of the network", made)
        narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}  # the network has no wide dtypes

        def replaced(leaf: torch.Tensor) -> torch.Tensor:
            if not constants.is_host(leaf):
                return leaf
            return template.new_zeros(tuple(leaf.shape), dtype=narrow.get(leaf.dtype, leaf.dtype))

        args, kwargs = pytree.tree_map_only(torch.Tensor, replaced, (args, kwargs))
        return function(*args, **kwargs)


def _off_cuda(value: Any) -> Any:
    """Returns "cpu" for a device of CUDA, such as "cuda:0"; any other value as it is."""
    names_cuda = isinstance(value, str | torch.device) and re.match(r"cuda(:\d+)?$", str(value))
    return "cpu" if names_cuda else value


class Anything(types.ModuleType):
    """Stands for an absent package and everything in it. A call of it is noted, and returns its first tensor."""

    __path__: list[str] = []

    def __init__(self, name: str, notes: Notes) -> None:
        super().__init__(name)
        self.__dict__["_notes"] = notes  # not by `self._notes`: code may ask the package for that name

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        child = Anything(f"{self.__name__}.{name}", self.__dict__["_notes"])
        self.__dict__[name] = child
        return child

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Notes a call of something in an absent package; returns its first tensor, or else a stand-in for a result."""
        if len(args) == 1 and isinstance(args[0], type | types.FunctionType) and not kwargs:
            return args[0]  # it decorates
        error = ModuleNotFoundError(f"{self.__name__} is called", name=self.__name__.partition(".")[0])
        first = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)), None)
        assumed = "the call returns its first tensor" if first is not None else "the call returns a stand-in"
        self.__dict__["_notes"].record(error, assumed)
        return Anything(f"{self.__name__}()", self.__dict__["_notes"]) if first is None else first

    def __getitem__(self, key: Any) -> Anything:
        return Anything(f"{self.__name__}[]", self.__dict__["_notes"])

    def __int__(self) -> int:
        """Returns 0, where code takes what a package gives as a number."""
        return 0

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Returns an empty class in place of this module, where code derives a class from it."""
        return (type(self.__name__.rpartition(".")[2], (), {}),)


class _AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for an absent package, where upstream imports it without a `try`, and notes it."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.packages: set[str] = set()  # those that a stand-in was found for

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec of a stand-in where upstream's own code imports the package, and without a `try`."""
        package = name.partition(".")[0]
        if package not in self.packages:
            if package in sys.modules:
                return None
            ours = (PACKAGE, "torchport.patch.live", "importlib")
            stack = [frame for frame in running_frames(self.notes.owners) if not frame.module.startswith(ours)]
            importer = next((frame for frame in reversed(stack) if not frame.file.startswith("<")), None)
            # Torch does without the packages that it cannot import.
            if importer is None or importer.owner != "upstream" or not is_needed(importer.file, importer.line):
                return None
            self.packages.add(package)
            error = ModuleNotFoundError(f"No module named '{name}'", name=name)
            self.notes.record(error, "the package is there, and a call of it returns its first tensor")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Anything(spec.name, self.notes)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: there is no code."""


@functools.cache
def is_needed(file: str, line: int) -> bool:
    """Returns whether a line of a file is an import outside of any `try` that catches its failure."""
    tree = parsing.tree("".join(linecache.getlines(file)), file)
    imports = [statement for statement in ast.walk(tree) if isinstance(statement, ast.Import | ast.ImportFrom)]
    if not any(statement.lineno <= line <= (statement.end_lineno or statement.lineno) for statement in imports):
        return False  # no import: code asks whether the package is there, as by `find_spec`
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            names = {ast.unparse(handler.type) if handler.type is not None else "" for handler in node.handlers}
            words = ("ImportError", "ModuleNotFoundError", "Exception")
            if "" in names or any(word in name for name in names for word in words):
                return False
    return True


_MEMORY = 80 * 2**30
_PROPERTIES = types.SimpleNamespace(name="assumed", total_memory=_MEMORY, major=9, minor=0, multi_processor_count=132)
_ANSWERS: dict[str, dict[str, Any]] = {
    "torch.cuda": {
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "assumed",
        "get_device_properties": _PROPERTIES,
        "mem_get_info": (_MEMORY, _MEMORY),
        **dict.fromkeys(["current_stream", "manual_seed", "reset_peak_memory_stats", "set_device", "synchronize"]),
    },
    "torch.distributed": {
        "get_rank": 0,
        "get_world_size": 1,
        **dict.fromkeys(["all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"]),
        **dict.fromkeys(["barrier", "broadcast", "init_process_group", "new_group"]),
    },
    "torch.distributed.device_mesh": {"init_device_mesh": Anything},
}
"""What is assumed where a function of torch fails: one GPU of 80 GiB, and one process."""


def _answering(notes: Notes, name: str, function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """Returns a wrapper of `function` that notes an error and returns `answer` in its place."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with Raised() as raised:
            return function(*args, **kwargs)
        assert raised.error is not None
        value = Anything(f"{name}()", notes) if answer is Anything else answer
        words = "a stand-in" if answer is Anything else repr(answer)
        notes.record(raised.error, f"{name} returns {words}")
        return value

    return call


@contextlib.contextmanager
def assumed(notes: Notes) -> Iterator[None]:
    """Answers upstream as if absent packages, CUDA and a process group were there; each answer is noted."""
    finder = _AbsentPackages(notes)
    before = []
    for home, answers in _ANSWERS.items():
        module = importlib.import_module(home)
        for name, answer in answers.items():
            original = getattr(module, name)
            before.append((module, name, original))
            setattr(module, name, _answering(notes, f"{home}.{name}", original, answer))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module, name, original in reversed(before):
            setattr(module, name, original)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.packages]:
            del sys.modules[name]


def returned(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, Any]:
    """Returns a plausible result for a module that raised, in words and as a value; the value is None where no argument
    fits. A `forward` that ends in `return img, txt` returns its arguments of these names, any other its first tensor.
    """
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    forward = type(module).forward
    source = parsing.tree(textwrap.dedent(inspect.getsource(forward)), inspect.getfile(forward))
    for node in ast.walk(source):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            names = [element.id for element in node.value.elts if isinstance(element, ast.Name) and element.id in given]
            if len(names) == len(node.value.elts):
                return f"its arguments {', '.join(names)}", tuple(given[name] for name in names)
    tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)]
    return "its first tensor", next((tensor for tensor in tensors if tensor.is_floating_point()), None)


@contextlib.contextmanager
def modules_go_on(notes: Notes) -> Iterator[None]:
    """Notes an error in a module's `forward` while the context lasts, and lets the module return an assumed value, so
    that the code after it is traced, too. An error in the network's own `forward` ends its trace: no value fits there.
    """
    original = torch.nn.Module.__call__
    depth = 0

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            with Raised() as raised:
                return original(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:  # the network itself raised
            raise raised.error  # type: ignore[misc]  # or it would have returned
        assert raised.error is not None
        words, value = returned(self, args, kwargs)
        if value is None:
            raise raised.error
        kind = type(self).__qualname__
        notes.record(raised.error, f"{kind} returns {words}, and the rest of its forward is not traced")
        return value

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]
