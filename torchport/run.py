"""The path: patch, load, shard, compile, run, save. All else that a run does is in `bookkeeping`."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import engine, load, patch, shard
from torchport.bookkeeping.journey import LOSSY_INT8, Journey, log_patches
from torchport.bookkeeping.output import output_folder
from torchport.compile import failure, kept, network, preflight
from torchport.compile.step_cache import StepCached
from torchport.config import checkout
from torchport.config.card import DENOISING
from torchport.config.step_cache import described
from torchport.errors import BadValueError, OutputError
from torchport.load import checkpoint
from torchport.processes import hosts
from torchport.processes.stopping import Stopping
from torchport.progress import log
from torchport.save.manifest import versions
from torchport.stages import family
from torchport.task import Request, Task, accept
from torchport.task.devices import devices


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the video is, and where the time went.

    Attributes:
        folder: The output folder.
        video: The video, if this run decoded one.
        seconds: By stage and verb: `denoise compile`, `denoise run`.
        steps: Denoising steps that this run took.
        upstream: The upstream and its commit, if it is a checkout.
    """

    folder: Path
    video: Path | None
    seconds: dict[str, float]
    steps: int
    upstream: checkout.Upstream | None = None


def run(request: Request, cluster: hosts.Cluster | None = None) -> Summary:
    """Carries a request down the path and returns where its outputs are.

    Args:
        request: The request.
        cluster: The processes that run it together, each with the same request; by default this one alone.

    Raises:
        TorchportError: Whatever is refused; see `torchport.errors`.
    """
    with Stopping().listening() as stopping:
        task = accept(request)
        if task.original and cluster is not None:
            remedy = "Leave the cluster out, and run it on one host"
            raise BadValueError("--backend original", "It runs in PyTorch, which knows nothing of other hosts", remedy)
        with hosts.joined(cluster) as watch:
            task = _alike(task)
            watch.folder = task.folder
            return _carry(task, stopping)


def _alike(task: Task) -> Task:
    """Returns the task with the first process's folder, if all processes of the run have the same task."""
    settings = dataclasses.asdict(task.settings)
    hosts.check_same({**task.job.model_dump(), **settings, "stage": task.request.stage, "versions": versions()})
    return dataclasses.replace(task, folder=Path(hosts.from_first(lambda: str(task.folder))))


def _carry(task: Task, stopping: Stopping) -> Summary:
    """Carries a task down the path."""
    entries = task.patches(task.stages)
    hush = not log.isEnabledFor(logging.DEBUG)
    with (
        failure.explained(task),
        checkout.on_path(task.upstream),
        patch.applied(entries),
        checkout.hushed(hush),
        load.default_dtype(torch.float32),  # upstream's schedules count on it, and a caller may have set another
        output_folder(task.folder),
        kept.Programs.of_task(task) as programs,
    ):
        preflight.check(task)
        journey = Journey(task, _checkpoint(task), stopping, programs)
        loras = task.loras if task.takes_steps else []
        hosts.check_same({"checkpoint": journey.weights.digests, "upstream": str(journey.upstream), "lora": loras})
        preflight.check_checkpoint(task, journey.weights.folder)
        try:
            for stage in journey.stages():
                _travel(journey, stage)
                gc.collect()  # the network's weights are in circles of references; the next one needs their room
            return Summary(task.folder, journey.finish(), journey.seconds, journey.steps, journey.upstream)
        except OutputError as error:
            raise OutputError(error.place, error.fact, f"{error.remedy}; {journey.going_on()}") from error


def _travel(journey: Journey, stage: family.Stage) -> None:
    """Carries one stage down the path."""
    task, lap = journey.task, journey.clock(stage)
    inputs = journey.read(stage)
    with patch.applied(task.patches([stage]), stage=stage.name) as ledger:  # patch
        # Stages in PyTorch run in one process alone: another machine might round differently.
        run = functools.partial(_outputs, journey, stage, ledger, inputs, lap)  # load, shard, compile, run
        outputs = run() if stage.network is not None else hosts.tensors_from_first(run)
        journey.write(stage, outputs, ledger)  # save
    lap("save")


def _outputs(
    journey: Journey,
    stage: family.Stage,
    ledger: patch.Ledger,
    inputs: Mapping[str, torch.Tensor],
    lap: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Loads a stage, and runs it on its inputs."""
    task = journey.task
    parts = network.loaded(task, stage, journey.weights.folder)  # load
    family.check_inputs(stage, parts, task.settings, inputs)
    lap("load")
    with engine.operators({op.target: op.function for op in ledger.ops()}):
        call = _network(journey, stage, parts, ledger)  # shard, compile
        lap("shard")
        steps = journey.steps_of(stage, ledger)
        cache = None if task.original else network.step_cache_of(task, stage)
        if cache is not None:
            log.info("%s: cache %s (lossy) computes %s", stage.name, cache.kind, described(cache, task.job.steps))
            call = StepCached(call, cache, steps, task.job.steps)
            steps = call.steps
        if task.job.attention == "splash_int8" and stage.name in DENOISING and not task.original:
            log.info("%s: attention splash_int8 (lossy) %s", stage.name, LOSSY_INT8)
        outputs = stage.run(parts, call, task.settings, steps, **inputs)  # run
        family.check_outputs(stage, outputs)
        journey.note_run(stage, call, lap)
    if not journey.is_idle(stage, outputs):
        ledger.check_called()
    log_patches(ledger, "" if task.original or stage.network is None else " while tracing")
    return outputs


def _network(journey: Journey, stage: family.Stage, parts: Mapping[str, Any], ledger: patch.Ledger) -> Any:
    """Returns the stage's network, ready to be called: eager, or placed and compiled at its first call."""
    task, folder = journey.task, journey.weights.folder
    if stage.network is None:
        return None
    if task.original:
        return network.eager(task, stage, parts, folder)
    module, mesh = network.module_of(stage, parts), shard.make_mesh(task.job.mesh, devices(task.machine))
    weights = network.placed(task, stage, parts, mesh, folder)  # shard
    programs_of = journey.programs_of(stage, mesh, ledger)
    trace = ledger.trace()
    return network.compiled(task, stage, module, weights, mesh, trace=trace, programs_of=programs_of)  # compile


def _checkpoint(task: Task) -> checkpoint.Checkpoint:
    if task.checkpoint != "tiny":
        return checkpoint.locate(task.checkpoint, task.card, task.settings.variant)
    folder = network.write_tiny(task)
    return checkpoint.Checkpoint(
        folder, f"tiny:{folder.name}", checkpoint.digests(folder, task.card, task.settings.variant)
    )
