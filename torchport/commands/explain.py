"""`torchport explain`: what every error means, out of the docstring of its class, with examples and the cure."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import re
import textwrap
from pathlib import Path

import click

from torchport import errors
from torchport.commands import terminal
from torchport.porting.scan import RULES

START = """\
An error is one line, `error[ID] <place>: <what is>. <what must be, or the command to run>.` The exit code is 2, or 130
after Ctrl-C, or 75 for TP504: after both, the same command goes on. `torchport explain ID` prints one section of this
page, and `torchport explain --all` all of it. Mistakes that are found together, as those of one file, have a line each.
Below TP901 to TP906 stand the frames of the model's code, the exception's own message and, where it helps, an entry to
paste; `torchport -v COMMAND` prints the whole traceback first.

In the examples, `up` is the package that the patches change, and `some` is a model card. Fields that every patch must
have, such as `why` and `fits`, are left out, and so is everything else that does not matter."""

PLACES = {
    "job": "in a config",
    "card": "in a model card",
    "rules": "as rules for the weights of a network",
    "patch": "in a file of patches",
    "python": "in Python",
    "code": "in Python",
    "command": "in a shell",
    "family": "in a function of the family",
    "forward": "in a network's `forward`",
    "upstream": "in a module of upstream's",
}
LANGUAGES = {"job": "yaml", "card": "yaml", "rules": "yaml", "patch": "yaml", "command": "sh"}


@dataclasses.dataclass(frozen=True)
class Example:
    """An example of one error, wrong and right: an entry of `examples.yaml`, where each field is explained."""

    kind: str
    wrong: str
    right: str
    cure: str
    upstream: str = ""
    right_kind: str = ""

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The kind of text (a key of `PLACES`) and the text, of the wrong example and of the right one."""
        return (self.kind, self.wrong), (self.right_kind or self.kind, self.right)


@terminal.command("explain")
@click.argument("id", required=False)
@click.option("--all", "everything", is_flag=True, help="Print every error, as the page docs/errors.md.")
@click.option("--web", is_flag=True, help="Print the address of the page that explains it.")
def command(id: str | None, everything: bool, web: bool) -> None:
    """Explains an error, such as TP107, or a finding of scan, such as PS401.

    It prints what the id means, a wrong and a right example, and the cure.
    """
    if id is None and not everything:
        raise errors.UnknownNameError("torchport explain", "No id is named", "Name one, such as TP107, or add --all")
    text = page().rstrip() if id is None else section(id)  # raises for an unknown id, also with --web
    if web:
        packages = importlib.metadata.distributions(name="torchport")
        urls = [url.split(", ") for package in packages for url in package.metadata.get_all("Project-URL", ())]
        site = dict(urls).get("Documentation")
        if site is None:
            raise errors.UnknownNameError("--web", "The installed torchport names no site", "Install it again")
        anchor = id or ""
        text = f"{site}{'scan' if anchor.upper() in RULES else 'errors'}/#{anchor.lower()}"
    terminal.say(text)


def page() -> str:
    """Returns the documentation of every error as Markdown, one section for each id."""
    return "\n\n".join(["# Errors", START, *(f"## {section(id)}" for id in errors.KINDS)]) + "\n"


def section(key: str) -> str:
    """Returns the Markdown for an error or a finding of scan, by its id: meaning, examples, cure, a group's errors."""
    if key.upper() in RULES:
        return scan_section(key.upper())
    kind = errors.KINDS.get(key.upper())
    if kind is None:
        place = f"torchport explain {key}"
        fact = f"There is no id {key}"
        raise errors.UnknownNameError(place, fact, _nearest(key.upper(), list(errors.KINDS)), name=key)
    parts = [f"{kind.id} {kind.__name__}", inspect.getdoc(kind) or "", *_group(kind), *_example(kind.id)]
    return "\n\n".join(parts)


def scan_section(id: str) -> str:
    """Returns the Markdown for a finding of `torchport scan`: meaning, a wrong and a right example, and the cure."""
    rule = RULES[id]
    parts = [f"{id} {rule.kind}", rule.title, rule.why]
    for side, text in (("Wrong", rule.wrong), ("Right", rule.right)):
        language = "sh" if text.startswith(("ln ", "rm ", "chmod ")) else "python"
        language = "yaml" if text.startswith(("patches:", "strategies:")) else language
        parts.append(f"{side}:\n\n```{language}\n{text}\n```")
    cure = f"Cure: {rule.do} Effort: {rule.effort}."
    return "\n\n".join([*parts, textwrap.fill(cure, 120, break_on_hyphens=False)])


def _group(kind: type[errors.TorchportError]) -> list[str]:
    """Returns a paragraph that lists a group's errors, or that names an error's group; an empty list without either."""
    members = kind.__subclasses__()
    if members:
        listed = [f"- {member.id} `{member.__name__}`: {str(member.__doc__).splitlines()[0]}" for member in members]
        return ["This is a group. Its errors:\n\n" + "\n".join(listed)]
    group: type[errors.TorchportError] = kind.__bases__[0]
    if group is errors.TorchportError:
        return []
    return [f"It is a `{group.__name__}` ({group.id}): {str(group.__doc__).splitlines()[0]}"]


def _example(key: str) -> list[str]:
    """Returns the paragraphs of an error's example and its cure; an empty list if there is none."""
    example = examples().get(key)
    if example is None:
        return []
    blocks = [("Upstream:", "python", example.upstream)] if example.upstream else []
    for word, (kind, text) in zip(("Wrong", "Right"), example.sides, strict=True):
        blocks.append((f"{word}, {PLACES[kind]}:", LANGUAGES.get(kind, "python"), text))
    return [
        *(f"{title}\n\n```{language}\n{text}\n```" for title, language, text in blocks),
        textwrap.fill(f"Cure: {example.cure}", 120, break_on_hyphens=False),
    ]


@functools.cache
def examples() -> dict[str, Example]:
    """Returns the examples of `examples.yaml`, by the id of their error."""
    import yaml  # `torchport --help` answers without it

    text = Path(__file__).with_name("examples.yaml").read_text(encoding="utf-8")
    return {key: Example(**fields) for key, fields in yaml.safe_load(text).items()}


def _nearest(key: str, known: list[str]) -> str:
    """Returns the remedy for an unknown id: for `TP108` the id with the nearest number, else the most similar one."""
    if not re.fullmatch(r"TP[0-9]{1,9}", key):
        close = errors.closest(key, [*known, *RULES])
        return f"{f'Did you mean {close!r}? ' if close else ''}`torchport explain --all` lists them"
    number = int(key[2:])
    closest = min(known, key=lambda name: abs(int(name[2:]) - number))
    return f"Did you mean '{closest}'? Known: {', '.join(known)}"
