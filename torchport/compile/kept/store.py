"""Loads programs from disk before they are traced, stores new ones, and notes which were loaded."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
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
from torchport.compile.kept.jax_cache import bypassed, jax_cache
from torchport.compile.program import Arguments
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

        from_jax: Whether JAX's cache may deliver executables: the user has named its folder.

    Attributes:
        rows: By stage, one row for each program of its last run: `program` is "compiled", "traced" (with an executable
            that an earlier trace was compiled to), "cached" (and not traced) or "held" (by this process, since an
            earlier video); `traced`, when; `jax_cache`, whether JAX's own cache spared the compilation; `key`, that of
            the entry, null without one.
    """

    def __init__(self, task: Task, root: Path | None, from_jax: bool = True) -> None:
        self.task = task
        self.root = root
        self.from_jax = from_jax
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
        with jax_cache(cache.folder()) as from_jax:
            yield cls(task, root, from_jax)

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
        return StagePrograms(self.root, stage, lambda: self.common, parts, mesh, ledger, rows, self.from_jax)


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
        from_jax: Whether JAX's cache may deliver executables; what it delivers cannot be kept. Otherwise it is bypassed
            for what is kept.
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
        from_jax: bool = False,
    ) -> None:
        self.root = root
        self.from_jax = from_jax
        self.stage = stage
        self.common = common
        self.parts = parts
        self.mesh = mesh
        self.ledger = ledger
        self.rows = rows
        self.component = stage.network or ""
        self._origins: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # trace and row, by the program's id
        if jax.process_count() > 1:  # each has a program of its own, and they may share the folder
            self.component += f".{jax.process_index()}"

    def begin(self, ledger: patch.Ledger) -> None:
        """Begins another run of the stage.

        Args:
            ledger: The run's, with the same patches.
        """
        self.ledger = ledger
        self.rows.clear()

    def again(self, program: Any) -> None:
        """Notes that this run takes a program of an earlier run, and credits its trace's calls to the ledger."""
        trace, row = self._origins[id(program)]
        self.ledger.credit(patch.Trace.from_json(trace))
        self.rows.append({**row, "program": "held"})

    def program(self, arguments: Arguments, static: Static, lower: Callable[[], Any]) -> tuple[Any, bool]:
        """Returns the program of these arguments, and whether it was loaded instead of compiled.

        Args:
            arguments: The network's weights and its inputs, placed.
            static: Its other arguments.
            lower: Traces it.

        Raises:
            BadValueError: Somebody else owns the program on disk, or can write to it.
        """
        parts = None if self.root is None else self._key(arguments, static)
        if self.root is None or parts is None:
            with waiting(f"compile {self.component}"):
                lowered, trace = self._lowered(lower)
                program, recalled = self._compiled(lowered, from_jax=True)
            self._note(program, trace, "compiled", _now(), recalled, None)
            return program, False
        path = entry.folder(self.root, self.component, parts)
        loaded = self._loaded(path, parts, arguments)
        if loaded is not None:
            return loaded, True
        self._log_nearest(parts)
        return self._traced(path, parts, arguments, lower)

    def _traced(
        self, path: Path, parts: dict[str, Any], arguments: Arguments, lower: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """Returns a program traced now, with an executable that we have if one fits; the entry is written."""
        with waiting(f"compile {self.component}"):
            lowered, trace = self._lowered(lower)
            executable = key.of_executable(parts, lowered)
            program, data, same = self._held(executable, arguments, lowered.out_tree)
            recalled = False
            if program is None:
                program, recalled = self._compiled(lowered, self.from_jax)
        created = _now()
        self._note(program, trace, "compiled" if same is None else "traced", created, recalled, path.name)
        if not recalled:  # what JAX's cache delivers lacks its functions once it is serialised again
            tree = jax.tree_util.tree_unflatten(lowered.out_tree, [0] * lowered.out_tree.num_leaves)
            about = {"key": parts, "created": created, "executable": executable, "outputs": entry.as_json(tree)}
            self._keep(path, {**about, "trace": trace}, program, data, same)
        return program, same is not None

    def _held(self, executable: str, arguments: Arguments, gives: Any) -> tuple[Any, bytes, Path | None]:
        """Returns a program with an executable that an entry of an earlier trace has, its bytes, and the entry."""
        for path, manifest in self._manifests():
            if manifest.executable == executable:
                with self._removing(path):
                    stored = entry.read(path, manifest.key)
                    if stored is not None:
                        program = self._deserialised(stored[1], arguments, gives)
                        log.info(
                            "%s: the program traced %s is the same: it is not compiled again",
                            self.stage.name,
                            manifest.created,
                        )
                        return program, stored[1], path
        return None, b"", None

    def _key(self, arguments: Arguments, static: Static) -> dict[str, Any] | None:
        call = key.of_call(arguments, static)
        if call is None:
            log.info("%s: an argument of '%s' is no plain data: it is not cached", self.stage.name, self.component)
        return None if call is None else {**self.common(), **self.parts, **call}

    def _note(
        self, program: Any, trace: dict[str, Any], kind: str, traced: str, recalled: bool, name: str | None
    ) -> None:
        row = {"program": kind, "traced": traced, "jax_cache": recalled, "key": name}
        self._origins[id(program)] = (trace, row)
        self.rows.append(row)

    def _loaded(self, path: Path, parts: dict[str, Any], arguments: Arguments) -> Any:
        """Returns the program of an entry, its trace's calls credited to the ledger; None if there is no usable one."""
        with self._removing(path):
            stored = entry.read(path, parts)
            if stored is None:
                return None
            manifest, data = stored
            gives = jax.tree_util.tree_structure(entry.from_json(manifest.outputs))
            program = self._deserialised(data, arguments, gives)
            self.ledger.credit(patch.Trace.from_json(manifest.trace))
            with contextlib.suppress(OSError):
                os.utime(path)  # it is the one that was used last
            self._note(program, manifest.trace, "cached", manifest.created, False, path.name)
            log.info("%s: program from the cache (traced %s)", self.stage.name, manifest.created)
            return program
        return None

    @contextlib.contextmanager
    def _removing(self, path: Path) -> Iterator[None]:
        """Removes an entry that turns out to be damaged."""
        try:
            yield
        except entry.DamagedError as error:
            log.warning("%s: %s is damaged: %s; it is removed, and compiled anew", self.stage.name, path, error)
            with contextlib.suppress(OSError):  # a folder that cannot be written: it is logged again next time
                entry.remove(path)

    def _deserialised(self, data: bytes, arguments: Arguments, gives: Any) -> Any:
        devices = list(self.mesh.devices.flat)
        takes = jax.tree_util.tree_structure((arguments, {}))
        try:
            # Left to itself JAX would take the client's order of devices, and bind shards to other chips.
            return serialize_executable.deserialize_and_load(
                data, takes, gives, backend=devices[0].client, execution_devices=devices
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise entry.DamagedError(f"the devices do not take it ({' '.join(str(error).split())[:200]})") from error

    def _lowered(self, lower: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """Returns a program traced now, and its trace alone."""
        before = {row["id"]: row["calls"] or 0 for row in self.ledger.rows()}
        lowered = lower()
        trace = self.ledger.trace().as_json()
        for row in trace["rows"]:
            row["calls"] = None if row["calls"] is None else row["calls"] - before.get(row["id"], 0)
        return lowered, trace

    def _compiled(self, lowered: Any, from_jax: bool) -> tuple[Any, bool]:
        """Returns a program compiled now, and whether JAX's cache delivered it, which otherwise is bypassed."""
        with _listening() as hits, contextlib.nullcontext() if from_jax else bypassed():
            return lowered.compile(), bool(hits)

    def _keep(self, path: Path, about: dict[str, Any], program: Any, data: bytes, same: Path | None) -> None:
        """Writes an entry. A program that cannot be kept is logged, and serves this run all the same."""
        try:
            data = data or serialize_executable.serialize(program)[0]
            sha = hashlib.sha256(data).hexdigest()
            manifest = entry.EntryManifest(schema_version=key.SCHEMA, size=len(data), sha256=sha, **about)
            entry.write(path, manifest, data, same)
        except OSError as error:
            log.warning("%s: the program is not kept: %s: %s", self.stage.name, path, error.strerror or error)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            log.warning("%s: the program is not kept: it cannot be serialised: %s", self.stage.name, reason)
        with contextlib.suppress(OSError):  # what another run removes at the same time
            entry.prune(path.parent, self.component)

    def _log_nearest(self, current: dict[str, Any]) -> None:
        """Logs how the most similar entry of the component differs; this run's own entries do not count."""
        keys = {row["key"] for row in self.rows}
        nearest: tuple[int, dict[str, tuple[Any, Any]], str] | None = None
        for path, manifest in self._manifests():
            parts = key.differences(manifest.key, current)
            if "model" in parts:  # another model shares the folder
                continue
            if path.name not in keys and (nearest is None or len(parts) < nearest[0]):
                nearest = (len(parts), parts, manifest.created)
        if nearest is not None:
            count, parts, created = nearest
            first = "; ".join(
                f"{name} is {_short(new)}, was {_short(old)}" for name, (old, new) in [*parts.items()][:3]
            )
            more = f"; and {count - 3} more" if count > 3 else ""
            log.info("%s: the program traced %s is another: %s%s", self.stage.name, created, first, more)

    def _manifests(self) -> Iterator[tuple[Path, entry.EntryManifest]]:
        """Yields the component's entries and their manifests, the one that was used last first."""
        assert self.root is not None
        for path in entry.of_component(self.root, self.component):
            with contextlib.suppress(entry.DamagedError):  # a damaged entry of another key does no harm here
                yield path, entry.read_manifest(path)


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
