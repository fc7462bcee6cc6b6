"""A scheduler in upstream's loop whose `step` is ours: steps that are done return what is known already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator, Mapping
from typing import Any

import torch

from torchport.errors import ArtefactForeignError, BadValueError
from torchport.save import tree
from torchport.stages.family import Steps

RETURNED = "returned"
"""The name of what `step` returned, in what is saved after a step."""
GENERATOR = "generator"
"""The name of the state of the seed's generator, in what is saved after a step and in what `denoise` returns."""
OTHER_LOOP = "Write a family with a loop of its own for it: docs/families.md"


class Loop:
    """Takes over the steps of a pipeline's loop: `returned` is called in place of its scheduler's `step`."""

    def __init__(self, scheduler: Any, generator: torch.Generator, done: int = 0) -> None:
        #: It is changed: upstream asks for its class, so it remains itself.
        self.scheduler = scheduler
        self.generator = generator  #: Of the seed.
        self.done = done  #: The steps whose results are known.
        self.number = 0  #: The steps that are over.
        self.real = type(scheduler).step.__get__(scheduler)
        takes = inspect.signature(self.real).parameters

        @functools.wraps(self.real)  # upstream reads its signature
        def step(*args: Any, **kwargs: Any) -> Any:
            """Counts a step of the loop, and returns what `returned` does, in the form that upstream asks for."""
            if self.number == 0:
                self._check_timesteps()
                count = self.sample(args, kwargs).shape[0]
                if count != 1:  # nothing after the loop takes several
                    fact = f"The pipeline makes {count} videos at once"
                    raise BadValueError("'call'", fact, "Make one, and run again with another --seed for the next")
            self.number += 1
            if "generator" in takes:
                kwargs.setdefault("generator", self.generator)  # most pipelines pass none, and no seed would decide
            if kwargs.get("return_dict") is False or "return_dict" not in takes:
                return self.returned(args, kwargs)
            from diffusers.schedulers.scheduling_utils import SchedulerOutput

            return SchedulerOutput(self.returned(args, {**kwargs, "return_dict": False})[0])

        scheduler.step = step

    def _check_timesteps(self) -> None:
        """Refuses timesteps of NaN or infinity, from a division by zero: `step` would never find its own among them."""
        timesteps = torch.as_tensor(self.scheduler.timesteps)
        if not timesteps.isfinite().all():
            name = type(self.scheduler).__name__
            fact = f"It is {len(timesteps)}, and '{name}' makes timesteps of NaN or infinity of it"
            raise BadValueError("'steps'", fact, "Take more")

    @property
    def is_done(self) -> bool:
        """Whether the result of the step that has begun is known."""
        return self.number < self.done

    @property
    def shape(self) -> torch.Size | None:
        """The shape of the latents, where results of steps are known."""
        return None

    def begin(self) -> None:
        """Is called before the loop's network is."""

    def begin_other(self) -> None:
        """Is called in place of a network that is not this stage's."""

    def finish(self) -> None:
        """Is called after the loop."""

    def returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `step` returns."""
        raise NotImplementedError

    def sample(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Returns the latents that `step` is called with."""
        sample: torch.Tensor = self._argument("sample", args, kwargs)
        return sample

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns an argument that `step` is called with; None where it has none of this name."""
        return inspect.signature(self.real).bind(*args, **kwargs).arguments.get(name)


def latents_of(state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns the latents in the state of a loop after a step; None if it has none by a name that is known.

    Args:
        state: A family's own, which calls them `latents`; or a `Replay`'s, where `step` returned them first.
    """
    return next((state[name] for name in ("latents", f"{RETURNED}.0") if name in state), None)


class OtherNetwork(BaseException):
    """Leaves a pipeline's loop where it calls a network that another stage has."""


class Replay(Loop):
    """A loop that goes on after the steps that a stopped run, or the stage before, took.

    What upstream's loop carries from one step to the next must be what `step` returns, or what scheduler and generator
    hold. That is saved after each step.

    Args:
        steps: Progress, saving, and where to go on.
        leaves: Whether the loop is left where it calls another stage's network. Otherwise a stage before this one took
            those steps; where none did, as in a rehearsal, that network returns zeros.
    """

    def __init__(
        self, scheduler: Any, generator: torch.Generator, steps: Steps, name: str, total: int, leaves: bool = False
    ) -> None:
        #: The state is what was saved after the last step.
        done, self.state = steps.resume or (0, {})
        super().__init__(scheduler, generator, done)
        self.steps = steps
        self.name = name
        self.total = total
        self.leaves = leaves
        self.saved: Any = tree.unpacked(self.state) if self.state else None
        self.progress = iter(steps.track(range(done, total), done=done, total=total))
        self.begun = done
        self.before: dict[str, Any] = {}
        self.is_others = False

    def begin(self) -> None:
        """Advances the progress bar, once a step: guidance may call the network twice."""
        if self.begun <= self.number:
            next(self.progress, None)
            self.begun = self.number + 1

    def begin_other(self) -> None:
        """Leaves the loop, or notes that the next step is taken with zeros and not saved; raises if it came before."""
        if self.leaves:
            raise OtherNetwork
        if self.begun:
            fact = f"Step {self.number + 1} of {self.total} goes back from its second network to the first"
            raise BadValueError(self.name, fact, OTHER_LOOP)
        self.is_others = True

    @property
    def shape(self) -> torch.Size | None:
        latents = latents_of(self.state)
        return None if latents is None else latents.shape

    def finish(self) -> None:
        """Ends the progress bar."""
        next(self.progress, None)
        if isinstance(self.progress, Generator):
            self.progress.close()  # a loop that is left has items that no step took

    def returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the saved result for a step that is done; takes any other, and passes the state to `finished`."""
        if self.number == 1:
            self.before = dict(vars(self.scheduler))
        if self.number <= self.done:
            if self.number == self.done:
                vars(self.scheduler).update(self.saved["scheduler"])
                self.generator.set_state(self.saved[GENERATOR])
            return self.saved[RETURNED]
        returned = self.real(*args, **kwargs)
        if self.is_others:
            self.is_others = False
        else:
            self.state = self._state(returned)
            self.steps.finished(self.number, self.state, self._argument("timestep", args, kwargs))
        return returned

    def _state(self, returned: Any) -> dict[str, torch.Tensor]:
        """Returns all that the loop needs after a step, as tensors; raises if the scheduler keeps anything else."""
        if not isinstance(returned, tuple) or not tree.is_packable(returned):
            fact = f"Its 'step' returns a {type(returned).__name__} to '{self.name}', and no tuple of tensors"
            raise BadValueError(type(self.scheduler).__name__, fact, OTHER_LOOP)
        kept = {}
        for name, value in vars(self.scheduler).items():
            if tree.is_packable(value):
                kept[name] = value
            elif self.before.get(name) is not value:
                fact = f"It keeps '{name}', of the type {type(value).__name__}, from step to step of '{self.name}'"
                raise BadValueError(type(self.scheduler).__name__, fact, f"That cannot be saved. {OTHER_LOOP}")
        return tree.packed({RETURNED: returned, "scheduler": kept, GENERATOR: self.generator.get_state()})


class Finished(Loop):
    """A loop all of whose steps are done: each returns the finished latents.

    If upstream's code draws random numbers after the loop, it gets those that the run which took the steps would draw.

    Args:
        state: Of the seed's generator after the last step; None if the artefact lacks it.
    """

    def __init__(self, scheduler: Any, latents: torch.Tensor, state: torch.Tensor | None) -> None:
        super().__init__(scheduler, torch.Generator())
        self.latents = latents
        self.state = state
        self.after: torch.Tensor | None = None
        self.rest: tuple[Any, ...] | None = None

    @property
    def is_done(self) -> bool:
        return True

    @property
    def shape(self) -> torch.Size | None:
        return self.latents.shape

    def returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the latents, and what else `step` returns: that is called once, for its other results."""
        shape = self.sample(args, kwargs).shape
        if shape != self.latents.shape:
            fact = f"'latents' has shape {list(self.latents.shape)}, and this job takes {list(shape)}"
            raise ArtefactForeignError("denoise.safetensors", fact, "Run --stage denoise with this model and size")
        if self.rest is None:
            self.rest = tuple(self.real(*args, **kwargs))[1:]
        if self.state is not None:
            self.generator.set_state(self.state)
        self.after = self.generator.get_state()
        return (self.latents, *self.rest)

    def finish(self) -> None:
        """Refuses frames that were made with other random numbers than the seed's."""
        if self.state is None and self.after is not None and not torch.equal(self.after, self.generator.get_state()):
            fact = f"It lacks '{GENERATOR}', the state of the seed's generator, and the pipeline draws after its loop"
            remedy = "Run --stage denoise with this model"
            raise ArtefactForeignError("denoise.safetensors", fact, remedy, name=GENERATOR)


class FirstStep(BaseException):
    """Leaves a pipeline's loop at its first step."""

    def __init__(self, sample: torch.Tensor) -> None:
        super().__init__()
        self.sample = sample


class First(Loop):
    """A loop that is left at its first step."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler, torch.Generator(), done=1)

    def returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Leaves the loop."""
        raise FirstStep(self.sample(args, kwargs))
