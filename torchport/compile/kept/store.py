"""Loads programs from disk before they are traced, stores new ones, and notes which were loaded."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch
from jax import monitoring
from jax.experimental import serialize_executable

from torchport import patch
from torchport.compile.kept import entry, key
from torchport.compile.kept.jax_cache import jax_cache
from torchport.files import cache
from torchport.progress import log, waiting
from torchport.stages import family
from torchport.stages.recorder import Static
from torchport.task import Task

FROM_JAX = "/jax/compilation_cache/cache_hits"
"""JAX's event for an executable that its own cache delivered. Source: jax/_src/compiler.py of JAX 0.10.2."""


class Programs:
    """The programs of a run: where they are kept, and which of them were not compiled here.

    Args:
        task: The run.
        root: Where programs lie; None where none is kept.

    Attributes:
        rows: By stage, one row for each program: `program` is "compiled" or "cached"; `traced`, when; `jax_cache`,
            whether JAX's own cache spared the compilation; `key`, that of the entry, null without one.
    """

    def __init__(self, task: Task, root: Path | None) -> None:
        self.task = task
        self.root = root
        self.rows: dict[str, list[dict[str, Any]]] = {}

    @classmethod
    @contextlib.contextmanager
    def of_task(cls, task: Task) -> Iterator[Programs]:
        """Gives the programs of a run, and points JAX's own cache beside them, unless caching is off.

        Raises:
            OutputError: The cache folder cannot be made.
            BadValueError: Others can write to it.
        """
        if task.original or cache.is_off() or not task.request.cache:
            yield cls(task, None)
            return
        root = cache.make(cache.folder() / "programs")
        cache.check_trusted(root)
        with jax_cache(cache.folder()):
            yield cls(task, root)

    @functools.cached_property
    def common(self) -> dict[str, Any]:
        """The parts of the key that all programs of this process have."""
        checkout = self.task.card.checkout
        return key.of_process([*self.task.card.upstream, *([checkout.package] if checkout else [])])

    def of(
        self,
        stage: family.Stage,
        weights: Path,
        mesh: jax.sharding.Mesh,
        ledger: patch.Ledger,
        module: torch.nn.Module,
        bounds: Mapping[str, float],
    ) -> StagePrograms:
        """Returns the programs of a stage.

        Args:
            stage: The stage.
            weights: The checkpoint's folder.
            mesh: The devices.
            ledger: The stage's patches, in force.
            module: Its network, prepared, and not traced yet.
            bounds: The bounds of attention scores.
        """
        rows = self.rows.setdefault(stage.name, [])
        if self.root is None:
            return StagePrograms(None, stage, dict, {}, mesh, ledger, rows)
        parts = {
            **key.of_stage(self.task, stage, weights, bounds),
            **key.of_mesh(mesh),
            "patches": dict(ledger.trace().digests),
            "network": key.of_module(module),
        }
        return StagePrograms(self.root, stage, lambda: self.common, parts, mesh, ledger, rows)


class StagePrograms:
    """The programs of one stage; see `Programs.of`.

    Args:
        root: Where programs lie; None where none is kept.
        stage: The stage.
        common: Returns the parts of the key that all programs of this process have. It is called only when a program is
            looked up, since hashing takes a moment.
        parts: Those that all programs of the stage have.
        mesh: The devices.
        ledger: The stage's patches, in force.
        rows: Gets a row for each program; see `Programs`.
    """

    def __init__(
        self,
        root: Path | None,
        stage: family.Stage,
        common: Callable[[], Mapping[str, Any]],
        parts: Mapping[str, Any],
        mesh: jax.sharding.Mesh,
        ledger: patch.Ledger,
        rows: list[dict[str, Any]],
    ) -> None:
        self.root = root
        self.stage = stage
        self.common = common
        self.parts = parts
        self.mesh = mesh
        self.ledger = ledger
        self.rows = rows
        self.component = stage.network or ""
        if jax.process_count() > 1:  # each has a program of its own, and they may share the folder
            self.component += f".{jax.process_index()}"

    def program(
        self, weights: Mapping[str, Any], arrays: Mapping[str, Any], static: Static, lower: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """Returns the program of these inputs, and whether it was loaded instead of traced.

        Args:
            weights: The network's weights, placed.
            arrays: Its inputs, placed.
            static: Its other arguments.
            lower: Traces it.

        Raises:
            BadValueError: Somebody else owns the program on disk, or can write to it.
        """
        parts = None if self.root is None else self._key(weights, arrays, static)
        if self.root is None or parts is None:
            program, recalled, _ = self._compiled(lower)
            self._note("compiled", _now(), recalled, None)
            return program, False
        path = entry.folder(self.root, self.component, parts)
        loaded = self._loaded(path, parts, weights, arrays)
        if loaded is not None:
            return loaded, True
        self._log_nearest(parts)
        program, recalled, trace = self._compiled(lower)
        created = _now()
        self._note("compiled", created, recalled, path.name)
        if recalled:
            log.info(
                "%s: JAX's cache had the executable, which cannot be kept a second time: it is traced at every start, "
                "unless JAX's cache is emptied (%s)",
                self.stage.name,
                jax.config.jax_compilation_cache_dir,
            )
        else:
            self._keep(path, parts, created, trace, program)
        return program, False

    def _key(self, weights: Mapping[str, Any], arrays: Mapping[str, Any], static: Static) -> dict[str, Any] | None:
        call = key.of_call(weights, arrays, static)
        if call is None:
            log.info("%s: an argument of '%s' is no plain data: it is not cached", self.stage.name, self.component)
        return None if call is None else {**self.common(), **self.parts, **call}

    def _note(self, program: str, traced: str, recalled: bool, name: str | None) -> None:
        self.rows.append({"program": program, "traced": traced, "jax_cache": recalled, "key": name})

    def _loaded(self, path: Path, parts: dict[str, Any], weights: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
        """Returns the program of an entry, its trace's calls credited to the ledger; None if there is no usable one."""
        try:
            stored = entry.read(path, parts)
            if stored is None:
                return None
            manifest, data = stored
            program = self._deserialised(data, weights, arrays)
            trace = patch.Trace.from_json(manifest.trace)
        except entry.DamagedError as error:
            log.warning("%s: %s is damaged: %s; it is removed, and compiled anew", self.stage.name, path, error)
            with contextlib.suppress(OSError):  # a folder that cannot be written: it is logged again next time
                entry.remove(path)
            return None
        self.ledger.credit(trace)
        with contextlib.suppress(OSError):
            os.utime(path)  # it is the one that was used last
        self._note("cached", manifest.created, False, path.name)
        log.info("%s: program from the cache (traced %s)", self.stage.name, manifest.created)
        return program

    def _deserialised(self, data: bytes, weights: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
        devices = list(self.mesh.devices.flat)
        takes = jax.tree_util.tree_structure(((dict(weights), dict(arrays)), {}))
        gives = jax.tree_util.tree_structure(0)
        try:
            # Left to itself JAX would take the client's order of devices, and bind shards to other chips.
            return serialize_executable.deserialize_and_load(
                data, takes, gives, backend=devices[0].client, execution_devices=devices
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise entry.DamagedError(f"the devices do not take it ({' '.join(str(error).split())[:200]})") from error

    def _compiled(self, lower: Callable[[], Any]) -> tuple[Any, bool, dict[str, Any]]:
        """Returns a program traced and compiled now, whether JAX's cache delivered it, and its trace alone."""
        before = {row["id"]: row["calls"] or 0 for row in self.ledger.rows()}
        with waiting(f"compile {self.component}"), _listening() as hits:
            lowered = lower()
            trace = self.ledger.trace().as_json()
            for row in trace["rows"]:
                row["calls"] = None if row["calls"] is None else row["calls"] - before.get(row["id"], 0)
            hits.clear()  # of what the trace itself computes
            program = lowered.compile()
            return program, bool(hits), trace

    def _keep(self, path: Path, parts: dict[str, Any], created: str, trace: dict[str, Any], program: Any) -> None:
        """Writes an entry. A program that cannot be kept is logged, and serves this run all the same."""
        try:
            data, _, _ = serialize_executable.serialize(program)
            entry.write(path, parts, created, trace, data)
        except OSError as error:
            log.warning("%s: the program is not kept: %s: %s", self.stage.name, path, error.strerror or error)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            log.warning("%s: the program is not kept: it cannot be serialised: %s", self.stage.name, reason)
        with contextlib.suppress(OSError):  # what another run removes at the same time
            entry.prune(path.parent, self.component)

    def _log_nearest(self, current: dict[str, Any]) -> None:
        """Logs how the most similar entry of the component differs; this run's own entries do not count."""
        assert self.root is not None
        keys = {row["key"] for row in self.rows}
        nearest: tuple[int, dict[str, tuple[Any, Any]], str] | None = None
        for path in entry.of_component(self.root, self.component):
            if path.name in keys:
                continue
            with contextlib.suppress(entry.DamagedError):  # a damaged entry of another key does no harm here
                manifest = entry.read_manifest(path)
                parts = key.differences(manifest.key, current)
                if nearest is None or len(parts) < nearest[0]:
                    nearest = (len(parts), parts, manifest.created)
        if nearest is not None:
            count, parts, created = nearest
            first = "; ".join(
                f"{name} is {_short(new)}, was {_short(old)}" for name, (old, new) in [*parts.items()][:3]
            )
            more = f"; and {count - 3} more" if count > 3 else ""
            log.info("%s: the program traced %s is another: %s%s", self.stage.name, created, first, more)


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Gives a list that grows whenever JAX's cache delivers an executable."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == FROM_JAX:
            hits.append(event)

    monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        monitoring.unregister_event_listener(listen)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
