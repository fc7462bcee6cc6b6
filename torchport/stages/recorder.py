"""Records the calls that a verb makes of its network: shapes, how often, and arithmetic, from shapes alone."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchport.config.card import DENOISING
from torchport.errors import BadValueError
from torchport.stages import outputs
from torchport.stages.constants import Constants
from torchport.stages.family import Call, Settings, Stage, Steps

Static = tuple[tuple[str, object], ...]
BORDERS_LIMIT = 2**30
"""Bytes of what the units get and return in a call up to which a verification records all modules; see `recording`."""


@dataclasses.dataclass
class NetworkCall:
    """One set of shapes that a network is called with."""

    inputs: dict[str, Any]  #: The inputs, without storage: tensors, and trees of tensors such as caches.
    static: Static  #: What is no tensor.
    times: int  #: How often the verb calls with these.
    #: Of one call, counted by PyTorch on shapes alone: every matrix product, attention with padding included; None
    #: where it was not to be counted.
    flops: int | None
    output: Any
    kept: dict[str, torch.Tensor]  #: The tensors of it that stay on the devices, by path.
    steps: int = 1  #: The denoising steps that the verb takes in all its calls; 1 for another stage.
    #: Bytes of what the network and its units get and return in one call, each tensor once; None where it was not to be
    #: counted.
    borders: int | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the inputs by path, such as `cache.0` for a cache's first tensor."""
        return outputs.leaves(self.inputs)


class Recorder(Call):
    """Stands in for a compiled network, and returns tensors that have a shape and no values.

    The verb continues with these tensors, so that we see all of its calls.

    Args:
        module: The network; it is moved to meta.
        how: Calls the network: `how(module, **inputs)` returns its output.
        stage: Says what the network returns: see `Stage.outputs` and `Stage.keeps`.
        count: Whether arithmetic and borders are counted, which takes as long as all else.
    """

    batches = True
    drops = True

    def __init__(self, module: torch.nn.Module, how: Any, stage: Stage, count: bool = True) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.module = module.to("meta")
        self.how = how
        self.stage = stage
        self.count = count
        self.calls: dict[Any, NetworkCall] = {}
        # Makes what a call returns. The verb runs outside of the mode, where its masks keep their values. So real
        # tensors meet fake ones.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __call__(self, **inputs: Any) -> Any:
        """Returns tensors without values, of the shapes and dtypes that the network returns, on the host."""
        trees = {name: value for name, value in sorted(inputs.items()) if outputs.has_tensor(value)}
        static = tuple(sorted((name, value) for name, value in inputs.items() if name not in trees))
        shapes = {name: (tensor.shape, str(tensor.dtype)) for name, tensor in outputs.leaves(trees).items()}
        key = (static, tuple(sorted(shapes.items())))
        if key not in self.calls:
            self.calls[key] = self._new_call(trees, static)
        self.calls[key].times += 1
        with self.mode:
            return _like(self.calls[key].output, "cpu")

    def _new_call(self, trees: dict[str, Any], static: Static) -> NetworkCall:
        """Calls the network on meta, and returns the call's shapes, arithmetic and bytes."""
        from torch.utils.flop_counter import FlopCounterMode

        names = self.stage.outputs
        network = str(self.stage.network)
        inputs = {name: _like(outputs.plain(name, tree, network), "meta") for name, tree in trees.items()}
        counter = FlopCounterMode(display=False)
        tensors: dict[int, torch.Tensor] = {}  # by id, which no other tensor can get while this one is kept

        def note(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            """Keeps the tensors that a module gets and returns: a hook of its `forward`."""
            leaves = pytree.tree_leaves((args, kwargs, output))
            tensors.update({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)})

        with contextlib.ExitStack() as stack:
            if self.count:
                stack.enter_context(counter)
                for path in ["", *unit_paths(self.module)]:
                    stack.enter_context(self.module.get_submodule(path).register_forward_hook(note, with_kwargs=True))
            on_meta = Constants(lambda x: isinstance(x, torch.Tensor) and x.is_meta, lambda tensor: tensor.to("meta"))
            with torch.no_grad(), on_meta:
                output = outputs.stage_outputs(self.how(self.module, **inputs, **dict(static)), names, network)
        flops = int(counter.get_total_flops()) if self.count else None
        borders = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values()) if self.count else None
        kept = outputs.leaves({name: output[names.index(name)] for name in self.stage.keeps})
        return NetworkCall(inputs, static, times=0, flops=flops, output=output, kept=kept, borders=borders)


def unit_paths(network: torch.nn.Module) -> list[str]:
    """Returns the paths of a network's units: its children, and in place of a list of modules its elements."""
    paths: list[str] = []
    for name, child in network.named_children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            paths += [f"{name}.{path}" for path in unit_paths(child)]
        else:
            paths.append(name)
    return paths


def _like(tree: Any, device: str) -> Any:
    """Returns a tree of tensors of the same shapes and dtypes, without values."""
    return outputs.map_leaves(lambda _, leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=device), "", tree)


def network_calls(
    stage: Stage,
    parts: dict[str, Any],
    module: torch.nn.Module,
    how: Any,
    settings: Settings,
    *,
    count: bool = True,
    **inputs: torch.Tensor,
) -> list[NetworkCall]:
    """Returns the calls that a stage's verb makes of its network, in the order of first calls; the verb itself runs,
    with `inputs`, and those that `Stage.like` returns. `module`, which is compiled, is moved to meta: see `Recorder`.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException

    assert stage.like is not None
    recorder, done = Recorder(module, how, stage, count=count), []
    steps = Steps(finished=lambda number, state, timestep=None, kept=None: done.append(number))
    try:
        stage.run(parts, recorder, settings, steps, **stage.like(parts, settings), **inputs)
    except DataDependentOutputException as error:
        fact = f"Its verb asks for a value that the network computes ({error.func})"
        raise BadValueError(f"--stage {stage.name}", fact, "Its calls must follow from shapes alone") from error
    if not recorder.calls:
        raise BadValueError(f"--stage {stage.name}", "It never calls its network", "Report this: its verb is at fault")
    if stage.name in DENOISING:  # a loop that reports no steps takes all of the settings'
        taken = len(done) or settings.steps
        return [dataclasses.replace(call, steps=taken) for call in recorder.calls.values()]
    return list(recorder.calls.values())
