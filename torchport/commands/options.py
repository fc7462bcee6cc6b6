"""Flags that several commands share: each is declared here once, with one type, metavar and meaning."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from torchport.config.card import is_tiny
from torchport.config.pack import DERIVED, find_pack

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Result = TypeVar("Result")

FILE = click.Path(path_type=Path)
"""The type of a flag whose value is a path: of a file, or of a folder."""

paths = click.option(
    "--path",
    "paths",
    multiple=True,
    metavar="DIR",
    help="A folder with patches/ or configs/, on top of torchport's own; its Python runs. Repeatable.",
)
upstream_path = click.option(
    "--upstream-path", metavar="DIR", help="A checkout of an upstream that pip cannot install."
)
overrides = click.option(
    "--set", "overrides", multiple=True, metavar="A.B=C", help="Overrides a field of the config. Repeatable."
)
strategy = click.option(
    "--strategy", metavar="NAME", help="The set of sharding rules [the config's; without a config, the card's first]."
)
machine = click.option(
    "--machine",
    metavar="NAME",
    help="The devices, such as v6e:2x4, or cpu:8 for 8 virtual ones [the config's, or all].",
)
backend = click.option(
    "--backend",
    type=click.Choice(["torchax", "original"]),
    default="torchax",
    show_default=True,
    help="torchax compiles with JAX; original runs upstream in eager PyTorch.",
)
strict = click.option(
    "--strict", is_flag=True, help="Refuse operators that no sample has compared with PyTorch's: docs/engine.md."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

negative_prompt = click.option("--negative-prompt", metavar="TEXT", help="What the video should not show.")
seed = click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="The seed of the noise [42].")
checkpoint = click.option(
    "--checkpoint", metavar="DIR|REPO@REV", help="The weights, or `tiny` for small ones [the card's]."
)
image = click.option("--image", type=FILE, metavar="FILE", help="The first frame, or the video to edit.")
cache = click.option("--cache/--no-cache", default=True, help="Let JAX keep compiled programs on disk [yes].")
xla_flags = click.option("--xla-flags", metavar="NAME", help="A named set of compiler flags: docs/profiling.md.")


def derived(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Returns the value of `--model`, and derives the card first if the value is a pipeline, `diffusers:NAME`."""
    if value is not None and value.startswith(DERIVED):
        from torchport.porting import derive

        derive.ensure(value)
    return value


model = click.option(
    "--model",
    required=True,
    metavar="NAME",
    help="A model card (`torchport models` lists them), or a pipeline: diffusers:MochiPipeline.",
    callback=derived,
)


def config(default: str = "", published: Literal["never", "named", "always"] = "never") -> Decorator:
    """Returns the flag `--config`.

    Args:
        default: The default job in words, for the help. Empty: the flag is required, except for a pipeline as model.
        published: When the job of a pipeline has the published size, and not the demo's: `never`; `named`: if a
            checkpoint is named that is not tiny; `always`: unless a tiny checkpoint is named.
    """
    words = {
        "named": "a pipeline's demo; with its weights, its published size",
        "always": "a pipeline's published size",
    }
    callback = None if default else functools.partial(_pipelines_job, published)
    default_words = default or words.get(published, "a pipeline's demo")
    text = f"The job, a file or `demo`, the model's own: sizes, machine [{default_words}]."
    return click.option("--config", metavar="FILE", help=text, callback=callback)


def prompt(default: str) -> Decorator:
    """Returns the flag `--prompt`; `default` says in its help which prompt is used without it."""
    return click.option("--prompt", metavar="TEXT", help=f"What the video shows [{default}].")


def report(formats: str, multiple: bool = False) -> Decorator:
    """Returns the flag `--report`, with `formats` in its help; the parameter is `file`, or `files` if `multiple`."""
    more = " Repeatable." if multiple else ""
    name = "files" if multiple else "file"
    return click.option(
        "--report", name, multiple=multiple, type=FILE, metavar="FILE", help=f"Also write a report: {formats}.{more}"
    )


def _pipelines_job(published: str, context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """Returns the value of `--config`. Without a value, returns the job of a pipeline, and raises for another model."""
    if value is not None:
        return value
    model = context.params.get("model") or ""
    if not model.startswith(DERIVED):
        if model and not model.endswith("Pipeline"):
            find_pack(context.params.get("paths", ())).home(model)  # raises for a wrong name: that is the first mistake
        hint = "'--config demo' is the model's demo."
        if model.endswith("Pipeline"):
            hint = f"A pipeline has '{DERIVED}' before its name."
        raise click.MissingParameter(hint, ctx=context, param=parameter)
    overrides = [text.partition("=") for text in context.params.get("overrides", ())]
    checkpoints = [text for field, equals, text in overrides if equals and field == "checkpoint"]  # of --set
    checkpoint = context.params.get("checkpoint") or (checkpoints[-1] if checkpoints else None)
    is_demo = published != "always" if checkpoint is None else published == "never" or is_tiny(checkpoint)
    return f"configs/{model}{'_demo' if is_demo else ''}.yaml"


def call_with(kind: Callable[..., Result], given: dict[str, Any]) -> Result:
    """Calls a class or a function with the flags that are its parameters, and removes these from `given`."""
    return kind(**{name: given.pop(name) for name in inspect.signature(kind).parameters if name in given})


def with_fields(overrides: tuple[str, ...], **fields: object) -> tuple[str, ...]:
    """Returns the overrides of `--set`, and after them those of flags: `mesh=...`; a flag that is None adds none."""
    return (*overrides, *(f"{name}={value}" for name, value in fields.items() if value is not None))
