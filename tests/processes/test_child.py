"""A call in a process of its own: what comes back, what it may import, and what is said where nothing comes back."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes.child_calls import Place

from torchport import processes
from torchport.errors import TopologyError, VmemError
from torchport.processes import child


def stopped(end):
    return TopologyError("here", f"The process {end}", "Mend it", stderr=end.stderr)


def call(name, *arguments, **options):
    return child.call(f"fakes.child_calls:{name}", *arguments, ended=stopped, **options)


def test_arguments_and_results_are_python_values_whatever_is_printed():
    assert call("moved", Place((1, 2)), 3) == Place((4, 5))


def test_a_refusal_comes_back_whole():
    with pytest.raises(VmemError) as caught:
        call("refused")
    assert str(caught.value) == "a kernel: It takes 2 bytes. Take 1."
    assert (caught.value.asked, caught.value.limit, caught.value.patch) == (2, 1, "up.one")


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("raised", (), "The process ended with exit code 1 and said: ValueError: two. Mend it."),
        ("left", (7,), "The process ended with exit code 7 and said: nothing. Mend it."),
        ("left", (0,), "The process ended with exit code 0 and said: nothing. Mend it."),
        ("killed", (signal.SIGSEGV,), "The process was killed by SIGSEGV and said: the last words. Mend it."),
        (
            "killed",
            (signal.SIGKILL,),
            "The process was killed by SIGKILL, as the system does where memory runs out, and said: the last words. "
            "Mend it.",
        ),
    ],
)
def test_a_process_that_ends_without_an_answer_is_one_line_with_its_last_words(name, arguments, text):
    with pytest.raises(TopologyError) as caught:
        call(name, *arguments)
    assert str(caught.value) == f"here: {text}"
    assert "a warning" in caught.value.stderr or name == "left"


def test_what_cannot_be_sent_back_is_said():
    with pytest.raises(TopologyError, match=r"said: TypeError: cannot pickle '_thread.lock' object"):
        child.call("threading:Lock", ended=stopped)


def test_a_process_is_ended_when_nobody_waits_for_its_answer():
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    start = time.monotonic()
    with pytest.raises(child.ChildStoppedError):
        child.call("time:sleep", 600, ended=stopped, stop=stop)
    assert time.monotonic() - start < 300


def test_a_process_ends_with_its_parent_however_the_parent_ends(tmp_path, root):
    """Of a chain of three processes the first is killed: the second ends with it, and the third with the second."""
    file = tmp_path / "numbers"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    code = f"from fakes.child_calls import nested; nested({str(file)!r}, 2)"
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        while not file.exists() or file.read_text().count("\n") < 3:
            time.sleep(0.02)
        numbers = [int(line) for line in file.read_text().split()]
        assert numbers[0] == parent.pid and all(map(_is_alive, numbers))
        parent.kill()
    limit = time.monotonic() + 60
    while any(map(_is_alive, numbers)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not any(map(_is_alive, numbers))


def _is_alive(number):
    try:
        os.kill(number, 0)
        stat = Path(f"/proc/{number}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"  # nobody may reap it here
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_last_words_are_the_exception_not_what_jax_says_below_it():
    below = "For simplicity, JAX has removed its internal frames from the traceback of the following exception."
    raised = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
    for last in ("jax.errors.JaxRuntimeError: INTERNAL: no such chip", "MemoryError", "ValueError: Error: two"):
        assert child.last_words(f"ValueError: the cause\n{raised}{last}\n-----\n{below}\n") == last
    assert child.last_words("first\nSegmentation fault: no Error here\n") == "Segmentation fault: no Error here"
    assert child.last_words("  \n") == "nothing" and len(child.last_words("x" * 1000)) == 300


def test_a_child_imports_what_its_parent_does_and_nothing_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('mine')")
    first = tmp_path / "first"
    first.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(first), ""]))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    searched, json_file, named, one = call("imported", environment={"ONE": "1"}, first=[first])
    assert searched[0] == str(first) and "" not in searched and str(tmp_path) not in searched
    assert searched[1:] == processes.trusted_path(sys.path)
    assert not json_file.startswith(str(tmp_path)) and (named, one) == (str(first), "1")


def test_a_child_imports_the_torchport_of_its_parent_though_another_is_installed(tmp_path, root, monkeypatch):
    (tmp_path / "torchport").mkdir()
    (tmp_path / "torchport" / "__init__.py").write_text("raise SystemExit('another one')")
    others = [entry for entry in processes.trusted_path(sys.path) if entry != str(root)]
    monkeypatch.setattr(processes, "trusted_path", lambda _: [str(tmp_path), *others])
    assert call("moved", Place((1, 2)), 3) == Place((4, 5))


@pytest.mark.parametrize(
    ("searched", "variable", "started", "wanted"),
    [
        (["HERE", "/a"], "", True, ["/a"]),
        (["/bin", "HERE", "/a"], "", False, ["/bin", "HERE", "/a"]),  # an installed package's, or a program's own
        (["/b", "/a"], "", True, ["/b", "/a"]),
        (["", "/a"], "", False, ["/a"]),
        (["HERE", "/a"], ":/a", False, ["/a"]),
        (["HERE", "HERE", "/a"], ":/a", True, ["/a"]),
        (["HERE", "HERE", "/a"], "HERE:/a", True, ["HERE", "/a"]),
        (["HERE", "/a"], "HERE::/a", False, ["HERE", "/a"]),
        (["HERE", "/a"], ".", False, ["HERE", "/a"]),
    ],
)
def test_the_current_folder_is_searched_only_where_somebody_named_it(
    searched, variable, started, wanted, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", variable.replace("HERE", str(tmp_path)))
    searched, wanted = ([str(tmp_path) if one == "HERE" else one for one in paths] for paths in (searched, wanted))
    assert processes.trusted_path(searched, started) == wanted


def test_a_folder_that_was_removed_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert processes.current_folder() is None and processes.trusted_path(["", "/a"], is_main=True) == ["/a"]


NAMES = ("pydantic", "torch", "jax", "json", "pickle", "numpy", "click", "yaml", "diffusers", "torchax", "tempfile")
"""Modules that every command imports sooner or later."""


@pytest.fixture
def hostile(tmp_path, root):
    """Runs Python in a folder of modules that would leave a file; returns what it says after none was left."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'RAN')!r}, 'a').write('{name} ')\nraise SystemExit(9)"
        )
    # What an installed package's script is: a file in another folder.
    script = tmp_path / "bin" / "torchport"
    script.parent.mkdir()
    script.write_text("import sys\nfrom torchport.__main__ import main\nsys.exit(main())\n")

    def run(*words, variable=f"{root}", start=(str(script),)):
        environment = {**os.environ, "PYTHONPATH": variable}
        command = [sys.executable, *start, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        ran = tmp_path / "RAN"
        assert not ran.exists(), (ran.read_text(), done.stderr)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


MODULE = ("-m", "torchport")
BAD_FLAG = ("LIBTPU_INIT_ARGS", "--no_such_flag=1")
"""With it, a process that compiles starts, imports all that it needs, and ends at once."""


@pytest.mark.parametrize("start", [None, MODULE])
@pytest.mark.parametrize("empty", [False, True])
def test_no_command_imports_from_the_current_folder(hostile, root, start, empty):
    options = {"variable": f"{root}{os.pathsep}" if empty else str(root)} | ({"start": start} if start else {})
    assert hostile("models", **options)[0] == 0


def test_check_runs_no_file_of_the_current_folder(hostile):
    assert hostile("check", "torchax")[:2] == (0, "clean\n")


@pytest.mark.slow
def test_check_of_a_model_runs_no_file_of_the_current_folder(hostile):
    assert hostile("check", "--model", "hunyuan")[:2] == (0, "clean\n")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, ("plan", "--model", "hunyuan", "--config", "configs/720p.yaml")),
        ("attention_tiles.py", ("--topology", "v6e:2x4", "--tokens", "256", "--heads", "2", "--head-size", "128")),
    ],
    ids=["plan", "attention_tiles"],
)
def test_a_command_that_compiles_runs_no_file_of_the_current_folder(hostile, root, script, words, monkeypatch):
    monkeypatch.setenv(*BAD_FLAG)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # or the parent, which looks for the chip, reads the flag first
    options = {"start": (str(root / "benchmarks" / script),)} if script else {}
    code, out, err = hostile(*words, **options)
    assert (code, out) == (2, "") and err.splitlines()[-1].startswith("error[TP502] ")
    assert "ended with exit code 1 and said: ERROR: Unknown command line flag 'no_such_flag'. " in err
