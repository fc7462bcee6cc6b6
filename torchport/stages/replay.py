"""A scheduler in upstream's loop whose `step` is ours: steps that are done return what is known already."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Generator, Mapping
from typing import Any

import torch

from torchport.errors import ArtefactForeignError, BadValueError
from torchport.save import tree
from torchport.stages.family import Settings, Steps

RETURNED = "returned"
"""The name of what `step` returned, in what is saved after a step."""
GENERATOR = "generator"
"""The name of the state of the seed's generator, in what is saved after a step and in what `denoise` returns."""
SOUND = "sound"
"""The name of a loop's second latents, in what is saved after a step."""
OTHER_LOOP = "Write a family with a loop of its own for it: docs/families.md"


class _StepMethod:
    """A scheduler's `step` as upstream's loop finds it: it calls `Loop.stepped`.

    A pipeline that makes sound steps its second latents with a deep copy of the scheduler. The copy's `step` must know
    the copy.
    """

    def __init__(self, loop: Loop, scheduler: Any) -> None:
        self.loop = loop
        self.scheduler = scheduler
        self.real = type(scheduler).step.__get__(scheduler)
        functools.update_wrapper(self, self.real)  # upstream reads its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loop.stepped(self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StepMethod:
        return _StepMethod(self.loop, memo[id(self.scheduler)])  # the copy of the scheduler, which is made before


class Loop:
    """Takes over the steps of a pipeline's loop: `returned` is called in place of its scheduler's `step`.

    Args:
        scheduler: It is changed: upstream asks for its class, so it remains itself.
        generator: The seed's.
        done: How many steps have results that are known.
        latents: How many latents go through the loop. With sound they are two, and a copy of the scheduler has the
            second: that is called after the scheduler in each step.
    """

    def __init__(self, scheduler: Any, generator: torch.Generator, done: int = 0, latents: int = 1) -> None:
        self.scheduler = scheduler
        self.generator = generator
        self.done = done
        self.number = 0  #: The steps that are over.
        self.count = latents
        #: The `step` of the scheduler and of its copy: video and sound, in the order of their calls.
        self.tracks: list[_StepMethod] = []
        self.shapes: list[torch.Size] = []  #: Of each latents, where results of steps are known.
        self.real = type(scheduler).step.__get__(scheduler)
        scheduler.step = _StepMethod(self, scheduler)

    def stepped(self, step: _StepMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts a step of the loop, and returns the result of `returned` as a tuple, or in the object of diffusers."""
        if step not in self.tracks:
            if len(self.tracks) == self.count:
                fact = f"The pipeline steps with {self.count + 1} copies of its scheduler"
                raise BadValueError(type(self.scheduler).__name__, fact, OTHER_LOOP)
            if self.tracks and self.tracks[0].scheduler is not self.scheduler:
                fact = "The pipeline's loop steps with a copy of its scheduler before the scheduler itself"
                raise BadValueError(type(self.scheduler).__name__, fact, OTHER_LOOP)
            self.tracks.append(step)
        track = self.tracks.index(step)
        parameters = inspect.signature(step.real).parameters
        if self.number == 0:
            self._check_first_step(self.argument("sample", args, kwargs))
        # The step of the sound, track 1, is the same step of the loop.
        if track == 0:
            self.number += 1
        if "generator" in parameters:
            kwargs.setdefault("generator", self.generator)  # most pipelines pass none, and no seed would decide
        if kwargs.get("return_dict") is False or "return_dict" not in parameters:
            return self.returned(track, args, kwargs)
        from diffusers.schedulers.scheduling_utils import SchedulerOutput

        return SchedulerOutput(self.returned(track, args, {**kwargs, "return_dict": False})[0])

    def _check_first_step(self, latents: torch.Tensor) -> None:
        """Refuses timesteps of NaN or infinity, and latents of several videos, which nothing after the loop takes."""
        timesteps = torch.as_tensor(self.scheduler.timesteps)
        if not timesteps.isfinite().all():  # from a division by zero: `step` would never find its own among them
            name = type(self.scheduler).__name__
            fact = f"It is {len(timesteps)}, and '{name}' makes timesteps of NaN or infinity of it"
            raise BadValueError("'steps'", fact, "Take more")
        if latents.shape[0] != 1:
            fact = f"The pipeline makes {latents.shape[0]} videos at once"
            raise BadValueError("'call'", fact, "Make one, and run again with another --seed for the next")

    @property
    def is_done(self) -> bool:
        """Whether the step under way has a known result, so that its network need not be called."""
        return self.number < self.done

    def before_network(self) -> None:
        """Is called before each call of the loop's network, for a subclass to show progress."""

    def before_other_network(self) -> None:
        """Is called before zeros are returned in place of a network that another stage has."""

    def finish(self) -> None:
        """Is called after the loop."""

    def returned(self, track: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the results of a call of `step`, as a tuple: for the video (`track` 0) or the sound (1)."""
        raise NotImplementedError

    def argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns an argument that `step` is called with, such as `sample`, the latents; None where it has none."""
        return inspect.signature(self.real).bind(*args, **kwargs).arguments.get(name)


def latents_of(state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns the latents in a loop's state, a family's or a `Replay`'s; None if it has neither."""
    return next((state[name] for name in ("latents", f"{RETURNED}.0") if name in state), None)


def all_latents(state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the latents in a loop's state: those of the video, and after them those of the sound, if there are."""
    known = (latents_of(state), state.get(f"{SOUND}.{RETURNED}.0"))
    return [each for each in known if each is not None]


class LoopLeft(BaseException):
    """Leaves a pipeline's loop where nothing more of it is needed. Upstream's `except Exception` does not catch it."""


class First(Loop):
    """A loop that is left at its first step, with the latents there as `samples`."""

    def __init__(self, scheduler: Any, latents: int = 1) -> None:
        super().__init__(scheduler, torch.Generator(), done=1, latents=latents)
        self.samples: list[torch.Tensor] = []

    def returned(self, track: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Keeps the latents that `step` is called with, and leaves the loop when all are there, with sound two."""
        self.samples.append(self.argument("sample", args, kwargs))
        if len(self.samples) == self.count:
            raise LoopLeft
        return (self.samples[-1],)


class Replay(Loop):
    """A loop that goes on after the steps that a stopped run, or the stage before, took.

    What upstream's loop carries from one step to the next must be what `step` returns, or what scheduler and generator
    hold. That is saved after each step.

    Args:
        steps: Progress, saving, and where to go on.
        pipeline: The name of its class, for errors.
        leaves: Whether the loop is left where it calls another stage's network. Otherwise a stage before this one took
            those steps; where none did, as in a rehearsal, that network returns zeros.
    """

    def __init__(
        self, scheduler: Any, settings: Settings, steps: Steps, pipeline: str, latents: int = 1, leaves: bool = False
    ) -> None:
        done, self.state = steps.resume or (0, {})  #: The tensors that were saved after the last step, by name.
        super().__init__(scheduler, torch.Generator().manual_seed(settings.seed), done, latents)
        self.shapes = [tensor.shape for tensor in all_latents(self.state)]
        self.steps = steps
        self.pipeline = pipeline
        self.total = settings.steps
        self.leaves = leaves
        self.saved: Any = tree.unpacked(self.state) if self.state else None  #: The values that it was packed from.
        self.progress = iter(steps.track(range(done, self.total), done=done, total=self.total))
        self.advanced = done  #: The steps that the progress bar has shown.
        self.fields: list[dict[str, Any]] = []  #: The fields of each latents' scheduler before the first step.
        self.results: list[dict[str, Any]] = []  #: The results to save of the step that runs, for each latents.
        self.is_other_stage = False  #: Whether the step that runs belongs to another stage's network.

    def before_network(self) -> None:
        """Advances the progress bar, once a step: guidance may call the network twice."""
        if self.advanced <= self.number:
            next(self.progress, None)
            self.advanced = self.number + 1

    def before_other_network(self) -> None:
        """Leaves the loop, or notes that the next step is another stage's, which is taken with zeros and not saved.

        Raises if this stage has taken a step before: the loop would go back to the other network.
        """
        if self.leaves:
            raise LoopLeft
        if self.advanced:
            fact = f"Step {self.number + 1} of {self.total} goes back from its second network to the first"
            raise BadValueError(self.pipeline, fact, OTHER_LOOP)
        self.is_other_stage = True

    def finish(self) -> None:
        """Ends the progress bar."""
        next(self.progress, None)
        if isinstance(self.progress, Generator):
            self.progress.close()  # a loop that is left has items that no step took

    def returned(self, track: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the saved result for a step that is done; takes any other, and passes the state to `finished`."""
        step = self.tracks[track]
        is_last = track == self.count - 1
        if self.number == 1:
            self.fields.append(dict(vars(step.scheduler)))
        if self.number <= self.done:
            saved = self.saved[SOUND] if track else self.saved
            # The next step is taken, from the state after this one.
            if self.number == self.done:
                vars(step.scheduler).update(saved["scheduler"])
                if is_last:
                    self.generator.set_state(self.saved[GENERATOR])
            return saved[RETURNED]
        returned = step.real(*args, **kwargs)
        # Nothing is saved of another stage's step.
        if self.is_other_stage:
            self.is_other_stage = not is_last
            return returned
        result = {RETURNED: returned, "scheduler": self._scheduler_state(track, returned)}
        self.results = [*self.results, result] if track else [result]
        if is_last:
            first, *others = self.results
            sound = {SOUND: others[0]} if others else {}
            self.state = tree.packed({**first, GENERATOR: self.generator.get_state(), **sound})
            self.steps.finished(self.number, self.state, self.argument("timestep", args, kwargs))
        return returned

    def _scheduler_state(self, track: int, returned: Any) -> dict[str, Any]:
        """Returns a scheduler's fields after a step; raises if a field, or what the step returned, cannot be saved."""
        name = type(self.scheduler).__name__
        if not isinstance(returned, tuple) or not tree.is_packable(returned):
            fact = f"Its 'step' returns a {type(returned).__name__} to '{self.pipeline}', and no tuple of tensors"
            raise BadValueError(name, fact, OTHER_LOOP)
        fields = vars(self.tracks[track].scheduler)
        state = {key: value for key, value in fields.items() if tree.is_packable(value)}
        # A value that cannot be saved may be there, if no step changes it.
        for key, value in fields.items():
            if key not in state and self.fields[track].get(key) is not value:
                fact = f"It keeps '{key}', of the type {type(value).__name__}, from step to step of '{self.pipeline}'"
                raise BadValueError(name, fact, f"That cannot be saved. {OTHER_LOOP}")
        return state


class Finished(Loop):
    """A loop all of whose steps are done: each returns the finished latents.

    If upstream's code draws random numbers after the loop, it gets those that the run which took the steps would draw.

    Args:
        latents: By their names in the artefact; those of the sound are second.
        state: Of the seed's generator after the last step; None if the artefact lacks it.
    """

    def __init__(self, scheduler: Any, latents: Mapping[str, torch.Tensor], state: torch.Tensor | None) -> None:
        super().__init__(scheduler, torch.Generator(), done=sys.maxsize, latents=len(latents))
        self.shapes = [tensor.shape for tensor in latents.values()]
        self.latents = list(latents.items())
        self.state = state
        self.after: torch.Tensor | None = None  #: The generator's state when the last step returned.
        self.rest: list[tuple[Any, ...]] = []  #: What else `step` returns, for each latents.

    def returned(self, track: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the finished latents, and the other results of upstream's `step`, which is called once for them."""
        name, latents = self.latents[track]
        shape = self.argument("sample", args, kwargs).shape
        if shape != latents.shape:
            fact = f"'{name}' has shape {list(latents.shape)}, and this job takes {list(shape)}"
            raise ArtefactForeignError("denoise.safetensors", fact, "Run --stage denoise with this model and size")
        # At the first step of these latents.
        if track == len(self.rest):
            self.rest.append(tuple(self.tracks[track].real(*args, **kwargs))[1:])
        if self.state is not None:
            self.generator.set_state(self.state)
        self.after = self.generator.get_state()
        return (latents, *self.rest[track])

    def finish(self) -> None:
        """Refuses frames that were made with other random numbers than the seed's."""
        if self.state is None and self.after is not None and not torch.equal(self.after, self.generator.get_state()):
            fact = f"It lacks '{GENERATOR}', the state of the seed's generator, and the pipeline draws after its loop"
            remedy = "Run --stage denoise with this model"
            raise ArtefactForeignError("denoise.safetensors", fact, remedy, name=GENERATOR)
