"""The path: patch, load, shard, compile, run, save. All else that a run does is in `journey`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import compile, patch, shard
from torchport.compile import jax_cache, network, ported, preflight
from torchport.compile.cached_steps import StepCached
from torchport.compile.in_force import in_force, stage_in_force
from torchport.config import checkout
from torchport.config.card import DENOISING
from torchport.config.step_cache import schedule_text
from torchport.errors import BadValueError, OutputError
from torchport.files import atomic
from torchport.load import checkpoint
from torchport.processes import hosts
from torchport.processes.stopping import Stopping
from torchport.progress import log
from torchport.run.journey import LOSSY_INT8, Journey, Summary, log_patches
from torchport.save.manifest import versions
from torchport.stages import family
from torchport.task import Request, Task, accept, execution
from torchport.task.devices import devices


def run(request: Request, cluster: hosts.Cluster | None = None) -> Summary:
    """Runs the stages of a request, together with the other processes of a cluster; returns where its outputs are."""
    with Stopping().listening() as stopping:
        task = accept(request)
        prepare(task, cluster)
        with hosts.joined(cluster) as watch:
            settings = {**task.job.model_dump(), **dataclasses.asdict(task.settings)}
            settings |= task.request.execution.row(task.machine)
            hosts.check_same({**settings, "stage": task.request.stage, "versions": versions()})
            watch.folder = Path(hosts.from_first(lambda: str(task.folder)))
            return _carry(dataclasses.replace(task, folder=watch.folder), stopping)


def prepare(task: Task, cluster: hosts.Cluster | None = None) -> None:
    """Passes a task's flags to the compiler before JAX starts; refuses a cluster for a task of one host."""
    if task.original and cluster is not None:
        remedy = "Leave the cluster out, and run it on one host"
        raise BadValueError("--backend original", "It runs in PyTorch, which knows nothing of other hosts", remedy)
    if not task.request.execution.jit and cluster is not None:
        raise BadValueError("--no-jit", "It looks at values that lie on other hosts", "Leave the cluster out")
    execution.pass_flags(task.request.execution, task.machine)


def _carry(task: Task, stopping: Stopping) -> Summary:
    """Runs all stages of a task in its locked folder; if the folder cannot be written, the error says how to go on."""
    with output_folder(task.folder), shared(task) as common:
        journey = Journey(task, common.weights, common.upstream, stopping)
        try:
            for stage in journey.stages():
                with at_stage(common, stage) as loaded_stage:
                    loaded_stage.carry(journey)
            return journey.finish()
        except OutputError as error:
            raise OutputError(error.place, error.fact, f"{error.remedy}; {journey.continuation()}") from error


@contextlib.contextmanager
def staged(request: Request) -> Iterator[Callable[[Request], Summary]]:
    """Loads one stage, and yields a function that runs requests through the stage, for somebody else's pipeline.

    Args:
        request: Names the stage. It may lack a prompt and an image.

    Yields:
        `carry(request)`, for requests that differ from `request` in prompt, seed, image and folders alone.
    """
    task = accept(request, dry=True)
    if request.stage == "all":
        raise BadValueError("--stage all", "One stage is loaded here", "Name it")
    prepare(task)
    with shared(task) as common, at_stage(common, task.stages[0]) as loaded_stage:

        def carry(video: Request) -> Summary:
            """Runs a request through the loaded stage; refuses a request for another stage or another shape."""
            accepted = accept(video)
            is_alike = accepted.job == task.job and accepted.settings.shared() == task.settings.shared()
            if not is_alike or video.stage != request.stage:
                fact = f"It is no request for '{request.stage}' of the shape that the stage is loaded for"
                remedy = "Let it differ in prompt, seed, image and folders alone"
                raise BadValueError(str(accepted.folder), fact, remedy)
            with output_folder(accepted.folder):
                journey = Journey(accepted, common.weights, common.upstream, Stopping())
                for _ in journey.stages():  # the loaded stage; none if a stopped run has finished it
                    loaded_stage.carry(journey)
                return journey.finish()

        yield carry


@dataclasses.dataclass(frozen=True)
class Shared:
    """The objects that runs of one shape share. The runs' tasks differ in prompts, seed, image and folder alone."""

    task: Task  #: The task of the first of them.
    weights: checkpoint.Checkpoint
    upstream: checkout.Upstream | None


@contextlib.contextmanager
def shared(task: Task) -> Iterator[Shared]:
    """Applies a task's patches, checks the task against mesh and checkpoint, and yields the `Shared` of its shape."""
    with in_force(task, task.stages), jax_cache.of_task(task):
        preflight.check(task)
        common = Shared(task, checkpoint_of(task), checkout.upstream(task.card.checkout, task.upstream))
        loras = task.loras if any(stage.name in DENOISING for stage in task.stages) else []
        hosts.check_same({"checkpoint": common.weights.digests, "upstream": str(common.upstream), "lora": loras})
        preflight.check_checkpoint(task, common.weights.folder)
        yield common


@contextlib.contextmanager
def at_stage(common: Shared, stage: family.Stage) -> Iterator[StageAtHand]:
    """Yields a stage under its patches, to be loaded once for several runs; frees its weights afterwards."""
    with stage_in_force(common.task, stage) as ledger:  # patch
        loaded_stage = StageAtHand(common, stage, ledger)
        # The objects of this moment are no garbage of the stage: a collection need not walk through a million of them.
        gc.freeze()
        try:
            yield loaded_stage
            loaded_stage.parts, loaded_stage.call, loaded_stage.encoders = {}, None, {}
            gc.collect()  # the network's weights are in circles of references; the next one needs their room
        finally:
            gc.unfreeze()


@dataclasses.dataclass(eq=False)
class StageAtHand:
    """A stage that is loaded once, by the first of one or several runs of one shape."""

    common: Shared
    stage: family.Stage
    ledger: patch.Ledger
    #: Whether the stage is being loaded: an error of this moment is an error of all runs.
    is_loading: bool = False
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: Any = None  #: The network, ready to be called; None without a network, and before the first run.
    encoders: dict[str, ported.Ported] = dataclasses.field(default_factory=dict)
    _loaded: patch.Trace | None = None  # the patches' calls while it was loaded

    def carry(self, journey: Journey) -> None:
        """Runs the stage for a journey: reads its inputs, computes, and writes its outputs."""
        stage = self.stage
        inputs = journey.read(stage)
        ledger = self.ledger if self._loaded is None else self.ledger.of_run(self._loaded)
        # Stages in PyTorch run in one process alone: another machine might round differently.
        run = functools.partial(self._outputs, journey, ledger, inputs)  # load, shard, compile, run
        is_everywhere = stage.network is not None or journey.task.encodes_on_devices(stage)
        if is_everywhere:
            outputs = run()
        else:
            _, tensors = hosts.pair_from_first(lambda: (None, run()))  # no data beside the tensors
            outputs = dict(tensors)
        journey.write(stage, outputs, ledger)  # save
        journey.note_seconds(stage, "save")

    def _outputs(
        self, journey: Journey, ledger: patch.Ledger, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Loads the stage at the first run, runs it, notes the run in the journey, and returns the checked outputs."""
        task, stage = journey.task, self.stage
        self.is_loading = True
        parts = self._parts_of_run()  # load
        self.is_loading = False
        family.check_inputs(stage, parts, task.settings, inputs)
        journey.note_seconds(stage, "load")
        self.is_loading = True
        call = self._network(parts, ledger)  # shard, compile
        self.is_loading = False
        journey.note_seconds(stage, "shard")
        with network.first_not_finite_named(call):
            if task.job.attention == "splash_int8" and stage.name in DENOISING and not task.original:
                log.info("%s: attention splash_int8 (lossy) %s", stage.name, LOSSY_INT8)
            call, steps = self._cached(call, journey, journey.steps_of(stage, ledger))
            outputs = stage.run(parts, call, task.settings, steps, **inputs)  # run
            if isinstance(call, StepCached) and stage.name == DENOISING[0]:
                outputs |= call.measured()  # the second network's curve goes on from it
        family.check_outputs(stage, outputs)
        journey.note_run(stage, call, self._programs())
        if not journey.is_idle(stage, outputs):
            ledger.check_called()
        log_patches(ledger, "" if task.original or stage.network is None else " while tracing")
        return outputs

    def _cached(self, call: Any, journey: Journey, steps: family.Steps) -> tuple[Any, family.Steps]:
        """Returns a run's call and steps as they are, or wrapped in a `StepCached` if the stage has a step cache."""
        task = journey.task
        cache = None if task.original else network.step_cache_of(task, self.stage)
        if cache is None:
            return call, steps
        computed = schedule_text(cache, task.job.steps, journey.begins)
        log.info("%s: cache %s (lossy) computes %s", self.stage.name, cache.kind, computed)
        cached = StepCached(call, cache, steps, task.job.steps)
        return cached, cached.steps

    def _parts_of_run(self) -> dict[str, Any]:
        """Returns the stage's parts. The first run loads all parts, and later runs only those without weights."""
        task = self.common.task
        folder = self.common.weights.folder
        if self._loaded is not None:
            return network.afresh(task, self.stage, self.parts, folder)
        self.parts = network.loaded(task, self.stage, folder)
        if task.encodes_on_devices(self.stage):
            self.encoders = ported.encoders(task, self.stage, self.parts, self.ledger)
            self.parts |= self.encoders
        return self.parts

    def _network(self, parts: Mapping[str, Any], ledger: patch.Ledger) -> Any:
        """Returns the stage's network: compiled for the mesh, or in PyTorch for the original; None without a network.
        The first run makes it, and later runs use it again. Each run starts new counts of its programs.
        """
        task = self.common.task
        stage = self.stage
        folder = self.common.weights.folder
        if self._loaded is None:
            if stage.network is not None and task.original:
                self.call = network.eager(task, stage, parts, folder)
            elif stage.network is not None:
                module, mesh = network.module_of(stage, parts), shard.make_mesh(task.job.mesh, devices(task.machine))
                weights = network.placed(task, stage, parts, mesh, folder)  # shard
                self.call = network.compiled(task, stage, module, weights, mesh, trace=ledger.trace())  # compile
            self._loaded = ledger.trace()
        for compiled in self._programs().values():
            compiled.start_run(ledger)
        return self.call

    def _programs(self) -> dict[str, compile.Compiled]:
        """Returns the stage's programs by name: the network as `denoise`, or encoders as `encode text_encoder`."""
        programs = {f"{self.stage.name} {name}": each.compiled for name, each in self.encoders.items()}
        return {self.stage.name: self.call} if isinstance(self.call, compile.Compiled) else programs


def checkpoint_of(task: Task) -> checkpoint.Checkpoint:
    """Returns a task's checkpoint, after downloading its files, or writing them for a tiny checkpoint."""
    if not task.is_tiny:
        return checkpoint.locate(task.checkpoint, task.card, task.settings.variant)
    folder = network.write_tiny(task)
    return checkpoint.Checkpoint(
        folder, f"tiny:{folder.name}", checkpoint.digests(folder, task.card, task.settings.variant)
    )


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Makes the output folder and locks it while the context lasts; removes a new folder that an error leaves empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()] if hosts.is_first() else []
    hosts.from_first(lambda: atomic.make_folder(folder))
    lock = contextlib.ExitStack()
    try:
        with lock:
            hosts.from_first(lambda: lock.enter_context(atomic.locked(folder)))
            yield
    except BaseException:
        # A folder that cannot be removed stays: the first error matters more.
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise
