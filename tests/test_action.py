"""The GitHub Action, run step by step as its file says, on a pack in another repository; the pre-commit hook."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from fakes import sarif

from torchport.commands import patches
from torchport.config.checkout import on_path

ROOT = Path(__file__).resolve().parent.parent
ENTRY = """\
- id: up.one
  target: up.m:f
  replace: p.py:new
  why: A test.
  reported: "none: a test"
  until: never
  fits: {up: "*"}
  equivalence: bitwise
"""
STUB = '#!/bin/sh\nprintf "%s\\n" "$*" >> "$CALLS"\n'
GH = (
    STUB
    + 'case "$*" in *list*) printf "$OPEN";; *--body-file*) for last; do :; done; cp "$last" "$CALLS.body";; esac\n'
)


class Runner:
    """A repository with a pack, an upstream beside it, and what GitHub gives to the steps of an action."""

    def __init__(self, folder: Path) -> None:
        self.repository, self.site, self.temporary = (folder / name for name in ("repository", "site", "temp"))
        (self.repository / ".git").mkdir(parents=True)
        (self.repository / "port" / "configs" / "models").mkdir(parents=True)
        (self.repository / "port" / "patches" / "up").mkdir(parents=True)
        self.temporary.mkdir()
        self.write("p.yaml", ENTRY)
        self.write("p.py", "def new(a): return 'new'\n")
        self.upstream("def f(a):\n    return 1\n")
        self.calls = folder / "calls"
        self.commands = folder / "bin"
        self.commands.mkdir()
        self.output: dict[str, str] = {}
        self.command("gh", GH)

    def write(self, file: str, text: str) -> None:
        (self.repository / "port" / "patches" / "up" / file).write_text(text)

    def upstream(self, text: str) -> None:
        (self.site / "up").mkdir(parents=True, exist_ok=True)
        (self.site / "up" / "__init__.py").write_text("raise SystemExit('imported')\n")
        (self.site / "up" / "m.py").write_text(text)

    def command(self, name: str, text: str) -> None:
        (self.commands / name).write_text(text)
        (self.commands / name).chmod(0o755)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.commands), str(Path(sys.executable).parent), os.environ["PATH"]])
        python = os.pathsep.join([str(ROOT), str(self.site)])
        return {**os.environ, "PATH": path, "PYTHONPATH": python, "CALLS": str(self.calls), "OPEN": ""}

    def step(self, step: dict, inputs: dict[str, str], more: dict[str, str]) -> int:
        """Runs one `run:` step as GitHub does; returns its exit code."""
        files = {name: self.temporary / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        variables = {name: self.filled(value, inputs) for name, value in step.get("env", {}).items()}
        environment = {**self.environment(), **{k: str(v) for k, v in files.items()}, **variables, **more}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, cwd=self.repository, env=environment, capture_output=True, text=True)
        self.printed = done.stdout + done.stderr
        if files["GITHUB_OUTPUT"].exists():
            self.output = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
        return done.returncode

    def filled(self, text: str, inputs: dict[str, str]) -> str:
        """Returns a text with every `${{ ... }}` replaced."""
        return re.sub(r"\$\{\{ *([^}]+?) *\}\}", lambda match: self.value(match[1], inputs), text)

    def value(self, name: str, inputs: dict[str, str]) -> str:
        contexts = {f"inputs.{key}": value for key, value in inputs.items()}
        contexts |= {f"steps.check.outputs.{key}": value for key, value in self.output.items()}
        contexts |= {"github.action_path": str(ROOT), "runner.temp": str(self.temporary)}
        contexts |= {"github.repository": "somebody/pack", "github.token": "a token"}
        return contexts[name]

    def is_due(self, condition: str, inputs: dict[str, str]) -> bool:
        """Returns whether an `if:` of comparisons holds."""
        parts = [re.fullmatch(r"(\S+) (==|!=) '(.*)'", part.strip()) for part in condition.split("&&")]
        return all((self.value(part[1], inputs) == part[3]) == (part[2] == "==") for part in parts)

    def run(self, more=(), **chosen: str) -> tuple[int, list[str]]:
        """Runs the action with some inputs; returns its exit code and the names of the steps that are due."""
        action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
        assert set(chosen) <= set(action["inputs"])
        inputs = {name: field["default"] for name, field in action["inputs"].items()} | chosen
        inputs = {name: self.filled(value, {}) for name, value in inputs.items()}
        done = []
        for step in action["runs"]["steps"]:
            if not self.is_due(step["if"], inputs) if "if" in step else False:
                continue
            done.append(step["name"])
            if "uses" in step:
                files = [
                    self.filled(value, inputs) for key, value in step["with"].items() if key in ("sarif_file", "path")
                ]
                assert all(Path(file).exists() for file in files), files
            elif code := self.step(step, inputs, dict(more)):
                return code, done
        return 0, done

    def lock(self) -> None:
        with on_path(self.site):
            assert patches.lock(self.repository / "port" / "patches") == ["up.m:f: new"]


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


@pytest.fixture
def drifted(runner):
    """A pack whose upstream changed after its patch was locked."""
    runner.lock()
    runner.upstream("def f(a):\n    return 10\n")
    return runner


def test_a_drifted_patch_ends_the_action_with_3_and_all_reports(drifted):
    code, steps = drifted.run(path="port", install="false")
    assert (code, steps) == (3, ["Check", "Upload SARIF", "Upload reports", "Result"])
    assert drifted.output["exit-code"] == "3"
    reports = Path(drifted.output["reports"])
    document = json.loads((reports / "check.sarif").read_text())
    sarif.check(document)
    assert [result["ruleId"] for result in document["runs"][0]["results"]] == ["TP207"]
    suites = ElementTree.parse(reports / "check.xml").getroot()
    assert (suites.get("failures"), len(suites.findall(".//testcase"))) == ("1", 3)
    text = (reports / "check.txt").read_text().strip()
    assert text.endswith("\n1 finding")
    assert (drifted.temporary / "GITHUB_STEP_SUMMARY").read_text() == f"```text\n{text}\n```\n"


def test_drift_opens_an_issue_with_the_change_and_the_patch(drifted):
    code, steps = drifted.run(path="port", install="false", issue="true")
    assert (code, steps[-2:]) == (3, ["Open an issue", "Result"])
    listed, created = drifted.calls.read_text().splitlines()
    assert listed.startswith("issue list --state open")
    assert created.startswith("issue create --title torchport check: an upstream has changed --body-file ")
    first, finding, *rest = Path(f"{drifted.calls}.body").read_text().splitlines()
    assert (first, rest) == ("```text", ["1 finding", "```"])
    assert "patches/up/p.yaml:1: TP207 " in finding and "'up.one'" in finding and "line 2 is new: return 10" in finding


def test_an_issue_that_is_open_is_updated(drifted):
    assert drifted.run({"OPEN": "12"}, path="port", install="false", issue="true")[0] == 3
    assert drifted.calls.read_text().splitlines()[1].startswith("issue edit 12 --body-file ")


def test_a_clean_pack_opens_no_issue_and_ends_with_0(runner):
    runner.lock()
    code, steps = runner.run(path="port", install="false", issue="true", names="up/p")
    assert (code, steps) == (0, ["Check", "Upload SARIF", "Upload reports", "Result"])
    assert not runner.calls.exists()


def test_an_input_that_is_wrong_ends_the_action_with_2_and_uploads_nothing(runner):
    assert runner.run(path="nowhere", install="false", issue="true") == (2, ["Check", "Result"])


def test_torchport_is_installed_without_torch_where_nothing_is_imported(runner):
    runner.command("python", STUB)
    runner.command("torchport", "#!/bin/sh\nexit 2\n")
    runner.run(static="true")
    runner.run(static="false")
    assert runner.calls.read_text().splitlines() == [
        f"-m pip install --requirement {ROOT}/tools/static.txt",
        f"-m pip install --no-deps {ROOT}",
        f"-m pip install {ROOT}",
    ]


def test_what_the_action_installs_is_what_the_package_asks_for(root):
    wanted = [line for line in (root / "tools" / "static.txt").read_text().splitlines() if not line.startswith("#")]
    written = (root / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[0]
    assert wanted and all(f'"{line}"' in written for line in wanted)


def test_the_pre_commit_hook_runs_on_a_pack(drifted):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert re.match(hook["files"], "patches/up/p.yaml") and re.match(hook["files"], "configs/models/m.yaml")
    command = [*shlex.split(hook["entry"]), *hook["args"]]
    folder = drifted.repository / "port"
    done = subprocess.run(command, cwd=folder, env=drifted.environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines()[0].startswith("patches/up/p.yaml:1: TP207 up.m:f is not what 'up.one'")
