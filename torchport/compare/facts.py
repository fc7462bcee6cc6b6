"""What made a run, field by field: two runs' manifests differ in some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchport.config.card import DENOISING, StageName
from torchport.save.manifest import Manifest

MESH = ("machine", "mesh", "strategy", "attention", "stacked")
"""Fields that change how numbers are rounded and nothing else; a floor differs in these."""
LOSSY_ATTENTION = "splash_int8"
"""The implementation of attention that is another result, and not another rounding."""
WHAT = ("model", "prompt", "negative_prompt", "seed", "image_digest", "noise")
"""Fields that say what a video shows: runs that differ in one of these make two videos."""
PLAIN = ("fps", "image", "save_every", "keep_steps", "overrides")
"""Fields of a job and settings that no latents and no frames depend on. What an image holds is in `image_digest`."""
_WHOLE = ("mesh",)
_APART = ("settings", "config", "identity", "patches", "cache", "shared_code")
_OF_ONE_RUN = (
    "schema_version",
    "run",
    "stage",
    "created",
    "inputs",
    "programs",
    "seconds",
    "done",
    "tensors",
    "sha256",
)
_OF_NO_EFFECT = ("not needed", "displaced")
"""States of patches. All others depend on what was imported and traced earlier in the same process."""
_NAMES = {
    "code": "the card, the family or a patch",
    "components": "the weights of {}",
    "dtypes": "the dtype of {}",
    "image_digest": "the image",
    "patches": "the patch {}",
    "shared_code": "the card, the family or a patch that both backends have",
    "precision": "the precision of {}",
    "versions": "the version of {}",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which two runs differ.

    Attributes:
        field: Its path: `mesh`, `dtypes.transformer`.
        a: What the first run has; None if it has none.
        b: What the second run has.
        stages: The stages in which they differ; () if they differ in all that have the field.
    """

    field: str
    a: Any
    b: Any
    stages: tuple[StageName, ...] = ()

    @property
    def key(self) -> str:
        """The field's first name: `dtypes` of `dtypes.transformer`."""
        return self.field.partition(".")[0]

    def words(self) -> str:
        """Returns the difference as a person reads it."""
        where = f" (in {' and '.join(self.stages)})" if self.stages else ""
        return f"{name(self.field)}: {text(self.a)} and {text(self.b)}{where}"


def differences(a: Mapping[StageName, Manifest], b: Mapping[StageName, Manifest]) -> list[Difference]:
    """Returns the fields in which the stages of two runs differ, each once.

    Args:
        a: The first run's manifests; stages that only one of the runs has are left out.
        b: The second run's.
    """
    stages: dict[StageName, tuple[dict[str, Any], dict[str, Any]]] = {
        stage: _with_one_code(_all(a[stage]), _all(b[stage])) for stage in a if stage in b
    }
    rows: dict[tuple[str, str, str], list[StageName]] = {}
    values: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    for stage, (ours, theirs) in stages.items():
        for field in {**ours, **theirs}:
            one, other = ours.get(field), theirs.get(field)
            if one != other:
                rows.setdefault(row := (field, text(one), text(other)), []).append(stage)
                values[row] = one, other
    return [
        Difference(row[0], *values[row], () if len(among) == _having(row[0], stages) else tuple(among))
        for row, among in rows.items()
    ]


def _with_one_code(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two runs' fields with the hash of code in which both would agree.

    A port and its original have other patches by design, and these are rows of their own: there the hash without
    them counts. Runs of earlier versions have none.
    """
    is_between = a["backend"] != b["backend"] and a["shared_code"] and b["shared_code"]
    dropped = "code" if is_between else "shared_code"
    first, second = ({key: value for key, value in row.items() if key != dropped} for row in (a, b))
    return first, second


def _having(field: str, stages: Mapping[StageName, tuple[dict[str, Any], dict[str, Any]]]) -> int:
    return sum(field in ours or field in theirs for ours, theirs in stages.values())


def _all(manifest: Manifest) -> dict[str, Any]:
    return {**job(manifest), "shared_code": manifest.shared_code, **_patches(manifest)}


def job(manifest: Manifest) -> dict[str, Any]:
    """Returns what made an artefact, by field, but for the patches: `{"mesh": {...}, "dtypes.vae": "float32", ...}`.

    Fields that are the same in every run of a job, as its seconds are not, and those of `PLAIN` are left out.
    """
    return _fields(manifest, manifest.config)


def origin(manifest: Manifest) -> dict[str, Any]:
    """Returns what decides the bits of an artefact: a run that goes on agrees in it with the one that was stopped."""
    inputs = {str(stage): sha256 for stage, sha256 in manifest.inputs.items()}
    return _fields(manifest, {key: manifest.config.get(key) for key in MESH}) | inputs


def _fields(manifest: Manifest, config: Mapping[str, Any]) -> dict[str, Any]:
    row = manifest.model_dump()
    # A setting is the job's field as the run took it; the job's `dtypes` are only those that it changes.
    merged = {**config, **row["identity"], **row["settings"]}
    merged |= {key: value for key, value in row.items() if key not in (*_APART, *_OF_ONE_RUN)}
    return dict(leaf for key, value in merged.items() if key not in PLAIN for leaf in _leaves(key, value))


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and path not in _WHOLE:
        return [leaf for key, item in value.items() for leaf in _leaves(f"{path}.{key}", item)]
    return [(path, value)]


def _patches(manifest: Manifest) -> dict[str, str]:
    """Returns what each patch of a stage promises, or that it has no effect."""
    rows = {}
    for row in manifest.patches:
        promise = row.equivalence if isinstance(row.equivalence, str) else next(iter(row.equivalence))
        rows[f"patches.{row.id}"] = row.state if row.state in _OF_NO_EFFECT else promise
    return rows


def lossy(manifests: Mapping[StageName, Manifest]) -> str | None:
    """Returns what made a run's result another one than the model's: its first loss, in words; None without one."""
    for manifest in manifests.values():
        if manifest.stage not in DENOISING or manifest.backend == "original":
            continue
        cache, attention = manifest.cache, manifest.config.get("attention")
        if cache is not None and len(cache.computed) < cache.steps:
            return f"the step cache '{cache.kind}'"
        if attention == LOSSY_ATTENTION:
            return f"attention '{attention}'"
    return None


def name(field: str) -> str:
    """Returns what a person calls a field: `the dtype of vae`."""
    key, _, rest = field.partition(".")
    return _NAMES[key].format(rest) if key in _NAMES else field.replace("_", " ")


def text(value: Any) -> str:
    """Returns a value as a person reads it: `dp=2 x tp=4`, `'A cat'`, `none`."""
    if isinstance(value, dict):
        return " x ".join(f"{key}={item}" for key, item in value.items()) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return f"'{value}'" if isinstance(value, str) and (" " in value or not value) else str(value)
