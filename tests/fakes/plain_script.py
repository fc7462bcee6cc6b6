"""A package `up` of plain Python, and a pack whose one patch changes it: for scripts that start in a second."""

import os
import subprocess
import sys
import textwrap

from fakes.small_port import CARD

ENTRY = """\
- id: up.answer
  target: up.m:answer
  replace: p.py:patched
  plumbing: true
  why: A test.
  reported: "none: a test"
  until: never
  fits: {up: "*"}
  equivalence: bitwise
"""


class PlainScript:
    """A folder with `pack`, and with `up` beside the script."""

    def __init__(self, root) -> None:
        self.root = root
        self.write("pack/configs/models/small.yaml", CARD.replace("denoise: []", "denoise: [up/p]"))
        self.write("pack/patches/up/p.yaml", ENTRY)
        self.write("pack/patches/up/p.py", "def patched():\n    return 'patched'\n")
        self.write("up/__init__.py", "")
        self.write("up/m.py", "def answer():\n    return 'upstream'\n")

    def write(self, file, text):
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def command(self, *words, flags=("--backend", "original")):
        """Returns the command line that runs a script under the patches."""
        flags = ["--model", "small", "--path", str(self.root / "pack"), *flags]
        return [sys.executable, "-m", "torchport", "exec", *flags, "--", *map(str, words)]

    def environment(self, **more):
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return {**variables, "PYTHONPATH": os.pathsep.join(["", *map(str, PATHS)]).strip(os.pathsep), **more}

    def run(self, *words, flags=("--backend", "original"), **more):
        """Runs a script under the patches; returns the process, with what it wrote."""
        command = self.command(*words, flags=flags)
        return subprocess.run(
            command, cwd=self.root, env=self.environment(**more), capture_output=True, text=True, timeout=6000
        )

    def plainly(self, *words, **more):
        """Runs the same script with Python alone."""
        return subprocess.run(
            [sys.executable, *map(str, words)], cwd=self.root, env=self.environment(**more), capture_output=True,
            text=True, timeout=6000,
        )  # fmt: skip


PATHS = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]  # noqa: PTH100, PTH120
