"""Carries a task down the path, one stage or all: patch, load, shard, compile, run, save meet only here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch

from torchport import compile, load, patch, shard
from torchport.attention import bound, dispatch
from torchport.bookkeeping.journey import Journey
from torchport.compile import kept as programs
from torchport.compile import preflight
from torchport.config import checkout
from torchport.config.machine import devices
from torchport.errors import BadValueError, CheckpointBrokenError, OutputError
from torchport.files import atomic
from torchport.foreign import reading
from torchport.load import checkpoint, tiny
from torchport.processes import hosts
from torchport.processes.stopping import Stopping
from torchport.progress import log
from torchport.save.manifest import versions
from torchport.stages import family
from torchport.task import Request, Task, accept


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the video is, and where the time went.

    Attributes:
        folder: The output folder.
        video: The video, if this run decoded one.
        seconds: By stage and verb: `denoise compile`, `denoise run`.
        steps: Denoising steps that this run took.
    """

    folder: Path
    video: Path | None
    seconds: dict[str, float]
    steps: int


def run(request: Request, cluster: hosts.Cluster | None = None) -> Summary:
    """Carries a request down the path and returns where its outputs are.

    Args:
        request: What was asked for.
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
    hosts.agree({**task.job.model_dump(), **settings, "stage": task.request.stage, "versions": versions()})
    return dataclasses.replace(task, folder=Path(hosts.told(lambda: str(task.folder))))


def _carry(task: Task, stopping: Stopping) -> Summary:
    """Carries a task down the path."""
    entries = task.patches(task.stages)
    hush = not log.isEnabledFor(logging.DEBUG)
    with (
        checkout.on_path(task.upstream),
        patch.applied(entries),
        checkout.hushed(hush),
        load.default_dtype(torch.float32),  # upstream's schedules count on it, and a caller may have set another
        _folder(task.folder),
        programs.Programs.opened(task) as kept,
    ):
        preflight.check(task)
        journey = Journey(task, _weights(task), stopping, kept)
        hosts.agree({"checkpoint": journey.weights.digests})
        _check_parts(journey)
        try:
            for stage in journey.stages():
                _travel(journey, stage)
            return Summary(task.folder, journey.finish(), journey.seconds, journey.steps)
        except OutputError as error:
            raise OutputError(error.place, error.fact, f"{error.remedy}; {journey.going_on()}") from error


def _check_parts(journey: Journey) -> None:
    """Refuses a checkpoint that lacks a part, or holds another model's, before the first stage spends hours."""
    task = journey.task
    for stage in task.stages:
        network = [stage.network] if stage.network is not None else []
        for name in (*stage.parts, *stage.loads(task.settings), *network):
            load.account_component(task.card.components[name], task.component_folder(journey.weights.folder, name))


def _built(journey: Journey, name: str) -> torch.nn.Module:
    """Returns a network without storage, as the checkpoint configures it."""
    task, folder = journey.task, journey.task.component_folder(journey.weights.folder, name)
    config = checkpoint.read_json(folder / "config.json")
    return load.build(task.card.components[name].class_, config, task.dtype(name), str(folder))


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Makes the output folder, keeps it for this run, and takes it away again if an error leaves nothing in it."""
    new = [path for path in (folder, *folder.parents) if not path.exists()] if hosts.first() else []
    hosts.told(lambda: atomic.make_folder(folder))
    lock = contextlib.ExitStack()
    try:
        with lock:
            hosts.told(lambda: lock.enter_context(atomic.locked(folder)))
            yield
    except BaseException:
        # What cannot be removed stays: the error that is on its way says more.
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise


def _weights(task: Task) -> checkpoint.Checkpoint:
    if task.checkpoint != "tiny":
        return checkpoint.locate(task.checkpoint, task.card, task.settings.variant)
    folder = tiny.write(task.card, task.family.arrange_tiny)
    return checkpoint.Checkpoint(
        folder, f"tiny:{folder.name}", checkpoint.digests(folder, task.card, task.settings.variant)
    )


def _travel(journey: Journey, stage: family.Stage) -> None:
    """Carries one stage down the path."""
    task, lap = journey.task, journey.clock(stage)
    inputs = journey.read(stage)
    with patch.applied(task.patches([stage]), stage=stage.name) as ledger:  # patch
        run = functools.partial(_run, journey, stage, ledger, inputs, lap)  # load, shard, compile, run
        # What runs in PyTorch runs in one process: elsewhere it might round otherwise.
        outputs = run() if stage.network is not None else hosts.told_with(lambda: (None, run()))[1]
        journey.write(stage, outputs, ledger)  # save
    lap("save")


def _run(
    journey: Journey,
    stage: family.Stage,
    ledger: patch.Ledger,
    inputs: dict[str, torch.Tensor],
    lap: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Loads a stage, and runs it on its inputs."""
    task = journey.task
    parts = _load(journey, stage)  # load
    family.check_inputs(stage, parts, task.settings, inputs)
    lap("load")
    with compile.operators({op.target: op.function for op in ledger.ops()}):
        call = _network(journey, stage, parts, ledger)  # shard, compile
        lap("shard")
        outputs = stage.run(parts, call, task.settings, journey.steps_of(stage, ledger), **inputs)  # run
        # Programs are compiled when first called, inside the verb.
        journey.seconds[f"{stage.name} compile"] = call.seconds if isinstance(call, compile.Compiled) else 0.0
        lap("run")
        journey.seconds[f"{stage.name} run"] -= journey.seconds[f"{stage.name} compile"]
    ledger.check_called()
    _log_patches(ledger, "" if task.original or stage.network is None else " while tracing")
    return outputs


def _log_patches(ledger: patch.Ledger, when: str) -> None:
    """Logs one line for all patches, one for each that is not exact or does not stand, and with -v one for each."""
    rows = ledger.rows()
    standing = sum(row["state"] in ("applied", "used") for row in rows)
    if rows:
        log.info("patches: %d in force, %d called%s", standing, sum(bool(row["calls"]) for row in rows), when)
    for row in rows:
        promise = row["equivalence"] if isinstance(row["equivalence"], str) else next(iter(row["equivalence"]))
        matters = promise in ("close", "lossy") or row["state"] == "displaced"
        calls = f", called {row['calls']} time{'s' * (row['calls'] > 1)}{when}" if row["calls"] else ""
        log.log(
            logging.INFO if matters else logging.DEBUG, "patch %s (%s): %s%s", row["id"], promise, row["state"], calls
        )


def _load(journey: Journey, stage: family.Stage) -> dict[str, Any]:
    """Returns the stage's parts: whole on the host, or, the network and what lends its configuration, on meta."""
    task = journey.task
    root = journey.weights.folder
    with reading(CheckpointBrokenError, str(root), "Upstream cannot load its encoders", checkpoint.WHOLE):
        parts = stage.load(root, task.settings) if stage.load is not None else {}
    for name in stage.parts:
        component, folder = task.card.components[name], task.component_folder(journey.weights.folder, name)
        if component.dtype is None:
            parts[name] = load.part(component.class_, folder)
        else:
            parts[name] = load.text_encoder(component, folder, task.dtype(name), name)
    for name in (*stage.meta, *([stage.network] if stage.network else [])):
        if name in parts:
            continue  # loaded whole already
        parts[name] = _built(journey, name)
    if stage.prepare is not None:
        stage.prepare(parts, task.settings)
    return parts


def _network(journey: Journey, stage: family.Stage, parts: Mapping[str, Any], ledger: patch.Ledger) -> Any:
    """Returns the stage's network, ready to be called: filled and eager, or placed and to be compiled."""
    if stage.network is None:
        return None
    task, name = journey.task, stage.network
    module, folder = parts[name].get_submodule(stage.submodule), task.component_folder(journey.weights.folder, name)
    if task.original:
        load.fill(parts[name], folder, name)
        how = functools.partial(stage.call, settings=task.settings) if stage.call is not None else compile.plainly
        return compile.Eager(module, how)
    mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
    strategy = task.card.strategies[task.job.strategy]
    rules = preflight.weight_rules(task, name, module)
    prefix = f"{stage.submodule}." if stage.submodule else ""
    tensors = load.tensors(parts[name], folder, name)
    own = ((key.removeprefix(prefix), tensor) for key, tensor in tensors if key.startswith(prefix))
    weights = shard.place(own, rules, mesh)
    bounds = _score_bounds(task, name, weights)
    return compile.Compiled(
        module,
        weights,
        strategy.inputs[name],
        mesh,
        what=name,
        place=task.rules_place("inputs", name),
        places=task.rule_places("inputs", name),
        precision=task.card.components[name].precision,
        trace=ledger.trace(),
        attention=dispatch.Settings(task.job.attention, bounds),
        activations=strategy.activations.get(name, []),
        stacks=task.card.stacks.get(name, {}) if task.job.stacked else {},
        gathered=shard.gathered(rules),
        rules_place=functools.partial(task.program_place, name),
        how=preflight.how(stage, task),
        kept=journey.programs.of(stage, module, journey.weights.folder, bounds, mesh, ledger),
    )


def _score_bounds(task: Task, name: str, weights: Mapping[str, Any]) -> dict[str, float]:
    """Returns the bounds of a network's attention scores that its gains give."""
    found: dict[str, float] = {}
    # A gain that lies on several hosts is none that this one can read.
    spread = {n: a for n, a in weights.items() if isinstance(a, jax.Array) and not a.is_fully_addressable}
    weights = {**weights, **{name: shard.to_host(array) for name, array in spread.items() if array.ndim == 1}}
    for what, entry in task.card.score_bounds.items():
        place = task.card_document.place(["score_bounds", what])
        limit = bound.of_weights(weights, entry.queries, entry.keys, what, place) if entry.component == name else None
        if limit is not None:
            found[what] = limit
            log.info("attention scores %s: |q . k| is at most %.1f by the gains of the norms", what, limit)
    return found
