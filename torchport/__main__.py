"""The command line: it names the commands, and imports one when it is chosen."""

import sys

from torchport.processes import trusted_path

# `python -m torchport` puts the current folder first: before anything else is imported, it goes.
if (entries := trusted_path(sys.path, is_main=__name__ == "__main__")) != sys.path:
    sys.path[:] = entries

import importlib

import click

from torchport import __version__
from torchport.commands import terminal
from torchport.files import atomic

COMMANDS = {
    "check": "Tries patches against the upstreams that are installed, and reads cards and configs.",
    "compare": "Compares two runs by their output folders: frames before the codec, and latents step by step.",
    "demo": "Makes a small video without an accelerator, and says what to try next.",
    "doctor": "Checks devices, versions, disk, checkpoints, and settings that are known to fail.",
    "exec": "Runs somebody else's script under a model's patches, unchanged.",
    "explain": "Explains an error, such as TP107, or a finding of scan, such as PS401.",
    "models": "Lists the model cards. A card that cannot be read does not hide the others; the exit code is then 1.",
    "new": "Writes drafts into a pack: a patch to fill in, or the card of a model.",
    "patches": "Lists, shows and locks patches.",
    "plan": "Tells, without a TPU, whether a job fits on a slice and how fast it should be; the exit code is 1 if not.",
    "run": "Makes a video, or runs one stage of it; with --prompts, makes many.",
    "scan": "Lists what in a codebase will not port to TPU, and which patches take care of it. It imports none of it.",
    "schema": "Prints the JSON Schema of model cards, configs or patch files, so that editors complete and check them.",
    "shard": "Shows sharding rules and what they match.",
    "trace": "Lists every place that stops the networks from being traced; the exit code is 1 if there is one.",
    "verify": "Proves that a port makes the same picture as the original, or names the module and the patch at fault.",
}
"""How each command's help begins, by the command's name, which is also its module's in `commands/`."""


class Commands(terminal.Group):
    """The commands. Help, completion and the nearest name need the texts of `COMMANDS` alone, and import no command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Imports the command that a command line names; returns its name, the command, and the rest of the line."""
        name, command, rest = super().resolve_command(ctx, args)
        # It is None where a shell completes a name that is no command.
        if command is not None:
            command = importlib.import_module(f"torchport.commands.{name}").command
        return name, command, rest


@click.group(
    "torchport",
    cls=Commands,
    commands={name: click.Command(name, help=line) for name, line in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("-v", "--verbose", is_flag=True, help="Print the traceback of what led to an error.")
@click.version_option(__version__)
def cli(verbose: bool) -> None:
    """Runs PyTorch video models, written for GPUs, on TPU without editing them."""


def main() -> None:
    """Runs the command line; a refusal is a line for each mistake and an exit code, never a traceback."""
    atomic.remove_abandoned()
    sys.exit(terminal.run(cli))


if __name__ == "__main__":
    main()
