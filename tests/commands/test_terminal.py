"""What lies between the terminal and a command: odd flags, odd files, text that would control it, a full device."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import command_lines
import pytest

from torchport.__main__ import cli
from torchport.commands import terminal
from torchport.config.pack import find_pack
from torchport.errors import DataFolderError, TopologyError
from torchport.processes import child, script
from torchport.run import path
from torchport.task import Request, accept

BEGUN = ["error[TP502] here: The work began. All that was asked for is sound."]
RUN = ("run", "--model", "hunyuan", "--config", "configs/demo.yaml", "--prompt", "A cat", "--backend", "original")
LONG = "x" * 300
SEED, COUNT = 12, 300


@pytest.fixture
def odd(tmp_path, root, monkeypatch):
    """A current folder with odd files in it; nothing that a command line begins takes long, or hangs for ever."""

    def begun(*_, **__):
        raise TopologyError("here", "The work began", "All that was asked for is sound")

    def hangs(*_):
        pytest.fail("it hangs")

    monkeypatch.setattr(child, "call", begun)
    monkeypatch.setattr(script, "become", begun)
    monkeypatch.setattr(path, "_carry", begun)
    before = signal.signal(signal.SIGALRM, hangs)
    command_lines.prepare(tmp_path, (root / "configs" / "demo.yaml").read_text())
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check_said(code, out, err):
    """Checks that a command ended with results, one refusal, or click's usage, and that no text controls a terminal."""
    text = [*out, *err]
    assert all(letter.isprintable() for line in text for letter in line), text
    assert code in (0, 1, 2, 3), text
    if code == 2:
        refused = [line for line in err if line.startswith("error[TP")]
        err = [line for line in err if not line.startswith(("torchport run ", "  "))]  # what the demo is about to do
        assert not out and (refused == err[:1] == err or err[0].startswith("Usage: ")), text


@pytest.mark.slow
def test_odd_command_lines_end_in_results_or_one_line(odd, torchport, capsys):
    for words in command_lines.drawn(cli, SEED, COUNT):
        signal.alarm(120)
        code, out, err = torchport(*words, capsys=capsys)
        signal.alarm(0)
        check_said(code, out, err)


EMPTY = "It is empty. Write a value, or leave the flag out."
LOOP = "The system refuses this path: Too many levels of symbolic links. Name another."
TOO_LONG = "The system refuses this path: File name too long. Name another."


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*RUN, "--checkpoint", ""), f"error[TP107] --checkpoint '': {EMPTY}"),
        ((*RUN, "--checkpoint="), f"error[TP107] --checkpoint '': {EMPTY}"),
        ((*RUN, "--upstream-path", ""), f"error[TP107] --upstream-path '': {EMPTY}"),
        ((*RUN, "--out", ""), f"error[TP107] --out '': {EMPTY}"),
        ((*RUN, "--set", ""), f"error[TP107] --set '': {EMPTY}"),
        (("models", "--path", ""), f"error[TP107] --path '': {EMPTY}"),
        (("check", "--upstream-path", ""), f"error[TP107] --upstream-path '': {EMPTY}"),
        (("patches", "lock", "--upstream-path", ""), f"error[TP107] --upstream-path '': {EMPTY}"),
        ((*RUN, "--set", "checkpoint=''"), "error[TP105] --set checkpoint='': 'checkpoint' is '' (text). It must be"),
        ((*RUN[:4], LONG, *RUN[5:]), f"error[TP107] --config {'x' * 77}...: {TOO_LONG}"),
        ((*RUN, "--out", LONG), f"error[TP107] --out {'x' * 77}...: {TOO_LONG}"),
        (("plan", *RUN[1:5], "--keep", LONG), f"error[TP107] --keep {'x' * 77}...: {TOO_LONG}"),
        (("plan", *RUN[1:5], "--report", LONG), f"error[TP107] --report {'x' * 77}...: {TOO_LONG}"),
        (("patches", "list", LONG), "error[TP106] "),
        ((*RUN, "--out", "loop"), f"error[TP107] --out loop: {LOOP}"),
        (("exec", "--model", "hunyuan", "--", LONG), f"error[TP107] torchport exec {'x' * 77}...: {TOO_LONG}"),
        ((*RUN, "--checkpoint", "./loop"), f"error[TP107] --checkpoint ./loop: {LOOP}"),
        (("plan", *RUN[1:5], "--keep", "loop"), f"error[TP107] --keep loop: {LOOP}"),
        (("doctor", "--path", "loop"), f"error[TP107] --path loop: {LOOP}"),
        (("plan", *RUN[1:5], "--report", "pipe.yaml"), "error[TP604] --report pipe.yaml: It is no file, or lies in no"),
        (("check", "--upstream-path", "nowhere"), "error[TP109] --upstream-path nowhere: There is no such folder."),
        (("patches", "lock", "--upstream-path", "no"), "error[TP109] --upstream-path no: There is no such folder."),
        ((*RUN, "--set", "checkpoint=~nobody-of-that-name/x"), "error[TP301] --checkpoint ~nobody-of-that-name/x: "),
        ((*RUN, "--set", "steps=&x 3"), "error[TP101] --set steps=&x 3: The anchor &x is not plain data. Quote the v"),
        (("models", "--path", os.fsdecode(b"\xff")), "error[TP107] --path: Character 1 is not Unicode text."),
        (("explain", "\x1b[31m"), "error[TP106] torchport explain \\x1b[31m: There is no id \\x1b[31m. "),
    ],
)
def test_a_value_that_no_command_could_use_is_refused_in_one_line(odd, torchport, capsys, words, text):
    code, out, err = torchport(*words, capsys=capsys)
    assert (code, out, len(err)) == (2, [], 1) and err[0].startswith(text), err
    check_said(code, out, err)


def test_a_prompt_may_be_empty(odd, torchport, capsys):
    words = [*RUN[:6], "", *RUN[7:], "--negative-prompt", ""]
    assert torchport(*words, capsys=capsys)[2] == [
        "error[TP502] here: The work began. All that was asked for is sound."
    ]


def test_a_config_with_the_longest_name_is_one(odd, torchport, capsys):
    words = [*RUN[:4], "y" * 250 + ".yaml", *RUN[5:]]
    assert torchport(*words, capsys=capsys)[2] == [
        "error[TP502] here: The work began. All that was asked for is sound."
    ]


def test_from_python_an_empty_name_is_no_name_either(root):
    with pytest.raises(DataFolderError, match="--path : There is no folder here"):
        find_pack(("",))
    with pytest.raises(Exception, match="--checkpoint '': It is empty"):
        accept(Request("hunyuan", "configs/demo.yaml", "A cat", checkpoint="", paths=(str(root),)))


@pytest.fixture
def pack(root, tmp_path):
    """A copy of the shipped pack, to be spoilt."""
    import shutil

    for name in ("patches", "configs"):
        shutil.copytree(root / name, tmp_path / "pack" / name)
    return tmp_path / "pack"


def _folder(file):
    file.mkdir()


def _link(target):
    def make(file):
        file.symlink_to(target)

    return make


COMMANDS = (
    ("models",),
    ("doctor",),
    ("patches", "list"),
    ("patches", "lock", "--check", "torchax"),
    ("check", "torchax"),
)


@pytest.mark.parametrize(
    ("file", "spoil", "text"),
    [
        ("configs/models/d.yaml", _folder, "It cannot be read: It is a folder. Put a file of YAML there."),
        ("configs/models/d.yaml", os.mkfifo, "It cannot be read: It is a pipe, socket or device. Put a file of YAML"),
        ("configs/models/d.yaml", _link("d.yaml"), "It cannot be read: Too many levels of symbolic links. Put a file"),
        ("configs/models/d.yaml", _link("none"), "It cannot be read: No such file or directory. Put a file of YAML"),
        ("configs/models/d.yaml", _link("/etc/passwd"), "'d.yaml' is a link out of 'pack'. Put the file itself there."),
        ("patches/torchax/d.yaml", _folder, "'d.yaml' would never be read. It is a folder: rename it, or put a file"),
        ("patches/torchax/d.yaml", os.mkfifo, "It cannot be read: It is a pipe, socket or device. Put a file of YAML"),
        ("patches/torchax/d.yaml", _link("d.yaml"), "It cannot be read: Too many levels of symbolic links. Put a file"),
        ("patches/torchax/d.yaml", _link("/etc/passwd"), "'d.yaml' is a link out of 'patches'. Put the file itself th"),
        ("patches/torchax/lock.yaml", os.mkfifo, "It cannot be read: It is a pipe, socket or device. Put a file of"),
        ("patches/torchax/lock.yaml", _link("/etc/passwd"), "'lock.yaml' is a link out of 'patches'. Put the file it"),
        ("patches/torchax/lock.yaml", _link("none"), "It cannot be read: No such file or directory. Put a file of Y"),
    ],
)
def test_a_file_of_a_pack_that_is_none_is_refused_by_every_command(odd, pack, torchport, capsys, file, spoil, text):
    (pack / file).unlink(missing_ok=True)
    spoil(pack / file)
    refusals = 0
    for words in COMMANDS:
        signal.alarm(60)
        code, out, err = torchport(*words, "--path", pack, capsys=capsys)
        signal.alarm(0)
        check_said(code, out, err)
        refusals += code != 0 and any(f"{file}: {text}" in line for line in (*err, *out))
    assert refusals >= 2, "of the model cards two commands read all, of the patches more"


def test_text_from_a_pack_does_not_reach_the_terminal_raw(odd, pack, torchport, capsys):
    file = pack / "configs" / "models" / "hunyuan.yaml"
    file.write_text(file.read_text().replace("title: ", 'overrides: true\ntitle: "\\e[31m" #', 1))
    code, out, _ = torchport("models", "--path", pack, capsys=capsys)
    assert code == 0 and any("\\x1b[31m" in line for line in out) and not any("\x1b" in line for line in out)
    file.write_text('"\\e[2Jkey": 1\noverrides: true\n')
    code, _, err = torchport("models", "--path", pack, capsys=capsys)
    assert code == 1 and "Unknown key '\\x1b[2Jkey'" in err[0] and "\x1b" not in err[0]


def test_what_is_logged_and_what_click_says_is_printable(torchport, capsys):
    record = logging.LogRecord("torchport", 20, "", 1, "removed %s\nand", ("\x1b[31m.json",), None)
    assert terminal._Formatter("%(message)s").format(record) == "removed \\x1b[31m.json\nand"
    code, out, err = torchport("models", "--\x1b[31m", capsys=capsys)
    assert (code == 2 and err[-1] == "Error: No such option '--\\x1b[31m'.") or "\\x1b[31m" in err[-1]
    check_said(code, out, err)


FULL = "error[TP604] standard output: It cannot be written: No space left on device. Free some space, or send it "
HELD = ("--help", "--version", "models", "explain --all", "patches schema", "patches list", "doctor", "run --help")


@pytest.mark.parametrize("words", HELD)
def test_a_full_device_under_standard_output_is_one_line(torchport, capsys, words, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = torchport(*words.split(), capsys=capsys)
    assert (code, len(err)) == (2, 1) and err[0].startswith(FULL)


def command(root, tmp_path, words, **where):
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "torchport", *words], cwd=tmp_path, env=environment, stderr=-1, text=True, **where
    )


@pytest.mark.parametrize("words", [["--help"], ["patches", "show", "diffusers.hunyuan15.vae-attention"]])
def test_a_process_with_a_full_device_says_nothing_more_at_its_end(root, tmp_path, words):
    with Path("/dev/full").open("w") as full:
        done = command(root, tmp_path, words, stdout=full)
        assert done.returncode == 2 and done.stderr.startswith(FULL) and done.stderr.count("\n") == 1
        assert command(root, tmp_path, words, stdout=full).returncode == 2


def test_a_reader_that_has_read_enough_is_no_mistake(root, tmp_path):
    ends = os.pipe()
    os.close(ends[0])
    done = command(root, tmp_path, ["explain", "--all"], stdout=ends[1])
    os.close(ends[1])
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("words", [("models",), ("check", "torchax"), RUN, ("plan", *RUN[1:5])])
def test_a_current_folder_that_was_removed_is_said(torchport, capsys, root, tmp_path, words):
    gone = tmp_path / "gone"

    def call():
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        return cli

    code, _, err = _in_removed(torchport, capsys, call, words)
    assert (code, err) == (2, ["error[TP107] the current folder: It was removed. Run cd, to a folder that is there."])


def _in_removed(torchport, capsys, prepare, words):
    from torchport import __main__

    sys.argv[:] = ["torchport", *words]
    here = os.open(".", os.O_RDONLY)
    prepare()
    try:
        with pytest.raises(SystemExit) as stop:
            __main__.main()
    finally:
        os.fchdir(here)
        os.close(here)
    return stop.value.code, *(text.splitlines() for text in capsys.readouterr())


INTERRUPTED = """if True:
    import gc, signal, sys, time
    import click
    from torchport.commands import terminal
    from torchport.processes.stopping import Stopping

    # A shell's job in the background has SIGINT ignored, and so have its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def collected(phase, info):
        gc.callbacks.clear()
        for _ in range(TIMES):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0)

    @click.command()
    def command():
        gc.callbacks[:] = [collected]
        gc.collect()
        while True:
            time.sleep(0.01)

    @click.command()
    def listening():
        with Stopping().listening():
            command.callback()

    sys.exit(terminal.run(COMMAND))
"""


@pytest.mark.parametrize(("name", "times"), [("command", 1), ("listening", 2)])
def test_a_ctrl_c_in_a_callback_that_loses_it_still_ends_the_command(root, name, times):
    code = INTERRUPTED.replace("COMMAND", name).replace("TIMES", str(times))
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stderr=-1, text=True, timeout=60)
    lines = [line for line in done.stderr.split("\n") if line and not line.startswith("stopping after")]
    assert (done.returncode, lines) == (130, ["Stopped at once; what was being written is not kept."])
