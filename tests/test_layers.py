"""The floors and the house rules, and that the checker of both can fail."""

import json
import os
import subprocess
import sys

import layers
import pytest

CLEAN = '"""A module."""\n'


def test_torchport_keeps_the_house_rules(root):
    assert layers.complaints(root / "torchport") == []


def test_every_floor_of_the_design_is_inhabited_or_to_come(root):
    units = {layers.unit(name) for name, *_ in layers.modules(root / "torchport")} - {""}
    assert {"errors", "config", "card", "patch", "load", "shard", "compile", "task", "run", "__main__"} <= units
    assert not [unit for unit in units if layers.floor(unit) is None]


def test_the_paths_that_matter_are_the_ones_checked(root):
    found = {name: tree for name, _, _, tree in layers.modules(root / "torchport")}
    run = {layers.own(target, set(found)) for _, target in layers.imports(found["run"])}
    assert {"compile", "load", "patch", "journey", "shard", "task", "errors"} <= run
    assert "torchport.run.Summary" in {target for _, target in layers.imports(found["__main__"])}


@pytest.fixture
def fake(tmp_path):
    """Writes a fake torchport and returns what the checker says about it."""

    def write(**files):
        package = tmp_path / "torchport"
        for name, text in {"__init__": CLEAN, **files}.items():
            file = package / f"{name.replace('__in__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if text.startswith(('"""', "#!")) else CLEAN + text)
        return layers.complaints(package)

    return write


def test_a_clean_package_gets_no_complaint(fake):
    assert fake(errors="x = 1\n", card="from torchport.errors import x\nimport torchport\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "from torchport import run\n",
        "import torchport.run\n",
        "from torchport.run import x\n",
        "def f():\n    from torchport.run import x\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torchport import run\n",
        "try:\n    import torchport.run as r\nfinally:\n    pass\n",
    ],
)
def test_an_import_of_a_floor_above_is_found_wherever_it_stands(fake, text):
    found = fake(run="x = 1\n", shard=text)
    assert len(found) == 1 and "floor 3 imports 'run' of floor 7" in found[0]
    assert found[0].startswith("shard.py:")


def test_an_import_beside_is_found(fake):
    assert fake(tiny="x = 1\n", shard="from torchport.load.tiny import x\n") == [
        "shard.py:2: floor 3 imports 'tiny' of floor 3"
    ]


def test_one_command_cannot_import_another(fake):
    assert (
        "floor 8 imports 'doctor' of floor 8"
        in fake(doctor="x = 1\n", tune="from torchport.commands.doctor import x\n")[0]
    )


def test_the_package_itself_imports_none_of_its_modules_at_module_level(fake):
    assert fake(errors="x = 1\n", __init__="def f():\n    from torchport import errors\n") == []
    assert "floor 0 imports 'errors'" in fake(errors="x = 1\n", __init__="from torchport import errors\n")[0]


def test_a_module_without_a_floor_is_found(fake):
    assert fake(stranger="x = 1\n") == ["stranger.py:1: 'stranger' has no floor"]


def test_a_relative_import_is_found(fake):
    assert "'.errors.x' is relative" in fake(errors="x = 1\n", card="from .errors import x\n")[0]


def test_modules_of_one_folder_may_import_one_another_but_not_in_a_circle(fake):
    fine = {
        "patch__in____init__": "x = 1\n",
        "patch__in__a": "from torchport.patch import b\n",
        "patch__in__b": "x = 1",
    }
    assert fake(**fine) == []
    circle = {**fine, "patch__in__b": "def f():\n    from torchport.patch.a import x\n"}
    assert fake(**circle) == ["patch.a -> patch.b -> patch.a is a cycle"]


@pytest.mark.parametrize("name", ["diffusers", "transformers", "hyvideo", "torchax", "accelerate", "anything_else"])
def test_an_upstream_at_module_level_is_found(fake, name):
    complaint = f"'{name}' is imported at module level"
    assert f"load.py:2: {complaint}" in fake(load=f"import {name}.x\n")
    assert f"load.py:3: {complaint}" in fake(load=f"class A:\n    from {name} import x\n")
    assert not any(complaint in found for found in fake(load=f"def f():\n    import {name}\n"))


@pytest.mark.parametrize("heavy", ["torch", "jax"])
@pytest.mark.parametrize("module", ["errors", "config", "progress", "scan", "__main__", "patch__in__entry"])
def test_torch_and_jax_are_found_in_light_modules_even_inside_functions(fake, module, heavy):
    unit = module.partition("__in__")[0] or module
    found = fake(**{"patch__in____init__": CLEAN, module: f"def f():\n    import {heavy}.x\n"})
    assert len(found) == 1 and found[0].endswith(f"'{unit}' imports {heavy}")


@pytest.mark.parametrize("name", ["utils", "core", "common", "helpers", "base", "manager"])
def test_a_module_named_after_no_noun_is_found(fake, name):
    assert any(f"a module is named '{name}'" in complaint for complaint in fake(**{f"patch__in__{name}": CLEAN}))


def test_a_module_without_a_docstring_is_found(fake):
    assert fake(card="#! no docstring\nx = 1\n") == ["card.py:1: the module has no docstring"]


def test_long_functions_and_modules_are_found(fake):
    body = "    x = 1\n"
    assert fake(card="def f():\n" + body * 59 + "".join(f"def g{n}():\n{body}" for n in range(3))) == []
    assert fake(card="def f():\n" + body * 60 + "".join(f"def g{n}():\n{body}" for n in range(3))) == [
        "card.py:2: 'f' has 61 lines"
    ]
    assert fake(card="def f():\n" + body * 15) == ["the median function has 16 lines"]
    assert fake(card="x = 1\n" * 399) == []
    assert fake(card="x = 1\n" * 400) == ["card.py:1: the module has 401 lines"]


@pytest.mark.parametrize("caught", ["", " Exception", " BaseException as e", " (ValueError, Exception)"])
def test_a_handler_that_swallows_everything_is_found(fake, caught):
    assert fake(card=f"try:\n    x = 1\nexcept{caught}:\n    x = 2\n") == ["card.py:4: a handler catches everything"]


def test_a_handler_that_tidies_up_and_raises_again_is_fine(fake):
    assert fake(card="try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise\n") == []
    assert fake(card="try:\n    x = 1\nexcept ValueError:\n    x = 2\n") == []


def test_print_is_found_outside_the_command_line(fake):
    assert fake(card="print(1)\n", __main__="print(1)\n") == ["card.py:2: print outside the command line"]


@pytest.mark.parametrize(
    "text",
    [
        "import subprocess\n",
        "def f():\n    from subprocess import run\n",
        "import multiprocessing.pool\n",
        "from concurrent.futures import ProcessPoolExecutor\n",
        "import os\nos.system('ls')\n",
        "import os\nos.execvp('ls', [])\n",
        "from os import posix_spawn\n",
    ],
)
def test_a_process_is_started_in_one_folder_alone(fake, text):
    found = fake(card=text, processes__in____init__=CLEAN)
    assert len(found) == 1 and found[0].endswith("starts processes, and that is for 'processes' alone")
    assert fake(card="x = 1\n", processes__in__child=text) == []


@pytest.mark.parametrize("word", ["TODO", "FIXME"])
def test_notes_to_oneself_are_found(fake, word):
    assert fake(card=f"x = 1  # {word}: later\n") == [f"card.py:2: {word}"]


@pytest.mark.parametrize("word", ["hunyuan", "HunyuanVideo15", "cogvideox", "wan", "WAN"])
def test_one_models_name_is_found_outside_pipelines(fake, word):
    assert fake(card=f"x = '{word}'\n", pipelines__in__some="x = 'hunyuan'\n", pipelines__in____init__=CLEAN) == [
        f"card.py:2: '{word[:7] if word.lower().startswith('hunyuan') else word.removesuffix('x')}' is one model's name"
    ]
    assert fake(card="x = 'what we want, wanted'\n") == []
    assert fake(card=f'"""A module.\n\n    torchport run --model {word}\n"""\n') == []


def python(root, code, cwd=None):
    """Runs Python in a new process with this checkout's torchport, and returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_light_modules_run_where_torch_and_jax_are_missing(root):
    wanted = [f"torchport.{name}" for name in ("errors", "config", "progress", "processes", "patch", "__main__")]
    code = f"""
import importlib, json, sys
for name in {wanted}:
    importlib.import_module(name)
print(json.dumps([name for name in {sorted(layers.HEAVY)} if name in sys.modules]))
"""
    assert json.loads(python(root, code)) == []


def test_help_imports_nothing_heavy(root):
    code = """
import sys
sys.argv = ["torchport", "--help"]
from torchport import __main__
try:
    __main__.main()
except SystemExit as stop:
    assert not stop.code
print([name for name in ("torch", "jax", "pydantic", "yaml", "numpy", "diffusers") if name in sys.modules])
"""
    lines = python(root, code).splitlines()
    assert lines[0].startswith("Usage: torchport") and lines[-1] == "[]"


def test_nothing_happens_when_every_module_is_imported(root, tmp_path):
    names = [
        f"torchport.{name}".rstrip(".")
        for name, *_ in layers.modules(root / "torchport")
        if layers.unit(name) != "__main__"
    ]
    code = f"""
import importlib, json, os, sys
import torch, jax, click
before, cwd, path = dict(os.environ), os.getcwd(), list(sys.path)
for name in {names}:
    importlib.import_module(name)
changed = {{key for key in {{*before, *os.environ}} if before.get(key) != os.environ.get(key)}}
upstream = [name for name in ("torchax", "diffusers", "transformers", "hyvideo") if name in sys.modules]
hooks = [finder for finder in sys.meta_path if "torchport" in type(finder).__module__]
print(json.dumps([sorted(changed), upstream, len(hooks), os.getcwd() == cwd, sys.path == path]))
"""
    before = {
        path: path.stat().st_mtime_ns for path in (root / "torchport").rglob("*") if "__pycache__" not in str(path)
    }
    cache = tmp_path / "cache"
    assert json.loads(python(root, code, cwd=tmp_path)) == [[], [], 0, True, True]
    assert not list(tmp_path.iterdir()) and not cache.exists()
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before


def test_the_package_says_that_it_is_typed(root):
    assert (root / "torchport" / "py.typed").is_file()
