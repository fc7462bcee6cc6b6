"""The command line: every refusal is one line on stderr and exit code 2, never a traceback, and writes nothing."""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from email.message import Message

import click
import pytest
from command_lines import commands

from torchport import __version__, errors
from torchport.__main__ import COMMANDS, cli
from torchport.commands import explain
from torchport.commands import run as command
from torchport.config.checkout import Upstream
from torchport.processes import hosts
from torchport.processes.git import Revision
from torchport.run.journey import Summary
from torchport.task import Execution, Request, devices

SMALL = ("--set", "height=64", "--set", "width=64", "--set", "frames=5", "--set", "steps=3")
RUN = ("run", "--model", "hunyuan", "--config", "configs/demo.yaml", "--prompt", "A cat", "--backend", "original")


@pytest.fixture
def refused(torchport, capsys, root, tmp_path, unchanged):
    """Runs a command that must be refused; returns the one line of stderr, without its id, which is checked."""

    def call(kind, *args):
        before = unchanged(tmp_path)
        code, out, err = torchport(*args, "--path", root, capsys=capsys)
        assert (code, out) == (2, []) and len(err) == 1, (code, out, err)
        assert err[0].startswith(f"error[{kind.id}] ")
        assert unchanged(tmp_path) == before, "nothing was written"
        return err[0].removeprefix(f"error[{kind.id}] ")

    return call


@pytest.mark.parametrize(
    ("kind", "changed", "text"),
    [
        (errors.UnknownNameError, ("--model", "hunyan"), "--model hunyan: There is no model card 'hunyan' in"),
        (errors.UnknownNameError, ("--config", "configs/dem.yaml"), "--config configs/dem.yaml: There is no file"),
        (
            errors.UnknownNameError,
            ("--stage", "decod"),
            "--stage decod: There is no such stage. Did you mean 'decode'?",
        ),
        (errors.UnknownKeyError, ("--set", "hight=64"), "--set hight=64: Unknown key 'hight'. Did you mean 'height'?"),
        (
            errors.WrongTypeError,
            ("--set", "steps=many"),
            "--set steps=many: 'steps' is 'many' (text). It must be a whole",
        ),
        (errors.WrongTypeError, ("--set", "steps"), "--set steps: This is not path.to.field=value."),
        (errors.UnknownNameError, ("--strategy", "tpp"), "--set strategy=tpp: 'hunyuan' has no strategy 'tpp'. Did"),
        (
            errors.WrongTypeError,
            ("--set", "save_every=0"),
            "--set save_every=0: 'save_every' is 0 (a number).",
        ),
        (errors.BadValueError, ("--profile", "2"), "--profile 2: It is no number of steps. Write --profile steps=2."),
        (errors.BadValueError, ("--profile", "steps=0"), "--profile steps=0: It is no number of steps."),
        (errors.BadValueError, ("--profile", "steps=1"), "--profile steps=1: JAX's profiler does not see --backend"),
        (errors.BadValueError, ("--xla-flags", "less-memory"), "--backend original compiles nothing. Leave one of the"),
        (
            errors.UnknownNameError,
            ("--backend", "torchax", "--xla-flags", "less-memry"),
            "--xla-flags less-memry: There is no such set of flags. Did you mean 'less-memory'?",
        ),
        (errors.BadValueError, ("--stage", "encode", "--no-jit"), "--no-jit: 'encode' has no network that is compiled"),
        (errors.SyntaxYamlError, ("--set", "steps=[1"), "--set steps=[1: Not YAML: "),
        (errors.DuplicateKeyError, ("--set", "mesh={dp: 1, dp: 2}"), "--set mesh={dp: 1, dp: 2}:1: 'dp' stands here"),
        (errors.BadValueError, ("--set", "frames=16"), "'frames' is 16. It must be 4n+1: the nearest are 13 and 17."),
        (errors.BadValueError, ("--set", "width=100"), "The VAE divides it by 16: the nearest are 96 and 112."),
        (errors.BadValueError, ("--set", "machine=v7:2x4"), "'machine' is 'v7:2x4'. It must be a TPU slice (v5e, v5p"),
        (errors.UnknownNameError, ("--set", "strategy=tpp"), "'hunyuan' has no strategy 'tpp'. Did you mean 'tp'?"),
        (
            errors.MeshError,
            ("--backend", "torchax", "--set", "mesh.tp=2"),
            "mesh dp=2 x tp=2 takes 4 device(s), and cpu:8",
        ),
        (errors.MeshError, ("--backend", "torchax", "--set", "guidance_scale=1.0"), "dp must be 1."),
        (
            errors.MeshError,
            ("--backend", "torchax", "--set", "guidance_scale=1.0", "--set", "mesh={tp: 8}"),
            "tp=8 does not divide transformer.num_attention_heads, which is 4. tp must be one of 1, 2, 4.",
        ),
        (errors.CheckpointMissingError, ("--checkpoint", "./none"), "--checkpoint ./none: There is no such folder."),
        (
            errors.CheckpointMissingError,
            ("--checkpoint", "nobody/nothing@main"),
            "It is not in the cache, and cannot be downloaded",
        ),
        (
            errors.ArtefactMissingError,
            ("--stage", "denoise"),
            "encode.safetensors: The artefact of 'encode' is not there",
        ),
        (errors.ArtefactMissingError, ("--stage", "decode"), "denoise.safetensors: The artefact of 'denoise' is not"),
    ],
)
def test_bad_input_is_refused_in_one_line(refused, kind, changed, text, monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda: 2**50)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: types.SimpleNamespace(free=2**50))
    assert text in refused(kind, *RUN, *SMALL, *changed)


def test_flags_of_a_run_become_a_request(torchport, capsys, monkeypatch, tmp_path):
    requests = []

    def note(request, cluster):
        requests.append(request)
        return Summary(tmp_path, None, {}, 0)

    monkeypatch.setattr("torchport.run.path.run", note)
    flags = ("--no-jit", "--xla-flags", "quick-compile", "--profile", "steps=3", "--memory")
    assert torchport(*RUN, "--strategy", "tp", "--machine", "v6e:2x4", *flags, capsys=capsys)[0] == 0
    [request] = requests
    assert request.overrides == ("strategy=tp", "machine=v6e:2x4")
    assert request.execution == Execution(jit=False, xla_flags="quick-compile", profile=3, memory=True)
    assert torchport(*RUN, capsys=capsys)[0] == 0
    assert (requests[1].overrides, requests[1].execution) == ((), Execution())


def test_a_missing_prompt_is_refused(refused):
    args = [arg for arg in RUN if arg not in ("--prompt", "A cat")]
    assert refused(errors.BadValueError, *args) == (
        "--prompt: It is missing, and the stage 'encode' needs one. Add --prompt \"...\"."
    )


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("WanPipeline", " A pipeline has 'diffusers:' before its name."),
        ("wan", " '--config demo' is the model's demo."),
    ],
)
def test_a_job_that_is_missing_is_asked_for_and_a_pipeline_without_its_prefix_known(torchport, capsys, model, hint):
    code, out, err = torchport("run", "--model", model, "--prompt", "x", capsys=capsys)
    assert (code, out, err[-1]) == (2, [], f"Error: Missing option '--config'.{hint}")


def test_a_wrong_model_is_said_before_its_missing_job(refused):
    text = refused(errors.UnknownNameError, "run", "--model", "hunyun", "--prompt", "x")
    assert text.startswith("--model hunyun: There is no model card 'hunyun' in ") and "Did you mean 'hunyuan'?" in text


def test_a_mistake_in_a_config_is_refused_with_its_line(refused, root, tmp_path):
    text = (root / "configs" / "demo.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("steps: 8", "steps: 8\nsteps: 9"))
    line = text.splitlines().index("steps: 8") + 1
    assert refused(errors.DuplicateKeyError, *RUN[:4], "mine.yaml", *RUN[5:]) == (
        f"mine.yaml:{line + 1}: 'steps' stands here and on line {line}. Keep one of the two."
    )


def test_an_output_folder_that_cannot_be_made_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "/below: It cannot be written: Not a directory. Choose another folder with --out." in refused(
        errors.OutputError, *RUN, *SMALL, "--out", tmp_path / "file" / "below"
    )


def test_a_truncated_checkpoint_is_refused(refused, tiny_folder, tmp_path):
    import shutil

    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    file = copy / "text_encoder" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    text = refused(errors.CheckpointBrokenError, *RUN, *SMALL, "--checkpoint", copy)
    assert text.startswith(f"{file}: It has ") and text.endswith("Download the file again: it is truncated.")


def test_a_job_for_another_machine_is_refused_before_any_download(refused, monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def hub(*args, local_files_only=False, **kwargs):
        assert local_files_only, "a download was asked for"
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    text = refused(errors.MachineError, "run", "--model", "hunyuan", "--config", "configs/720p.yaml", "--prompt", "x")
    assert text.startswith(
        "machine v6e:2x4: The job needs 8 device(s) of v6e:2x4 with 15.5 GiB of weights (transformer) "
    )
    assert " GiB of host memory for weights, the checkpoint hunyuanvideo-community/HunyuanVideo-1.5" in text
    assert "this machine has no tpu device" in text
    assert text.endswith('or run here: torchport run --model hunyuan --config configs/demo.yaml --prompt "...".')


def test_a_folder_without_a_pack_is_refused(torchport, capsys, tmp_path):
    code, _, err = torchport("models", "--path", tmp_path, capsys=capsys)
    assert code == 2 and err == [
        f"error[TP108] --path {tmp_path}: There is no folder here with patches/ or configs/ in it. "
        "Name the folder that holds them."
    ]


@pytest.mark.parametrize("args", [("--no-such",), ("no-such",), ("run", "--seed", "-1"), ("run", "--backend", "x")])
def test_flags_that_do_not_exist_are_refused_with_usage(torchport, capsys, args):
    code, _, err = torchport(*args, capsys=capsys)
    assert code == 2 and err[0].startswith("Usage: torchport") and err[-1].startswith("Error: ")


def test_models_are_listed_with_checkpoint_and_strategies(torchport, capsys, root, card):
    code, out, err = torchport("models", "--path", root, capsys=capsys)
    assert (code, err) == (0, []) and any(line.split()[0] == "hunyuan" and card.title in line for line in out)
    assert any(
        card.checkpoint in line and line.endswith("strategies tp, tp_replicated_rows, ulysses, fsdp") for line in out
    )


def test_an_error_is_explained_by_its_id_and_all_of_them_as_a_page(torchport, capsys):
    code, out, _ = torchport("explain", "tp107", capsys=capsys)
    assert code == 0 and out[0] == "TP107 BadValueError" and "cannot use" in out[2] and out[-1].startswith("Cure: ")
    code, out, _ = torchport("explain", "--all", capsys=capsys)
    assert code == 0 and "\n".join(out) + "\n" == explain.page()
    code, _, err = torchport("explain", "TP999", capsys=capsys)
    assert code == 2 and err[0].startswith("error[TP106] torchport explain TP999: There is no id TP999. ")
    code, _, err = torchport("explain", "FOO", capsys=capsys)
    fact = "error[TP106] torchport explain FOO: There is no id FOO. "
    assert (code, err) == (2, [f"{fact}`torchport explain --all` lists them."])
    code, _, err = torchport("explain", capsys=capsys)
    assert (code, err) == (
        2,
        ["error[TP106] torchport explain: No id is named. Name one, such as TP107, or add --all."],
    )


def test_an_error_has_an_address_on_the_web_below_the_projects_documentation(torchport, capsys, root, monkeypatch):
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    metadata = Message()
    for name, address in urls.items():
        metadata["Project-URL"] = f"{name}, {address}"
    installed = types.SimpleNamespace(metadata=metadata)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [installed] * (name == "torchport"))
    for id, page in (("TP203", "errors/#tp203"), ("ps401", "scan/#ps401")):
        assert torchport("explain", "--web", id, capsys=capsys) == (0, [urls["Documentation"] + page], [])
    assert torchport("explain", "--web", "TP999", capsys=capsys)[0] == 2
    del metadata["Project-URL"]
    code, _, err = torchport("explain", "--web", "TP203", capsys=capsys)
    assert (code, err) == (2, ["error[TP106] --web: The installed torchport names no site. Install it again."])


def test_doctor_prints_a_line_for_each_finding_and_one_of_advice(torchport, capsys, root):
    code, out, _ = torchport("doctor", "--path", root, capsys=capsys)
    assert code == 0 and out[-1].startswith("Ready: torchport run --model ")
    assert all(line.split()[0] in ("ok", "note") for line in out[:-1]) and len(out) > 8


def test_doctor_says_by_its_exit_code_that_something_is_to_be_mended(torchport, capsys, root, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=1 \\")
    code, out, _ = torchport("doctor", "--path", root, capsys=capsys)
    assert code == 1 and out[-1] == "1 thing(s) to mend."


def test_the_version_is_the_packages(torchport, capsys):
    code, out, _ = torchport("--version", capsys=capsys)
    assert code == 0 and out == [f"torchport, version {__version__}"]


def test_every_command_and_flag_is_explained_and_none_is_read_by_nobody():
    for words, one in commands(cli):
        assert one.help and one.help.splitlines()[0].endswith("."), words
        for option in one.params:
            if isinstance(option, click.Option):
                assert option.help and option.help[0].isalpha() and option.help.endswith((".", "]")), option.name
    fields = {*Request.__dataclass_fields__, *Execution.__dataclass_fields__}
    flags = {option.name for option in command.command.params}
    functions = command.command.callback, hosts.cluster_of
    assert flags <= {*fields, *(name for function in functions for name in inspect.signature(function).parameters)}


def test_the_line_of_each_command_is_how_its_help_begins():
    assert list(COMMANDS) == sorted(COMMANDS)
    for name, line in COMMANDS.items():
        _, one, _ = cli.resolve_command(click.Context(cli), [name])
        assert one.name == name and " ".join(one.help.split()).startswith(line.removesuffix("."))


def test_a_flag_that_commands_share_is_one_flag():
    """One type, one metavar and one meaning; what stands in brackets is a command's own default."""
    shared = {
        "--path", "--upstream-path", "--set", "--json", "--backend", "--negative-prompt", "--seed", "--image",
        "--cache", "--xla-flags", "--config", "--topology", "--prompt", "--strategy",
    }  # fmt: skip
    seen = {}
    for _, one in commands(cli):
        for option in one.params:
            if option.opts[0] in shared:
                meaning = option.help.split(" [")[0].rstrip(".")
                kind = option.name, str(option.type), option.metavar, option.multiple, meaning
                seen.setdefault(option.opts[0], set()).add(kind)
    assert {flag: len(kinds) for flag, kinds in seen.items()} == dict.fromkeys(shared, 1)


def test_a_refusal_in_a_process_of_its_own_is_one_line_and_no_traceback(root, tmp_path):
    command = [sys.executable, "-m", "torchport", "models", "--path", "nowhere"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[TP108] --path nowhere: ") and done.stderr.count("\n") == 1


def test_the_summary_names_the_commit_of_a_checkout(tmp_path):
    made = Summary(tmp_path, None, {}, 0, Upstream("up", Revision("1" * 40, dirty=True)))
    assert command.lines(made, quiet=True) == [f"{tmp_path}"]
    assert command.lines(made) == ["", "up at commit 111111111111 with changes", "", f"{tmp_path}"]


def test_a_whole_run_prints_where_the_video_is_and_where_the_time_went(torchport, capsys, root, tmp_path):
    code, out, _ = torchport(*RUN, *SMALL, "--out", "made", "--path", root, capsys=capsys)
    assert code == 0 and out[-1] == "made/video.mp4"
    assert out[-2] == "made/contact_sheet.png: frames of it, side by side"
    assert [line.split()[0] for line in out[1:4]] == ["encode", "denoise", "decode"] and "s/step" in out[4]
    [parts] = [line for line in out if line.startswith("clip")]
    assert re.fullmatch(r"clip +[\d.]+ s   \(.*encode [\d.]+.*denoise [\d.]+.*\)", parts)
    names = {file.name for file in (tmp_path / "made").iterdir()}
    stages = {f"{stage}.{kind}" for stage in ("encode", "denoise", "decode") for kind in ("json", "safetensors")}
    assert names == stages | {"manifest.json", "video.mp4", "contact_sheet.png"}
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert manifest["model"] == "hunyuan" and set(manifest["stages"]) == {"encode", "denoise", "decode"}
    quietly = ("--out", "made", "--path", root, "--stage", "decode", "--quiet")
    assert torchport(*RUN, *SMALL, *quietly, capsys=capsys) == (0, ["made/video.mp4"], [])
