"""`torchport exec`: somebody else's script, which cannot see that it does not run alone, but for its patches."""

import os
import re
import signal
import subprocess
import sys

import pytest
from fakes.plain_script import PlainScript

from torchport.errors import BadValueError, UnknownNameError
from torchport.own_code.script_process import Flags, axes_of, run


@pytest.fixture
def here(tmp_path):
    return PlainScript(tmp_path)


LOOKS = """
import json, os, sys, __main__
from up.m import answer
print(json.dumps([
    sys.argv, __name__, __file__, __main__.__dict__ is globals(), sys.path, __spec__ and __spec__.name,
    sorted(name for name in os.environ if name != "TORCHPORT_APPLIED"), os.environ.get("PYTHONPATH"),
    "torch" in sys.modules,  # a second and a half that a script does not want before it asks for it
]))
print(answer())
"""


def test_a_script_sees_what_it_would_see_alone_and_its_patches(here):
    here.write("script.py", LOOKS)
    arguments = ("script.py", "--model", "mine", "-h", "a b", "--")
    alone, under = here.plainly(*arguments), here.run(*arguments)
    assert (alone.returncode, under.returncode, under.stderr) == (0, 0, "")
    seen, answer = under.stdout.splitlines()
    assert [seen, "upstream"] == alone.stdout.splitlines() and answer == "patched"


def test_a_module_is_run_as_python_runs_it(here):
    here.write("tool/__init__.py", "")
    here.write("tool/run.py", LOOKS)
    alone, under = here.plainly("-m", "tool.run", "-m", "x"), here.run("-m", "tool.run", "-m", "x")
    assert under.returncode == 0, under.stderr
    assert under.stdout.replace("patched", "upstream") == alone.stdout and "patched" in under.stdout


def test_a_folder_with_a_main_is_run_as_python_runs_it(here):
    here.write("app/__main__.py", "import sys, up.m\nprint(sys.argv, __name__, sys.path[0])\n")
    (here.root / "up").rename(here.root / "app" / "up")
    assert here.run("app", "x").stdout == here.plainly("app", "x").stdout != ""


@pytest.mark.parametrize(
    "line",
    ["raise SystemExit(7)", "raise SystemExit('no')", "import os; os._exit(9)", "1 / 0", "def f(:", "import no_such"],
)
def test_exit_code_and_traceback_are_the_scripts_own(here, line):
    here.write("script.py", f"import up.m\ndef call():\n    {line}\ncall()\n")
    alone, under = here.plainly("script.py"), here.run("script.py")
    assert (under.returncode, under.stdout, under.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert "torchport" not in under.stderr and alone.returncode


def test_what_a_script_does_at_its_end_is_done_under_its_patches(here):
    here.write("script.py", "import atexit\nfrom up import m\natexit.register(lambda: print(m.answer()))\n")
    assert here.run("script.py").stdout == "patched\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_the_scripts_own(here, number):
    code = "import up.m, time\nprint('ready', flush=True)\ntime.sleep(60)\n"
    here.write("script.py", code)
    ends = []
    default = f"import os, signal, sys; signal.signal({number:d}, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    for command in ([sys.executable, "script.py"], here.command("script.py")):
        command = [
            sys.executable,
            "-c",
            default,
            *command,
        ]  # a shell's background job ignores SIGINT, and hands that on
        process = subprocess.Popen(
            command, cwd=here.root, env=here.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=600)
        ends.append((process.returncode, err.splitlines()[-1:]))
    assert ends[0] == ends[1] and ends[1][0] == -number


def test_a_script_has_its_own_handler_of_a_signal(here):
    handler = "import os, signal, up.m\nsignal.signal(signal.SIGINT, lambda *_: print('mine'))\n"
    here.write("script.py", handler + "os.kill(os.getpid(), signal.SIGINT)\n")
    done = here.run("script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")


def test_standard_input_is_the_scripts(here):
    here.write("script.py", "import sys, up.m\nprint(sys.stdin.read())\n")
    done = subprocess.run(
        here.command("script.py"), cwd=here.root, env=here.environment(), input="words", capture_output=True, text=True
    )
    assert done.stdout == "words\n"


def test_the_sitecustomize_of_an_installation_is_imported_as_without(here):
    here.write("own/sitecustomize.py", "import sys\nsys.mine = __file__\n")
    here.write("script.py", "import sys, up.m\nprint(sys.mine, sys.modules['sitecustomize'].__file__)\n")
    path = os.pathsep.join([str(here.root / "own"), here.environment()["PYTHONPATH"]])
    alone, under = here.plainly("script.py", PYTHONPATH=path), here.run("script.py", PYTHONPATH=path)
    assert under.stdout == alone.stdout and "own" in alone.stdout


@pytest.mark.parametrize(("words", "is_said"), [(["--help"], False), (["-h"], False), (["-h", "64"], True)])
def test_a_script_that_prints_its_help_is_not_blamed_for_using_nothing(here, words, is_said):
    here.write("script.py", "import sys\nprint(sys.argv[1:])\n")
    done = here.run("script.py", *words)
    assert (done.returncode, done.stdout) == (0, f"{words}\n") and ("TP216" in done.stderr) == is_said


def test_patches_that_changed_nothing_are_named_at_the_end(here):
    here.write("script.py", "print('nothing of upstream')\nraise SystemExit(3)\n")
    done = here.run("script.py")
    assert (done.returncode, done.stdout) == (3, "nothing of upstream\n")
    assert done.stderr == (
        "error[TP216] torchport: None of the patches of 'small' was applied: nobody imported up.m. Name the model of "
        "the code that runs, or leave its patches out.\n"
    )


def test_a_second_copy_of_a_patched_module_is_named_at_the_end(here):
    here.write("script.py", "import sys\nsys.path.insert(0, 'up')\nimport m, up.m\nprint(m.answer(), up.m.answer())\n")
    done = here.run("script.py")
    assert (done.returncode, done.stdout) == (0, "upstream patched\n")
    file = here.root / "up" / "m.py"
    assert f"{file} was imported twice, as 'up.m' and as 'm', and 'up.answer' changes the first alone." in done.stderr
    assert done.stderr.startswith("error[TP215]") and f"Take {here.root / 'up'} off sys.path" in done.stderr


def test_a_patched_module_that_is_run_and_imported_is_named_at_the_end(here):
    here.write("up/m.py", "def answer():\n    return 'upstream'\nif __name__ == '__main__':\n    import up.m\n")
    done = here.run("-m", "up.m")
    assert "as 'up.m' and as '__main__'" in done.stderr
    assert "Start it from a script of its own, which imports 'up.m'." in done.stderr


def test_a_patch_that_does_not_fit_ends_the_process_before_the_script(here):
    here.write("up/m.py", "def other():\n    return 'upstream'\n")
    here.write("script.py", "print('begun')\n")
    done = here.run("script.py")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error[TP201] ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "torchport exec: No script is named. Add it: -- script.py ARGS, or -- -m package.module ARGS."),
        (("-m",), "torchport exec: No script is named."),
        (("-c", "x"), "torchport exec: '-c' is no script, and Python's own flags are not taken."),
        (("no.py",), "torchport exec no.py: There is no such file. Name the script that is to run."),
    ],
)
def test_a_command_line_without_a_script_is_refused(tmp_path, monkeypatch, words, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadValueError, match=f"^{re.escape(text)}"):
        run(Flags("small", words))


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=0", "xp=2", "dp=2,dp=2", "dp=2,", "", "dp=two"])
def test_a_mesh_that_is_none_is_refused(text):
    with pytest.raises(BadValueError, match=r"is no axis with its size\. Write it as dp=2,tp=4\.$"):
        axes_of(text)


def test_a_mesh_is_read():
    assert axes_of("dp=2,tp=4") == {"dp": 2, "tp": 4} and axes_of(None) is None


@pytest.mark.parametrize("flag", ["strategy", "mesh", "machine", "attention"])
def test_the_original_takes_no_flag_of_a_compiler(tmp_path, flag):
    script = tmp_path / "script.py"
    script.touch()
    value = {"mesh": "tp=2", "machine": "cpu:8"}.get(flag, "some")
    with pytest.raises(BadValueError, match=f"^--{flag} {value}: --backend original compiles nothing"):
        run(Flags("small", (str(script),), backend="original", **{flag: value}))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"strategy": "tpp"}, "--strategy tpp: The card of 'wan' has no such strategy. Did you mean 'tp'? Known: "),
        ({"attention": "flash"}, "--attention flash: There is no such implementation. "),
    ],
)
def test_names_that_are_read_late_are_refused_before_the_script(tmp_path, flags, text):
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(UnknownNameError, match=f"^{re.escape(text)}"):
        run(Flags("wan", (str(script),), **flags))
