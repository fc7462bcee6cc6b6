"""The guide's Python blocks run; its shell blocks say what they need."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "MIGRATION_GUIDE.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def lines(text):
    return text.splitlines()[0][:60]


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "python"], ids=lines)
def test_a_python_block_runs(code):
    exec(compile(code, str(GUIDE), "exec"), {"__name__": "guide"})


def test_a_python_block_that_fails_is_seen(tmp_path):
    """Or a block whose assertion was optimised away would pass for ever."""
    wrong = BLOCKS_OF["python"][0].replace('== "flash"', '== "mine"')
    done = subprocess.run([sys.executable, "-c", wrong], capture_output=True, text=True)
    assert done.returncode == 1 and "AssertionError" in done.stderr


BLOCKS_OF = {kind: [code for found, code in BLOCKS if found == kind] for kind in {kind for kind, _ in BLOCKS}}


def test_a_shell_block_says_what_it_needs():
    assert BLOCKS_OF["sh"]
    for code in BLOCKS_OF["sh"]:
        assert re.match(r"# needs: (checkout|tpu)\n", code), code


def test_every_config_that_the_guide_names_is_there():
    for name in re.findall(r"configs/[\w/]+\.yaml", GUIDE.read_text(encoding="utf-8")):
        assert (GUIDE.parent / name).is_file(), name
