"""An upstream and a folder of patches, written anew for each test and gone after it."""

from __future__ import annotations

import gc
import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

from torchport import patch

TAIL = """\
  why: A test.
  reported: "none: a test"
  until: never
  fits: {up: "*"}
  equivalence: bitwise
"""


class World:
    """Two folders in the current one: `site`, on the search path, and `patches`.

    While it lasts, the collector passes over nothing older: no holder of what a test imports can be among the million
    objects of torch and JAX, and each of the engine's passes would visit all of them.
    """

    def __init__(self, tmp_path: Path, monkeypatch: Any) -> None:
        self.site = tmp_path / "site"
        self.patches = tmp_path / "patches"
        self.site.mkdir()
        self.patches.mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(self.site))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        self._modules = set(sys.modules)
        gc.freeze()

    def close(self) -> None:
        """Forgets the modules that the test imported; nothing of the engine may be left in the import system."""
        gc.unfreeze()
        for name in set(sys.modules) - self._modules:
            file = getattr(sys.modules[name], "__file__", None)
            is_of_site = file is not None and Path(file).is_relative_to(self.site)  # under whatever name
            if is_of_site or name.partition(".")[0] in ("up", "other", "torchport_patches"):
                del sys.modules[name]
        assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("torchport")]

    def write(self, file: str, text: str) -> Path:
        """Writes a file of upstream; packages on the way get an `__init__.py` unless they are called ns."""
        path = self.site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.parents:
            if folder == self.site:
                break
            if not (folder / "__init__.py").exists() and folder.name != "ns":
                (folder / "__init__.py").write_text("")
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return path

    def python(self, text: str, file: str = "p.py", upstream: str = "up") -> Path:
        """Writes the Python file beside the YAML."""
        path = self.patches / upstream / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def yaml(self, text: str, file: str = "p.yaml", upstream: str = "up") -> list[patch.Entry]:
        """Writes a file of entries, each completed by what every entry must have, and reads it."""
        folder = self.patches / upstream
        folder.mkdir(exist_ok=True)
        entries = [f"- {part}" for part in textwrap.dedent(text).strip().removeprefix("- ").split("\n- ")]
        (folder / file).write_text("".join(f"{entry.rstrip()}\n{TAIL}" for entry in entries))
        return patch.read(self.patches, [f"{upstream}/{file.removesuffix('.yaml')}"])

    def one(self, kind: str, target: str, more: str = "", key: str = "up.one") -> list[patch.Entry]:
        """Returns one entry of a kind, as `replace: p.py:new`."""
        extra = "".join(f"\n  {line}" for line in textwrap.dedent(more).strip().split("\n") if line)
        return self.yaml(f"id: {key}\n  target: {target}\n  {kind}{extra}")


def namespace(module: Any) -> dict[str, Any]:
    """Returns a module's names, and those of its classes, with the identity of what they are."""
    result: dict[str, Any] = {}
    for name, value in vars(module).items():
        result[name] = id(value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner, part in vars(value).items():
                result[f"{name}.{inner}"] = id(part)
    return result
