"""Finds an upstream that is a checkout and not an installed package, puts it on the path, and keeps it quiet."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchport.config.card import Checkout
from torchport.errors import UpstreamError
from torchport.files.folder import as_named, expand_home, has_folder
from torchport.processes import git


def find(checkout: Checkout | None, path: str | None) -> Path | None:
    """Returns the folder that `--upstream-path` names by `path`; refuses a folder that is not the card's checkout.
    Returns None for a card without `checkout`.
    """
    if checkout is None:
        if path is not None:
            raise UpstreamError(
                f"--upstream-path {path}", "This model's upstreams are installed packages", "Leave the flag out"
            )
        return None
    clone = f"git clone {checkout.url}, and pass --upstream-path DIR"
    if path is None:
        raise UpstreamError("--upstream-path", f"It is missing, and '{checkout.package}' is a checkout", clone)
    folder = checkout_folder(path)
    if not _package(checkout, folder).exists():
        below = _package(checkout, folder / "src").exists()
        remedy = f"It lies below src: write --upstream-path {Path(path) / 'src'}" if below else clone
        raise UpstreamError(f"--upstream-path {path}", f"There is no package '{checkout.package}' in it", remedy)
    for file, other in checkout.others.items():
        if (folder / file).exists() and not (folder / checkout.has).is_file():
            raise UpstreamError(f"--upstream-path {path}", f"This is {other}: it has {file}", clone)
    if not (folder / checkout.has).is_file():
        raise UpstreamError(f"--upstream-path {path}", f"It has no {checkout.has}", clone)
    # The modules of two copies of the package would mix.
    copy = getattr(sys.modules.get(checkout.package), "__file__", None)
    if copy is not None and not Path(copy).resolve().is_relative_to(folder):
        fact = f"'{checkout.package}' was imported from {copy}"
        raise UpstreamError(f"--upstream-path {folder}", fact, "Start a new process")
    return folder


@dataclasses.dataclass(frozen=True)
class Upstream:
    """A checkout as manifests list it."""

    package: str  #: The package's name.
    revision: git.Revision  #: Its commit.

    def row(self) -> dict[str, Any]:
        return {"package": self.package, "commit": self.revision.commit, "dirty": self.revision.dirty}

    def __str__(self) -> str:
        return f"{self.package} at {self.revision}"


def upstream(checkout: Checkout | None, folder: Path | None) -> Upstream | None:
    """Returns the package of a checkout with its commit; None for a card whose upstreams are installed packages."""
    if checkout is None or folder is None:
        return None
    return Upstream(checkout.package, git.revision(_package(checkout, folder)))


def checkout_folder(path: str | Path) -> Path:
    """Returns the folder that `--upstream-path` names."""
    folder = expand_home(str(path))
    if not has_folder(folder):
        raise UpstreamError(f"--upstream-path {path}", "There is no such folder", "Name the upstream's checkout")
    return folder.resolve()


def below_src(module: str) -> str:
    """Returns the remedy if a folder of `sys.path` has the module's package below `src/`; otherwise an empty string."""
    package = module.partition(".")[0]
    for entry in map(Path, sys.path):
        if (entry / "src" / package).is_dir() or (entry / "src" / f"{package}.py").is_file():
            return f"It lies below src: write --upstream-path {as_named(entry / 'src')}"
    return ""


def _package(checkout: Checkout, folder: Path) -> Path:
    """Returns the folder of a checkout's package; or the file, if the package is a single module."""
    module = folder / f"{checkout.package}.py"
    return module if module.is_file() else folder / checkout.package


@contextlib.contextmanager
def on_path(folder: Path | None) -> Iterator[None]:
    """Puts a checkout first on `sys.path`, and restores the path and the environment afterwards.

    Upstreams write environment variables when they are imported (RANK, MASTER_ADDR). Code that runs later must not see
    them.
    """
    if folder is None:
        yield
        return
    environment, path = dict(os.environ), list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
