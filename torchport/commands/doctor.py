"""`torchport doctor`: this machine's devices, versions, disk, checkpoints, and settings known to fail together."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torchport.commands import options, terminal
from torchport.commands.demo import CONFIG
from torchport.config import card, machine, xla_flags
from torchport.config.pack import Pack, find_pack
from torchport.errors import BadValueError, TorchportError
from torchport.files import cache
from torchport.progress import size_text, table

State = Literal["ok", "note", "bad"]
TRIED = {"torchax": "0.0.13"}
"""Versions that torchport is tested with; others are allowed, but may compute other results."""


@terminal.command("doctor")
@options.as_json
@options.paths
def command(paths: tuple[str, ...], as_json: bool) -> None:
    """Checks devices, versions, disk, checkpoints, and settings that are known to fail."""
    findings = examine(paths)
    lines = list(table([(f"{finding.state:4}", finding.what, finding.fact) for finding in findings], left=3))
    is_bad = any(finding.state == "bad" for finding in findings)
    answer = terminal.Answer(list(map(dataclasses.asdict, findings)), [*lines, advice(findings, paths)], int(is_bad))
    answer.say(as_json)
    sys.exit(answer.exit_code)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The state of one part of this machine: a version, a device, a folder, a checkpoint, or a setting."""

    state: State  #: `ok`, `note` (worth knowing) or `bad` (a run would fail, or be wrong).
    #: The part of the machine: `python`, `tpu devices`.
    what: str
    fact: str  #: Its state, and for `bad` the remedy.


def examine(paths: Sequence[str]) -> list[Diagnosis]:
    """Returns the diagnoses of this machine; changes nothing, and uses no network."""
    from torchport.task import devices

    pack = find_pack(paths)
    count, kind, _ = devices.visible_devices("tpu")
    return [
        Diagnosis("ok", "python", f"{platform.python_version()} on {platform.platform()}"),
        *_versions(),
        _operators(),
        *_devices(),
        *_disk(),
        *_jax_cache(),
        *_checkpoints(pack),
        *bad_combinations(os.environ, [kind] if count else []),
    ]


def _versions() -> list[Diagnosis]:
    """Returns a diagnosis for each required package: whether its version is allowed, and tested with torchport."""
    from packaging.requirements import Requirement

    from torchport.save import manifest

    installed = manifest.versions()
    findings = []
    try:
        requirements = importlib.metadata.requires("torchport") or []
    except importlib.metadata.PackageNotFoundError:
        return [Diagnosis("note", "torchport", "it runs from a checkout that is not installed: pip install -e .")]
    for requirement in map(Requirement, requirements):
        name = requirement.name
        wanted = requirement.specifier
        if requirement.marker is not None or name not in installed:  # a marker: for some platforms, or for an extra
            continue
        version = installed[name]
        tested = TRIED.get(name)
        if not wanted.contains(version.partition("+")[0], prereleases=True):  # `2.13.0+cpu` without `+cpu`
            fact = f"{version}, and torchport wants {wanted}: pip install '{name}{wanted}'"
            findings.append(Diagnosis("bad", name, fact))
        elif tested is not None and version != tested:
            fact = f"{version}; torchport is tested with {tested}, and results may differ"
            findings.append(Diagnosis("note", name, fact))
        else:
            findings.append(Diagnosis("ok", name, version))
    # The requirement of libtpu has a marker: its version is shown, and not compared.
    if "libtpu" in installed:
        findings.append(Diagnosis("ok", "libtpu", installed["libtpu"]))
    return findings


def _operators() -> Diagnosis:
    """Returns the versions of packages that the table of operators was made for, and those that differ here."""
    from torchport.engine import conformance
    from torchport.save import manifest

    what = "table of operators"
    installed = manifest.versions()
    recorded = conformance.read().versions
    others = [f"{name} {installed[name]}" for name, v in recorded.items() if installed[name].partition("+")[0] != v]
    fact = f"made with {', '.join(f'{name} {version}' for name, version in recorded.items())}"
    if not others:
        return Diagnosis("ok", what, fact)
    fact += f"; here is {', '.join(others)}, of which it may not be true: docs/engine.md"
    return Diagnosis("note", what, fact)


def _devices() -> list[Diagnosis]:
    """Returns how many devices of each platform JAX sees, and the host's free memory."""
    from torchport.task import devices

    findings = []
    platforms: tuple[machine.Platform, ...] = ("tpu", "cuda", "cpu")
    for name in platforms:
        count, kind, memory = devices.visible_devices(name)
        if count:
            size = f", {size_text(memory)} each" if memory else ""
            findings.append(Diagnosis("ok", f"{name} devices", f"{count} of kind '{kind}'{size}"))
        elif name != "cpu":
            findings.append(Diagnosis("note", f"{name} devices", "none: configs/demo.yaml runs without"))
    findings.append(Diagnosis("ok", "host memory", f"{size_text(devices.host_memory())} free"))
    return findings


def _disk() -> list[Diagnosis]:
    """Returns whether the output and cache folders can be written and have at least a GiB free."""
    findings = []
    for what, folder in (("output folder", Path("outputs")), ("torchport's cache", cache.folder())):
        # A folder that is yet to be made lies on the disk of its first parent that exists.
        existing = folder.absolute()
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free
        writable = os.access(existing, os.W_OK)
        state: State = "ok" if writable and free > machine.GIB else "bad"
        fact = f"{folder}: {size_text(free)} free" + ("" if writable else ", not writable: choose another")
        findings.append(Diagnosis(state, what, fact))
    return findings


def _jax_cache() -> list[Diagnosis]:
    """Returns whether JAX caches compiled programs in torchport's folder, and whether that folder can be trusted."""
    folder = cache.jax_folder()
    if cache.is_off():
        return [Diagnosis("note", "compiled programs", f"not kept: {cache.VARIABLE} is {cache.OFF}")]
    if not folder.is_dir():
        return [Diagnosis("ok", "compiled programs", f"{folder}: none yet")]
    try:
        cache.check_trusted(folder)
    except BadValueError as error:
        return [Diagnosis("bad", "compiled programs", str(error))]
    size = sum(file.stat().st_size for file in folder.iterdir())
    return [Diagnosis("ok", "compiled programs", f"{folder}: {size_text(size)}")]


def _checkpoints(pack: Pack) -> list[Diagnosis]:
    """Returns whether each card's checkpoint is in Hugging Face's cache, and its tiny weights if there are any."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from torchport.load import tiny
    from torchport.stages import file_of

    findings = []
    for name, result in pack.cards():
        if isinstance(result, TorchportError):
            findings.append(Diagnosis("bad", f"model card {name}", str(result)))
            continue
        model, document = result
        repo = model.checkpoint.partition("@")[0]
        folder = Path(HF_HUB_CACHE) / ("models--" + repo.replace("/", "--")) / "snapshots"
        in_cache = folder.is_dir() and any(folder.iterdir())
        size = sum((c.parameters or 0) * card.DTYPES[c.dtype] for c in model.components.values() if c.dtype)
        fact = f"in the cache, {folder}" if in_cache else f"{repo} is not in the cache; about {size / 1e9:.0f} GB"
        findings.append(Diagnosis("ok" if in_cache else "note", f"checkpoint of {name}", fact))
        tiny_folder = tiny.folder_of(model, file_of(pack, model, document.place(["family"])))
        if (tiny_folder / "model_index.json").is_file():
            findings.append(Diagnosis("ok", f"tiny checkpoint of {name}", str(tiny_folder)))
    return findings


def bad_combinations(environment: dict[str, str] | os._Environ[str], tpu_kinds: list[str]) -> list[Diagnosis]:
    """Returns the settings that are known to fail or to compute wrong numbers; without any, one diagnosis "ok"."""
    findings = []
    flags = environment.get("LIBTPU_INIT_ARGS", "") + " " + environment.get("XLA_FLAGS", "")
    fusion = xla_flags.nan_pair(environment)
    if fusion is not None:
        has_v6e = any("v6" in kind for kind in tpu_kinds)  # JAX's name for v6e is `TPU v6 lite`
        fact = f"{fusion} together with {xla_flags.OVERLAP} turns sharded attention into NaN on v6e (jax issue 38741)"
        fact += ": drop one of the two"
        findings.append(Diagnosis("bad" if has_v6e else "note", "LIBTPU_INIT_ARGS", fact))
    if "\\" in flags:
        fact = "libtpu stops reading at a backslash: write the flags on one line"
        findings.append(Diagnosis("bad", "LIBTPU_INIT_ARGS", fact))
    if environment.get("JAX_ENABLE_X64", "").lower() in ("1", "true"):
        findings.append(Diagnosis("note", "JAX_ENABLE_X64", "positions and masks become 64-bit: slower, not wrong"))
    if not findings:
        findings.append(Diagnosis("ok", "known-bad combinations", "none found"))
    return findings


def advice(findings: list[Diagnosis], paths: Sequence[str]) -> str:
    """Returns the report's last line: how many problems there are, or a command to try, with a model of `paths`."""
    bad = sum(finding.state == "bad" for finding in findings)
    if bad:
        return f"{bad} thing(s) to mend."
    cards = [result[0] for _, result in find_pack(paths).cards() if isinstance(result, tuple)]
    demos = [(card.model, card.demo) for card in cards]
    # The demo of README comes first, else the first card's.
    model, demo = min(demos, key=lambda row: row[1] != CONFIG, default=("NAME", CONFIG))
    return f'Ready: torchport run --model {model} --config {demo} --prompt "..."'
