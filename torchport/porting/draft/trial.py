"""The test of a patch before it is filled in: upstream's result with the patch and without it must agree.

A test fails until the patch and its own arguments are filled in. It has a file of its own.
"""

from __future__ import annotations

import ast
import dataclasses

from torchport.porting.draft.target import Target, parameters

_HEAD = '''"""{title}

It fails until it is filled in. Run it with upstream on the path:
PYTHONPATH=UPSTREAM pytest {file}
"""

{imports}

PACK = Path(__file__).parents[1]
ID = "{id}"


def entry():
    """Returns the patch."""
    (one,) = [one for one in patch.read(PACK / "patches", ["{names}"]) if one.id == ID]
    return one

'''

_IMPORTS = """\
import importlib
from pathlib import Path

import torch

from torchport import patch"""
_OF_STUB = _IMPORTS.replace("import torch\n\n", "")
_OF_LOWERING = """\
from pathlib import Path

import jax.numpy as jnp
import numpy
import torch

from torchport import engine, patch
from torchport.config.pack import find_pack"""

_AGREE = """
def test_{name}_computes_what_upstream_does():
    one = entry()
    with patch.applied([one]) as ledger:
        ours = result()
    assert ledger.rows()[0]["calls"], "result() does not call the patch"
    exact = {{"rtol": 0, "atol": 0}} if one.equivalence.bitwise else {{}}
    torch.testing.assert_close(ours, result(), **exact)
"""

_CALL = '''
def arguments(module):
    """Fill in: returns the arguments of one call, those by position and those by name.

    {takes}
    """
    raise NotImplementedError("fill in the arguments of a call")


def result():
    """Returns what a call gives, of upstream's code or of the patch, whichever is in force."""
    torch.manual_seed(0)
    module = importlib.import_module("{module}")
    args, kwargs = arguments(module)
    return {call}

'''

_BUILD = '''
def result():
    """Fill in: builds an object of the class, and returns what it computes."""
    torch.manual_seed(0)
    module = importlib.import_module("{module}")
    raise NotImplementedError(f"fill in what an object of {{module.__name__}}.{path} computes")

'''

_LOWERING = '''
def arguments():
    """Fill in: returns the arguments of one call, those by position and those by name."""
    raise NotImplementedError("fill in the arguments of a call")


def test_{name}_computes_what_torch_does():
    one, (args, kwargs) = entry(), arguments()
    arrays = [jnp.asarray(value.numpy()) if isinstance(value, torch.Tensor) else value for value in args]
    torchax = patch.read(find_pack([str(PACK)]).folders, ["torchax"])
    with patch.applied([*torchax, one]) as ledger, engine.operators({{op.target: op.function for op in ledger.ops()}}):
        ours = engine.call_torch({operator}, *arrays, **kwargs)
    assert [row["calls"] for row in ledger.rows() if row["id"] == one.id] != [0], "the patch is not called"
    torch.testing.assert_close(torch.from_numpy(numpy.array(ours)), {operator}(*args, **kwargs))
'''

_STUB = """
def test_{module_name}_is_imported_without_{package}():
    with patch.applied([entry()]):
        importlib.import_module("{module}")
"""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a test is of.

    Attributes:
        id: The entry's id.
        names: The file of entries, as a card lists it.
        name: The name of the function that is filled in.
        file: The test's file, by its path in the pack.
    """

    id: str
    names: str
    name: str
    file: str

    def text(self, title: str, imports: str, body: str) -> str:
        """Returns the file of a test."""
        return _HEAD.format(title=title, file=self.file, imports=imports, names=self.names, id=self.id) + body


def agreement(trial: Trial, target: Target) -> str:
    """Returns the test of a function or class that is replaced, wrapped or rewritten."""
    path = ".".join(target.path)
    end = _AGREE.format(name=trial.name)
    title = f"{path} with the patch '{trial.id}' and without it."
    if target.kind == "class" or target.path[-1] in ("__init__", "__new__"):
        made = path.removesuffix(".__init__").removesuffix(".__new__")
        return trial.text(title, _IMPORTS, _BUILD.format(module=target.module, path=made) + end)
    body = _CALL.format(module=target.module, takes=_takes(target), call=_call(target)) + end
    return trial.text(title, f"import asyncio\n{_IMPORTS}" if target.is_async else _IMPORTS, body)


def _takes(target: Target) -> str:
    """Returns in words what the arguments are."""
    assert not isinstance(target.node, ast.ClassDef)
    names = parameters(target.node).names
    if target.kind == "property":
        return "By position there is the object alone."
    if target.kind == "class method":
        names = names[1:]
    first = " The first one is the object." if target.kind == "method" else ""
    return f"It takes ({', '.join(names)}).{first}"


def _call(target: Target) -> str:
    """Returns a call of a target as Python."""
    if target.kind == "property":
        return f"args[0].{target.path[-1]}"
    call = f"module.{'.'.join(target.path)}(*args, **kwargs)"
    if target.is_async:
        return f"asyncio.run({call})"
    return f"list({call})" if target.is_generator else call


def lowering(trial: Trial, operator: str) -> str:
    """Returns the test of an `op`."""
    body = _LOWERING.format(name=trial.name, operator=operator)
    return trial.text(f"{operator} as '{trial.id}' lowers it, and as torch computes it.", _OF_LOWERING, body)


def stub(trial: Trial, module: str, package: str) -> str:
    """Returns the test of a `stub`."""
    body = _STUB.format(module_name=module.replace(".", "_"), module=module, package=package)
    return trial.text(f"{module} is imported where {package} is not installed.", _OF_STUB, body)
