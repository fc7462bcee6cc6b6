"""The command line. A command's module, and all that it imports, is imported when the command is chosen.

Over 400 lines: all commands and their flags are here, so that `--help` reads one module.
"""

import sys

from torchport.processes import path as importable

# `python -m torchport` puts the current folder first: before anything else is imported, it goes.
if (entries := importable.trusted(sys.path, started=__name__ == "__main__")) != sys.path:
    sys.path[:] = entries

import functools
import shlex
from pathlib import Path
from typing import Any

import click

from torchport import __version__, errors
from torchport.commands import terminal

path_option = click.option(
    "--path",
    "paths",
    multiple=True,
    metavar="DIR",
    help="A folder with patches/ or configs/, on top of torchport's own; its Python runs. Repeatable.",
)


@click.group(cls=terminal.Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("-v", "--verbose", is_flag=True, help="Print the traceback of what led to an error.")
@click.version_option(__version__)
def cli(verbose: bool) -> None:
    """Runs PyTorch video models, written for GPUs, on TPU without editing them."""


@cli.command()
@click.option("--model", required=True, metavar="NAME", help="A model card; `torchport models` lists them.")
@click.option("--config", required=True, metavar="FILE", help="The job, such as configs/demo.yaml: sizes, machine.")
@click.option("--prompt", metavar="TEXT", help="What the video shows. Required for the stage encode.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Many videos: a line of JSON for each, with its prompt. Each gets a folder in --out.",
)
@click.option(
    "--together",
    type=click.IntRange(1),
    metavar="N",
    help="With --prompts: videos that go through a stage before the next stage is loaded [4].",
)
@click.option("--negative-prompt", metavar="TEXT", help="What the video should not show.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="The seed of the noise [42].")
@click.option("--checkpoint", metavar="DIR|REPO@REV", help="The weights, or `tiny` for small ones [the card's].")
@click.option("--image", type=click.Path(path_type=Path), metavar="FILE", help="The first frame, for image-to-video.")
@click.option("--upstream-path", metavar="DIR", help="A checkout of an upstream that pip cannot install.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Output folder [outputs/<run>].")
@click.option(
    "--inputs", type=click.Path(path_type=Path), metavar="DIR", help="The folder with earlier artefacts [--out]."
)
@click.option("--stage", default="all", show_default=True, metavar="encode|denoise|decode|all", help="Stages to run.")
@click.option(
    "--backend",
    type=click.Choice(["torchax", "original"]),
    default="torchax",
    show_default=True,
    help="torchax compiles with JAX; original runs upstream in eager PyTorch.",
)
@click.option("--strategy", metavar="NAME", help="The set of sharding rules [the config's].")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Overrides a field of the config. Repeatable.")
@click.option("--save-every", type=click.IntRange(1), metavar="N", help="Steps between two savings [the config's].")
@click.option("--jit/--no-jit", default=True, help="Compile networks, or run op by op and name what makes NaN [yes].")
@click.option("--xla-flags", metavar="NAME", help="A named set of compiler flags: docs/profiling.md.")
@click.option(
    "--profile", callback=terminal.count("steps"), metavar="steps=N", help="Trace N steps after the first two."
)
@click.option("--memory", is_flag=True, help="Print the devices' memory after each stage.")
@click.option("--cache/--no-cache", default=True, help="Let JAX keep compiled programs on disk [yes].")
@path_option
@click.option("--distributed", is_flag=True, help="On several hosts that JAX finds: a TPU slice, Slurm, Kubernetes.")
@click.option("--coordinator", metavar="HOST:PORT", help="On several hosts: the address of process 0.")
@click.option("--processes", type=click.IntRange(1), metavar="N", help="On several hosts: the number of processes.")
@click.option("--process", type=click.IntRange(0), metavar="I", help="On several hosts: this process's number, from 0.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors and the path of the video.")
@click.option("-v", "--verbose", is_flag=True, help="Print every patch, upstream's own log, and whole tracebacks.")
def run(
    distributed: bool,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    quiet: bool,
    verbose: bool,
    strategy: str | None,
    save_every: int | None,
    overrides: tuple[str, ...],
    prompts: Path | None,
    together: int | None,
    **options: Any,
) -> None:
    """Makes a video, or runs one stage of it; with --prompts, makes many."""
    terminal.log_to_stderr(quiet, verbose)
    from torchport.commands.summary import lines
    from torchport.processes import hosts
    from torchport.run import run as carry
    from torchport.task import Execution, Request

    flags = {"strategy": strategy, "save_every": save_every}
    overrides += tuple(f"{key}={value}" for key, value in flags.items() if value is not None)
    execution = Execution(**{name: options.pop(name) for name in ("jit", "xla_flags", "profile", "memory")})
    request = Request(**options, overrides=overrides, execution=execution)
    cluster = hosts.cluster_of(distributed, coordinator, processes, process)
    if prompts is not None:
        from torchport.commands.prompts import make

        sys.exit(make(prompts, request, together, cluster, quiet))
    if together is not None:
        raise errors.BadValueError(f"--together {together}", "There is no --prompts", "Add it, or leave this out")
    summary = carry(request, cluster)
    if hosts.first():
        terminal.say("\n".join(lines(summary, quiet)))


@cli.command("exec")
@click.option("--model", required=True, metavar="NAME", help="The model card whose patches the script gets.")
@click.option("--upstream-path", metavar="DIR", help="A checkout of an upstream that pip cannot install.")
@click.option("--patches", multiple=True, metavar="NAME", help="More patches: folder or folder/file. Repeatable.")
@click.option("--strategy", metavar="NAME", help="The sharding rules of a network that is compiled [the card's first].")
@click.option("--mesh", metavar="A=N", help="The devices along each axis of its mesh, as dp=2,tp=4 [one device].")
@click.option("--machine", metavar="NAME", help="The devices, such as cpu:8 for 8 virtual ones [all that JAX finds].")
@click.option("--attention", metavar="NAME", help="The implementation of attention [the platform's own].")
@click.option(
    "--backend",
    type=click.Choice(["torchax", "original"]),
    default="torchax",
    show_default=True,
    help="torchax compiles with JAX; original runs upstream in eager PyTorch.",
)
@path_option
@click.argument("words", nargs=-1, metavar="-- SCRIPT ARGS")
def execute(**options: Any) -> None:
    """Runs somebody else's script under a model's patches, unchanged: -- script.py ARGS, or -- -m pkg.module ARGS.

    Arguments, exit code, traceback and signals are the script's own. Its children call torchport.arm.
    """
    from torchport.script.program import Flags
    from torchport.script.program import run as become

    become(Flags(**options))


@cli.command()
@path_option
def models(paths: tuple[str, ...]) -> None:
    """Lists the model cards. A card that cannot be read does not hide the others; the exit code is then 1."""
    from torchport.config.pack import find_pack

    pack, code = find_pack(paths), 0
    for name, read in pack.cards():
        if isinstance(read, errors.TorchportError):
            terminal.complain(read)
            code = 1
            continue
        card, document = read
        terminal.say(f"{name:12} {card.title}")
        terminal.say(f"{'':12} checkpoint {card.checkpoint}; strategies {', '.join(card.strategies)}")
        terminal.say(f"{'':12} {document.file} ({pack.home(name).name})")
    sys.exit(code)


@cli.command()
@path_option
def doctor(paths: tuple[str, ...]) -> None:
    """Checks devices, versions, disk, checkpoints, and settings that are known to fail."""
    from torchport.commands.doctor import advice, examine

    findings = examine(paths)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        terminal.say(f"{finding.state:4}  {finding.what:{width}}  {finding.fact}")
    terminal.say(advice(findings, paths))
    if any(finding.state == "bad" for finding in findings):
        sys.exit(1)


@cli.command()
@click.argument("id", required=False)
@click.option("--all", "everything", is_flag=True, help="Print every error, as the page docs/errors.md.")
def explain(id: str | None, everything: bool) -> None:
    """Explains an error, such as TP107, or a finding of scan, such as PS401.

    It prints what the id means, a wrong and a right example, and the cure.
    """
    from torchport.commands.explain import page, section

    if id is None and not everything:
        raise errors.UnknownNameError("torchport explain", "No id is named", "Name one, such as TP107, or add --all")
    terminal.say(page().rstrip() if id is None else section(id))


@cli.command()
@click.option("--model", required=True, metavar="NAME", help="The model card.")
@click.option("--config", required=True, metavar="FILE", help="The job: sizes, machine.")
@click.option("--topology", metavar="SLICE", help="A TPU slice, such as v6e:2x4 [the config's machine].")
@click.option("--strategy", metavar="NAME", help="The set of sharding rules [the config's].")
@click.option("--sweep", is_flag=True, help="Compare all strategies and meshes of the slice in one table.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Compilations at once [by processors and memory].")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="A checkout of upstream.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Overrides a config field.")
@click.option("--scores", type=click.Choice(["bounded", "any"]), help="Assume bounded scores, or any [bounded].")
@click.option("--stage", metavar="denoise|decode|all", help="Compile one stage alone [all with a network].")
@click.option("--xla-flags", metavar="NAME", help="Compile with a named set of flags, as run: docs/profiling.md.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep the plan and the dump.")
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE", help="Also write an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@path_option
def plan(as_json: bool, **options: Any) -> None:
    """Tells, without a TPU, whether a job fits on a slice and how fast it should be; the exit code is 1 if not."""
    import json

    from torchport.commands.plan import Flags, answer

    terminal.log_to_stderr()
    outcome = answer(Flags(**options), shlex.join(["torchport", *sys.argv[1:]]))
    terminal.say(json.dumps(outcome.data, indent=2) if as_json else "\n".join(outcome.lines))
    sys.exit(0 if outcome.fits else 1)


@cli.group()
def shard() -> None:
    """Shows sharding rules and what they match."""


@shard.command("show")
@click.option("--model", required=True, metavar="NAME", help="The model card.")
@click.option("--config", metavar="FILE", help="The job [the published network, on the strategy's mesh].")
@click.option("--strategy", metavar="NAME", help="The set of sharding rules [the config's].")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="A checkout of upstream.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Overrides a config field.")
@path_option
def show_rules(
    model: str,
    config: str | None,
    strategy: str | None,
    upstream_path: Path | None,
    overrides: tuple[str, ...],
    paths: tuple[str, ...],
) -> None:
    """Prints every rule: its spec, how many tensors it matches, and their bytes on each device."""
    from torchport.commands.shard import lines, request_of, rule_rows

    place = None if upstream_path is None else str(upstream_path)
    request = request_of(model, config, strategy, paths, upstream_path=place, overrides=overrides)
    terminal.say("\n".join(lines(rule_rows(request))))


@cli.group()
def patches() -> None:
    """Lists, shows and locks patches."""


@patches.command("list")
@click.argument("names", nargs=-1)
@path_option
def list_patches(names: tuple[str, ...], paths: tuple[str, ...]) -> None:
    """Lists the patches of the named upstreams or files, or all patches."""
    from torchport.commands.patches import rows
    from torchport.config.pack import find_pack

    for row in rows(find_pack(paths).folders, names):
        promise = row["equivalence"] if isinstance(row["equivalence"], str) else next(iter(row["equivalence"]))
        notes = ["plumbing"] * row["plumbing"] + ["not locked"] * (not row["locked"] and row["kind"] != "op")
        noted = f"  ({', '.join(notes)})" if notes else ""
        terminal.say(f"{row['id']:36} {row['kind']:8} {promise:10} {row['target']}{noted}  {row['place']}")


@patches.command("show")
@click.argument("id")
@path_option
def show_patch(id: str, paths: tuple[str, ...]) -> None:
    """Shows everything about one patch, as YAML."""
    import yaml

    from torchport.commands.patches import details
    from torchport.config.pack import find_pack

    text = yaml.safe_dump(details(find_pack(paths).folders, id), sort_keys=False)
    click.echo(text, nl=False)  # YAML escapes control characters itself


@patches.command("lock")
@click.argument("names", nargs=-1)
@click.option(
    "--check", "only_check", is_flag=True, help="Only print what would change; exit with 3 if anything would."
)
@click.option("--upstream-path", metavar="DIR", help="A checkout of an upstream that pip cannot install.")
@path_option
def lock_patches(names: tuple[str, ...], only_check: bool, upstream_path: str | None, paths: tuple[str, ...]) -> None:
    """Records the reviewed source of every target, of the named upstreams or of all.

    The locks of the packs that --path names are written, or torchport's own if none is named.
    """
    from torchport.commands.check import require_applied, stages_of
    from torchport.commands.patches import lock
    from torchport.config.checkout import existing
    from torchport.config.pack import find_pack

    checkout = None if upstream_path is None else existing(upstream_path)
    if checkout is not None:
        sys.path.insert(0, str(checkout))
    pack = find_pack(paths)
    stages = stages_of(pack)
    check_apply = functools.partial(require_applied, pack.folders, upstream_path=checkout, stages=stages)
    lines = lock(pack.folders, names, only_check, check_apply, [one.patches for one in pack.checked])
    for line in lines:
        terminal.say(line)
    terminal.say(f"{len(lines)} target(s) {'would change' if only_check else 'changed'}.")
    if only_check and lines:
        sys.exit(errors.DRIFT_EXIT_CODE)


@cli.command()
@click.option("--model", required=True, metavar="NAME", help="The model card.")
@click.option("--config", metavar="FILE", help="The job [the card's demo].")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="A checkout of upstream.")
@click.option("--without-patches", is_flag=True, help="Without the card's patches: what upstream itself stops at.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Overrides a field of the config. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@path_option
def trace(
    model: str,
    config: str | None,
    upstream_path: Path | None,
    without_patches: bool,
    overrides: tuple[str, ...],
    as_json: bool,
    paths: tuple[str, ...],
) -> None:
    """Lists every place that stops the networks from being traced; the exit code is 1 if there is one.

    No weights are read. After a stopper the trace goes on with a value that it names. It also lists the constants of
    the programs, and what makes a second program.
    """
    import json

    from torchport.commands import trace as command
    from torchport.trace.trace import trace as traced

    terminal.log_to_stderr()
    report = traced(command.request_of(model, config, upstream_path, overrides, paths), not without_patches)
    if as_json:
        terminal.say(json.dumps(command.data(report), indent=2))
    else:
        terminal.say("\n".join(command.lines(report, not without_patches)))
    sys.exit(1 if report.stoppers else 0)


@cli.group()
def new() -> None:
    """Writes drafts into a pack: a patch to fill in, or the card of a model."""


@new.command("patch")
@click.argument("target", metavar="PACKAGE.MODULE:NAME")
@click.option(
    "--kind",
    required=True,
    type=click.Choice(["replace", "wrap", "rewrite", "op", "stub", "value"]),
    help="What kind of patch: docs/patches.md. A value is refused, with the functions that read it.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The folder of your pack.")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="A checkout of upstream.")
@click.option("--file", metavar="NAME", help="Its files in patches/<package>/, without endings [the module's name].")
@click.option("--line", type=click.IntRange(1), metavar="N", help="For rewrite: the statement's line in upstream.")
@click.option("--importer", "importers", multiple=True, metavar="MODULE", help="For stub: who imports it. Repeatable.")
@click.option("--why", metavar="TEXT", help="What fails without it.")
def new_patch(out: Path, upstream_path: Path | None, why: str | None, **options: Any) -> None:
    """Writes an entry, a function with the target's parameters, a test that fails until both are filled in, a lock row.

    Upstream's source is read, and nothing of it is imported. Nothing that is there already is written over.
    """
    from torchport.commands import new as command
    from torchport.new.draft import Wish

    wish = Wish(**options) if why is None else Wish(**options, why=why)
    terminal.say("\n".join(command.new_patch(wish, out, upstream_path)))


@new.command("model")
@click.argument("name")
@click.option(
    "--entry",
    "entries",
    required=True,
    multiple=True,
    metavar="[COMPONENT=]PACKAGE.MODULE:CLASS",
    help="A class of the model, the network first. Repeatable.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The folder of your pack.")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="A checkout of upstream.")
@click.option("--checkpoint", metavar="DIR|REPO@REV", help="The published weights.")
def new_model(
    name: str, entries: tuple[str, ...], out: Path, upstream_path: Path | None, checkpoint: str | None
) -> None:
    """Writes a model card, its demo's config and its stages, with `tiny:` from the class's own arguments.

    Upstream's source is read, and nothing of it is imported. Nothing that is there already is written over.
    """
    from torchport.commands import new as command
    from torchport.new.model import Wish

    wish = Wish(name, entries) if checkpoint is None else Wish(name, entries, checkpoint)
    terminal.say("\n".join(command.new_model(wish, out, upstream_path)))


@patches.command("schema")
def patch_schema() -> None:
    """Prints the JSON Schema of a patch file, as `torchport schema patch` does."""
    _print_schema("patch")


@cli.command("schema")
@click.argument("kind", type=click.Choice(["card", "job", "patch"]))
def print_schema(kind: Any) -> None:
    """Prints the JSON Schema of model cards, configs or patch files, so that editors complete and check them."""
    _print_schema(kind)


def _print_schema(kind: Any) -> None:
    import json

    from torchport.commands.schema import schema

    terminal.say(json.dumps(schema(kind), indent=2))


@cli.command()
@click.argument("names", nargs=-1)
@click.option("--model", metavar="NAME", help="Check a card and its patches, and count their calls with tiny weights.")
@click.option("--static", is_flag=True, help="In seconds: read files and upstream's source; run and import nothing.")
@click.option("--upstream-path", type=click.Path(path_type=Path), metavar="DIR", help="A checkout of upstream.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "github", "junit"]),
    default="text",
    show_default=True,
    help="The format of the findings.",
)
@click.option(
    "--report",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write them to a file: .sarif, .xml (JUnit), .json or .txt. Repeatable.",
)
@path_option
def check(form: str, files: tuple[Path, ...], **options: Any) -> None:
    """Tries patches against the upstreams that are installed, and reads cards and configs.

    It checks the packs that --path names, or torchport's own if none is named.

    The exit code is 0 if there is no finding. It is 3 for drift, 4 for a patch that comes too late or leaves an alias,
    5 for a patch that is not called, and 1 if there is nothing but other findings. If several apply, it is the lowest
    of 3, 4 and 5.
    """
    from torchport.commands import findings, formats
    from torchport.commands.check import Flags, report_of

    terminal.log_to_stderr()
    formats.check_files(files)
    report = report_of(Flags(**options))
    formats.write(report, files)
    terminal.say(formats.FORMATS[form](report))
    sys.exit(findings.exit_code(report.findings))


@cli.command()
@click.argument("codebase", metavar="PATH", type=click.Path(path_type=Path))
@click.option("--entry", "entries", multiple=True, metavar="PKG.MOD:CLASS", help="What you run of it. Repeatable.")
@click.option("--all", "everything", is_flag=True, help="Also list what the entry does not lead to.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--sarif", "as_sarif", is_flag=True, help="Print SARIF.")
@click.option(
    "--report",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the findings to a file: .sarif, .json or .txt.",
)
@click.option("--emit", type=click.Path(path_type=Path), metavar="DIR", help="Draft the patches into this pack.")
@path_option
def scan(
    codebase: Path,
    entries: tuple[str, ...],
    everything: bool,
    as_json: bool,
    as_sarif: bool,
    file: Path | None,
    emit: Path | None,
    paths: tuple[str, ...],
) -> None:
    """Lists what in a codebase will not port to TPU, and which patches take care of it. It imports none of it.

    The exit code is 1 if something that the entry leads to needs a patch that is not there, else 0. With --emit it is 1
    if no patch could be drafted for something.
    """
    terminal.log_to_stderr()
    from torchport.commands import scan as command

    form = command.form_of(as_json, as_sarif)
    if emit is not None:
        command.check_form(emit, form)
    if file is not None:
        command.check_file(file)
    report = command.report_of(codebase, entries, paths)
    if file is not None:
        command.write(report, file, everything)
    if emit is not None:
        from torchport.commands.emit import emit as drafted

        lines, code = drafted(report, codebase, emit, paths)
        terminal.say("\n".join(lines))
        sys.exit(code)
    terminal.say(command.FORMATS[form or "text"](report, everything))
    sys.exit(command.exit_code(report))


@cli.command()
@click.option("--model", required=True, metavar="NAME", help="A model card; `torchport models` lists them.")
@click.option("--config", required=True, metavar="FILE", help="The job, such as configs/demo.yaml: sizes, machine.")
@click.option("--against", default="original", show_default=True, metavar="original|run:DIR", help="What is compared.")
@click.option("--steps", metavar="N,N", help="Denoising steps to compare, from 0 [the first of each network].")
@click.option("--decode", is_flag=True, help="Compare the decoder's frames, too, given the same latents.")
@click.option("--floor", metavar="MESH", help="Another mesh, as `dp=1,tp=4`: its drift is printed beside the port's.")
@click.option("--capture", type=click.Path(path_type=Path), metavar="DIR", help="Run the original alone, into DIR.")
@click.option("--capture-limit", type=float, metavar="GIB", help="The most that --capture writes, in GiB [2].")
@click.option("--prompt", metavar="TEXT", help="What the video shows [the card's own].")
@click.option("--negative-prompt", metavar="TEXT", help="What the video should not show.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="The seed of the noise [42].")
@click.option("--checkpoint", metavar="DIR|REPO@REV", help="The weights, or `tiny` for random ones [the card's].")
@click.option("--image", type=click.Path(path_type=Path), metavar="FILE", help="The first frame, for image-to-video.")
@click.option("--upstream-path", metavar="DIR", help="A checkout of an upstream that pip cannot install.")
@click.option("--strategy", metavar="NAME", help="The set of sharding rules [the config's].")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Overrides a field of the config. Repeatable.")
@click.option("--cache/--no-cache", default=True, help="Let JAX keep compiled programs on disk [yes].")
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE", help="Also write .html, .json or .sarif.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@path_option
def verify(
    against: str,
    steps: str | None,
    decode: bool,
    floor: str | None,
    capture: Path | None,
    report: Path | None,
    capture_limit: float | None,
    strategy: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Proves that a port makes the same picture as the original, or names the module and the patch at fault.

    The exit code is 1 for another picture, and 0 for the same one and for an unclear one. It is 2 where torchport
    refuses to run, and 130 after Ctrl-C.
    """
    terminal.log_to_stderr()
    import json

    from torchport.commands.verify import Flags, answer, write_report
    from torchport.processes import stopping
    from torchport.task import Request

    overrides += (f"strategy={strategy}",) if strategy is not None else ()
    request = Request(**options, overrides=overrides)
    with stopping.unwinding():
        outcome = answer(request, Flags(steps, against, capture, decode, floor, report, capture_limit))
    terminal.say(json.dumps(outcome.data, indent=2) if as_json else "\n".join(outcome.lines))
    if report is not None:
        write_report(report, outcome)
    sys.exit(outcome.exit_code)


@cli.command()
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@click.option("--floor", type=click.Path(path_type=Path), metavar="DIR", help="A run of A's job on another mesh.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(a: Path, b: Path, floor: Path | None, as_json: bool) -> None:
    """Compares two runs by their output folders: frames before the codec, and latents step by step.

    The latents after each step are there if both runs had `keep_steps: true`. The differences of --floor from A are
    printed beside those of B: they are what rounding alone makes.
    """
    terminal.log_to_stderr()
    import json

    from torchport.commands import compare as command

    comparison = command.compare(a, b, floor)
    if as_json:
        terminal.say(json.dumps(command.data(comparison), indent=2, ensure_ascii=False))
    else:
        terminal.say("\n".join(command.lines(comparison)))


@cli.command()
@click.option("--model", metavar="NAME", help="A model card. With --config it gives head size, heads and tokens.")
@click.option("--config", metavar="FILE", help="The job. --topology replaces its machine.")
@click.option("--topology", required=True, metavar="NAME", help="The TPU slice, such as v6e:2x4. It may be absent.")
@click.option(
    "--implementation",
    type=click.Choice(["splash_transposed", "splash_int8", "splash"]),
    default="splash_transposed",
    show_default=True,
    help="The kernel: torchport's own, the same in eight bits, or JAX's Splash Attention.",
)
@click.option(
    "--scores",
    type=click.Choice(["bounded", "any", "both"]),
    default="both",
    show_default=True,
    help="Scores with a known bound, any scores, or both; for splash_transposed alone.",
)
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="The number of queries, and of keys.")
@click.option("--heads", type=click.IntRange(1), metavar="N", help="Heads on one device, if there is no --model.")
@click.option("--head-size", type=click.IntRange(1), metavar="N", help="Features of a head, if there is no --model.")
@click.option("--upstream-path", metavar="DIR", help="A checkout of an upstream that pip cannot install.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Overrides a field of the config. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--write", "file", type=click.Path(path_type=Path), metavar="FILE", help="Put the best tile into it.")
@path_option
def tune(implementation: str, scores: str, as_json: bool, file: Path | None, **options: Any) -> None:
    """Compares tiles of an attention kernel, by time or by the compiler's static schedule."""
    terminal.log_to_stderr()
    import json

    from torchport.tune import tune as command
    from torchport.tune.workload import of_flags

    job = of_flags(**options)
    if file is not None:
        command.check_writable(file)
    results = command.tune_all(job, implementation, scores)
    if as_json:
        terminal.say(json.dumps([row for result in results for row in command.rows(result)], indent=2))
    else:
        terminal.say("\n\n".join("\n".join(command.lines(result)) for result in results))
    if file is not None:
        command.write(file, results)


def main() -> None:
    """Runs the command line; a refusal is a line for each mistake and an exit code, never a traceback."""
    sys.exit(terminal.run(cli))


if __name__ == "__main__":
    main()
