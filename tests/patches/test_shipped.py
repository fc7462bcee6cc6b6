"""Every patch that is shipped: its set is applied and undone in a fresh process, and nothing of it is left."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from torchport import patch
from torchport.patch.declared.versions import outcome

ROOT = Path(patch.__file__).parents[2]
PATCHES = ROOT / "patches"

# Imports the targets, forces what torch makes on demand, and prints all namespaces in plain values. Functions are told
# by their code and place, containers by their items, other objects by their type: ids mean nothing across processes.
_SNAPSHOT = """
import contextlib, importlib, json, sys, types

def contents(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return "an empty cell"

def shape(thing, depth=0):
    kind = type(thing)  # isinstance() would ask some of torch's objects for their __class__
    if kind is types.FunctionType:
        code = thing.__code__
        inner = [shape(contents(c), depth + 1) for c in thing.__closure__ or ()] if depth < 3 else []
        return [thing.__module__, thing.__qualname__, code.co_filename, code.co_firstlineno, len(code.co_code), inner]
    if kind in (staticmethod, classmethod):
        return [kind.__name__, shape(thing.__func__, depth + 1)]
    if kind is property:
        return ["property", shape(thing.fget, depth + 1)]
    if issubclass(kind, type):
        return ["class", thing.__module__, thing.__qualname__]
    if issubclass(kind, types.ModuleType):
        return ["module", thing.__name__]
    if kind in (str, int, float, bool, type(None)):
        return repr(thing)[:200]
    if kind is dict and depth < 3:
        return ["dict", sorted(([shape(k, 3), shape(v, depth + 1)] for k, v in list(thing.items())), key=repr)]
    if kind in (list, tuple) and depth < 3:
        return [kind.__name__, [shape(item, depth + 1) for item in thing]]
    return kind.__qualname__

def namespaces(roots):
    result = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in roots and isinstance(module, types.ModuleType):
            names = types.ModuleType.__dict__["__dict__"].__get__(module)
            own = ("__builtins__", "__cached__", "__warningregistry__")
            kept = {k: v for k, v in list(names.items()) if k not in own}
            result[name] = {k: shape(v) for k, v in kept.items()}
            for value in kept.values():
                if issubclass(type(value), type) and value.__module__ == name:
                    inside = type.__dict__["__dict__"].__get__(value)
                    result[name + ":" + value.__qualname__] = {k: shape(v) for k, v in list(inside.items())}
    return result

def use(names):
    for name in names:
        if not name.startswith("torchax"):
            importlib.import_module(name)

with contextlib.suppress(ImportError):
    import torch  # here, as it keeps the stack of its import in a name
"""

_PATCHED = """
from torchport import patch
entries = patch.read(FOLDER, UPSTREAMS)
with patch.applied(entries) as ledger:
    use(TARGETS)
rows = ledger.rows()
again = []
with patch.applied(entries) as ledger:  # a second time, now late
    use(TARGETS)
    with patch.applied(entries) as inner:
        again = [row["state"] for row in inner.rows()]
print(json.dumps([namespaces(ROOTS), rows, again]))
"""
_BARE = "use(TARGETS)\nprint(json.dumps([namespaces(ROOTS), [], []]))"


def _started(program, upstreams, targets):
    roots = sorted({target.partition(".")[0] for target in targets})
    lines = [
        f"FOLDER = {str(PATCHES)!r}", f"UPSTREAMS = {upstreams!r}", f"TARGETS = {targets!r}", f"ROOTS = {roots!r}",
        _SNAPSHOT, program,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONHASHSEED": "0"}  # upstreams keep tuples made of sets
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def _answer(process):
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def _installed(upstream):
    """Returns whether all the packages are here that a folder of patches changes; hyvideo has no distribution."""
    entries = patch.read(PATCHES, [upstream])
    return all(importlib.util.find_spec(entry.module.partition(".")[0]) for entry in entries)


SHIPPED = [name for name in patch.upstreams(PATCHES) if patch.read(PATCHES, [name]) and _installed(name)]


def test_applied_and_undone_leaves_the_namespaces_of_a_process_that_never_applied():
    upstreams = [name for name in SHIPPED if name != "torchax"]
    targets = sorted({entry.module for entry in patch.read(PATCHES, upstreams) if entry.kind != "op"})
    patched = _started(_PATCHED, upstreams, targets)
    first, second = (_started(_BARE, upstreams, targets) for _ in range(2))
    there, rows, again = _answer(patched)
    bare, other = _answer(first)[0], _answer(second)[0]
    assert sorted(there) == sorted(bare)
    assert [name for name in bare if list(there[name]) != list(bare[name])] == []
    different = _differences(there, bare)
    random = _differences(other, bare)  # addresses, session ids, lists made of sets
    for _ in range(5):
        if different <= random:
            break
        random |= _differences(_answer(_started(_BARE, upstreams, targets))[0], bare)
    assert [(n, k, there[n][k], bare[n][k]) for n, k in sorted(different - random)] == []
    assert len(random) < 60
    assert {row["state"] for row in rows} <= {"applied", "used", "not needed", "armed"}
    imported = [r for r in rows if r["kind"] != "op" and not r["target"].startswith("torchax")]
    assert all(row["state"] in ("applied", "used", "not needed") for row in imported)
    assert all(state in ("applied", "used", "armed", "not needed") for state in again)


def _differences(one, other):
    return {(name, key) for name in other for key in other[name] if one[name].get(key) != other[name][key]}


def test_torchax_is_imported_and_computes_beside_a_torch_it_does_not_know_and_torch_is_left_as_it_was():
    code = f"""
import json, torch
from torchport import patch
packet = torch._ops.OpOverloadPacket
before = dict(vars(packet))
entries = patch.read({str(PATCHES)!r}, ["torchax"])
with patch.applied(entries, stage="denoise") as ledger:
    import torchax
    assert dict(vars(packet)) == before, "in force only while torchax's modules execute"
    env = torchax.default_env()
    from torchax import interop
    import jax
    with env:
        eager = (torch.ones(4, 4, device="jax") @ torch.ones(4, 4, device="jax")).sum().item()
    jitted = interop.jax_jit(lambda a: a @ a)(env.to_xla(torch.full((2, 2), 3.0)))
    total = float(interop.jax_view(jitted).sum())
    row = ledger.rows()[0]
assert dict(vars(packet)) == before
try:
    torch.ops.aten.prod.dim_Dimname
    gone = False
except AttributeError:
    gone = True
with patch.applied(entries, stage="decode") as second:
    torchax.default_env()
    again = second.rows()[0]["state"]
print(json.dumps([eager, total, row["state"], row["calls"] > 0, gone, again]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    eager, total, state, called, gone, again = json.loads(done.stdout.splitlines()[-1])
    assert (eager, total) == (64.0, 72.0)
    if state == "not needed":  # a torch or torchax that agree
        pytest.skip("this torchax knows this torch")
    assert (state, called, gone, again) == ("used", True, True, "armed")


def test_without_the_patch_torchax_does_not_import_beside_this_torch():
    """The test of the test above: should it import by itself one day, the patch is to be deleted."""
    done = subprocess.run(
        [sys.executable, "-c", "import torchax"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode != 0) is (outcome(patch.read(PATCHES, ["torchax"])[0]) is None)


def test_an_operator_that_torch_has_removed_has_a_stand_in_which_raises_when_it_is_called():
    """torch 2.14 has no `aten.cholesky`. No operator of this torch is hidden, and no other namespace is touched."""
    removed = runpy.run_path(str(PATCHES / "torchax" / "overloads.py"))["removed_operator"]

    def original(namespace, name):  # PyTorch's own would put another `mm` in the place of the one that all know
        return getattr(types.SimpleNamespace(mm="the packet"), name)

    aten, prims = types.SimpleNamespace(name="aten"), types.SimpleNamespace(name="prims")
    assert removed(original, aten, "mm") == "the packet"
    stand_in = removed(original, aten, "no_such_operator")
    with pytest.raises(RuntimeError, match=r"aten::no_such_operator\.default: torch .* has removed it"):
        stand_in.default()
    for space, name in ((prims, "no_such_operator"), (aten, "_no_such_operator")):
        with pytest.raises(AttributeError):
            removed(original, space, name)


def test_cuda_calls_are_answered_where_there_is_no_cuda():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    entries = patch.read(PATCHES, ["torch/cuda"])
    assert all(entry.plumbing for entry in entries)
    with pytest.raises((AssertionError, RuntimeError), match=r"not compiled with CUDA|no NVIDIA driver"):
        torch.cuda.current_device()
    with patch.applied(entries) as ledger:
        torch.cuda.set_device(1)
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_properties(0).total_memory == 0
        assert torch.cuda.get_device_capability() == (0, 0)
        assert torch.cuda.mem_get_info() == (0, 0)
        assert torch.cuda.get_device_name() == "no CUDA device"
        torch.cuda.current_stream().synchronize()
        assert torch.cuda.current_stream().query()
        assert {row["state"] for row in ledger.rows()} == {"used"}
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
    with pytest.raises((AssertionError, RuntimeError), match=r"not compiled with CUDA|no NVIDIA driver"):
        torch.cuda.current_device()


def test_every_shipped_patch_is_locked_and_no_lock_is_stale():
    from torchport.patch.source import drift

    assert drift.lock(patch.read(PATCHES, SHIPPED), write=False) == []
