"""Folders of patches, model cards and jobs, one on top of the other."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchport.config.document import Document, Frozen, overridden, read_document, validated
from torchport.errors import (
    BadValueError,
    DataFolderError,
    MissingKeyError,
    TakenNameError,
    TorchportError,
    UnknownNameError,
    nearest,
)
from torchport.files import cache
from torchport.files.folder import as_named, has_file, has_folder, inside

if TYPE_CHECKING:  # where patches alone are read, no model of a card is made
    from torchport.config.card import Card, Job

SHIPPED = "torchport"
"""What listings call the pack that torchport brings."""
DERIVED = "diffusers:"
"""The start of the name of a model whose card is derived: `diffusers:SomePipeline`. No listing shows their pack."""
GROUP = "torchport.packs"
"""The entry points by which an installed package says that it holds a pack."""


class _Extending(Frozen):
    """What is read of a card before the one that it extends."""

    extends: str


@dataclasses.dataclass(frozen=True)
class Pack:
    """A folder with `patches/` or `configs/` in it. It sees the packs under it, and adds its names to theirs."""

    root: Path  #: The folder.
    #: What listings call it: its path, `package NAME`, or `torchport` for the shipped one.
    name: str = "--path"
    under: Pack | None = None  #: The pack that lies under this one.
    chosen: bool = False  #: Whether `--path` or `TORCHPORT_PATH` names it.

    @property
    def patches(self) -> Path:
        """The folder of this pack's own patch files; derived cards use the patches of the pack below."""
        if self.name == DERIVED and self.under is not None:
            return self.under.patches
        return self.root / "patches"

    def layers(self) -> Iterator[Pack]:
        """Yields this pack and those under it, from the top: `--path`, installed packages, the shipped one."""
        pack: Pack | None = self
        while pack is not None:
            yield pack
            pack = pack.under

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of patch files of this pack and of those under it, from the top."""
        return tuple(pack.patches for pack in self.layers())

    @property
    def checked(self) -> list[Pack]:
        """The packs that `torchport check` checks: those that the user named, or else the shipped one."""
        layers = list(self.layers())
        return [pack for pack in layers if pack.chosen] or layers[-1:]

    def models(self) -> list[str]:
        """Returns the names of all model cards, of this pack and of those under it."""
        return sorted({name for pack in self.layers() for name in pack.card_names()})

    def card_names(self) -> list[str]:
        """Returns the names of the model cards in this pack's folder."""
        return [file.stem for file in (self.root / "configs" / "models").glob("*.yaml")]

    def home(self, model: str, place: str = "") -> Pack:
        """Returns the highest pack with a model's card, or raises. The pack of derived cards lies on top of this one.
        `place` is where the model is named; by default `--model`.
        """
        name = f"configs/models/{model}.yaml"
        # A card that was derived from a pipeline lies in a cache, as a pack on top of this one.
        if model.startswith(DERIVED) and has_file(derived_folder() / name):
            return Pack(derived_folder(), DERIVED, self)
        if model not in self.models():
            folders = ", ".join(as_named(pack.root / "configs" / "models") for pack in self.layers())
            fact = f"There is no model card '{model}' in {folders}"
            raise UnknownNameError(place or f"--model {model}", fact, nearest(model, self.models()), name=model)
        return self.highest(name)

    def highest(self, name: str) -> Pack:
        """Returns the highest pack with a file, by the file's path in a pack: `configs/720p.yaml`. Refuses a file that
        hides a different one without `overrides: true`.
        """
        home, *lower = [pack for pack in self.layers() if os.path.lexists(pack.root / name)]
        if lower:
            document = home.read(home.root / name)
            overrides = isinstance(document.data, dict) and document.data.get("overrides") is True
            if not overrides and lower[0].read(lower[0].root / name).data != document.data:
                fact = f"{as_named(lower[0].root / name)} has the same name"
                remedy = "Rename this file, or write 'overrides: true' in it to take the other one's place"
                raise TakenNameError(document.place(), fact, remedy)
        return home

    def _check_overridden(self, name: str, document: Document) -> None:
        """Refuses a file that has `overrides: true` where no pack below has a file of its name."""
        if sum(has_file(pack.root / name) for pack in self.layers()) < 2:
            fact, remedy = f"It overrides nothing: no pack under it has {name}", "Remove 'overrides'"
            raise BadValueError(document.place(["overrides"]), fact, remedy)

    def card(self, name: str) -> tuple[Card, Document]:
        """Returns a model card and the document it was read from; raises UnknownNameError if no card has this name."""
        from torchport.config.card import Card

        home = self.home(name)
        folder = home.root / "configs" / "models"
        document = home._on_base(home.read(folder / f"{name}.yaml"))
        card = validated(Card, document)
        if ("model",) in document.files:  # it is that of the card which this one extends
            raise MissingKeyError(document.place(), "'model' is missing", f"Add 'model: {name}'", key="model")
        if card.model != name:
            raise BadValueError(document.place(["model"]), f"'model' is '{card.model}'", f"It must be '{name}'")
        if card.overrides:
            home._check_overridden(f"configs/models/{name}.yaml", document)
        trained = {
            component: weights.model_copy(update={"file": str(folder / weights.file)})
            for component, weights in card.tiny.trained.items()
        }
        return (card.with_trained(trained) if trained else card), document

    def _on_base(self, document: Document) -> Document:
        """Returns the document of a card on top of the card that `extends` names, which may itself extend none."""
        base_name = document.data.get("extends") if isinstance(document.data, dict) else None
        if base_name is None:
            return document
        # A value that is no text is refused here, alone: later, all that the other card has would count as missing.
        validated(_Extending, dataclasses.replace(document, data={"extends": base_name}))
        place = document.place(["extends"])
        base = self.read(self.home(base_name, place).root / "configs" / "models" / f"{base_name}.yaml")
        if isinstance(base.data, dict) and "extends" in base.data:
            raise BadValueError(place, f"'{base_name}' extends another card", "Extend one that extends none")
        return document.over(base)

    def base_name(self, name: str) -> str | None:
        """Returns the name of the card that a card extends; None if it extends none, or if its file cannot be read."""
        try:
            home = self.home(name)
            document = home.read(home.root / "configs" / "models" / f"{name}.yaml")
        except TorchportError:
            return None
        base = document.data.get("extends") if isinstance(document.data, dict) else None
        return base if isinstance(base, str) else None

    def cards(self) -> Iterator[tuple[str, tuple[Card, Document] | TorchportError]]:
        """Yields each model's name with its card or the error in it, then an error for each file that is never read."""
        for name in self.models():
            try:
                yield name, self.card(name)
            except TorchportError as error:
                yield name, error
        for pack in self.layers():
            yield from (("", mistake) for mistake in pack.unread())

    def unread(self) -> Iterator[TorchportError]:
        """Yields an error for each file of this pack that looks like a card or a config, but would never be read."""
        configs = self.root / "configs"
        for file in sorted((*configs.rglob("*.yml"), *(configs / "models").glob("*/*.yaml"))):
            fact = f"'{file.name}' would never be read"
            remedy = f"Rename it to {file.stem}.yaml" if file.suffix == ".yml" else "Move it up into configs/models"
            yield BadValueError(as_named(file), fact, remedy)

    def family_file(self, card: Card, place: str) -> Path:
        """Returns the Python file of a card's family, in the card's pack or a pack under it; raises if none has it."""
        layers = list(self.home(card.model).layers())
        for pack in layers:
            file = pack.patches / f"{card.family}.py"
            if has_file(file):
                return inside(pack.root, file)
        files = [file for pack in layers for file in pack.patches.glob("*/*.py")]
        known = sorted({f"{file.parent.name}/{file.stem}" for file in files})
        folders = ", ".join(as_named(pack.root) for pack in layers)
        fact = f"'family' is '{card.family}', and there is no patches/{card.family}.py in {folders}"
        raise UnknownNameError(place, fact, nearest(card.family, known), name=card.family)

    def demo(self, card: Card) -> str:
        """Returns the path of the config that runs a card's tiny checkpoint, in the card's pack or a pack under it."""
        homes = [pack for pack in self.home(card.model).layers() if has_file(pack.root / card.demo)]
        return str(homes[0].root / card.demo) if homes else card.demo

    def job(self, name: str, overrides: Sequence[str] = (), card: Card | None = None) -> tuple[Job, Document]:
        """Returns a config, by path or name, with overrides such as `cache.start=5`; refuses an unknown name. With a
        card, `demo` is the name of the card's demo.
        """
        from torchport.config.card import Job

        file = self._job_file(self.demo(card) if card is not None and name == "demo" else name)
        document = self.read(file)
        for override in overrides:
            document = overridden(document, override)
        job = validated(Job, document)
        owner = self._owner(file)
        if job.overrides and owner is not None:
            owner._check_overridden(str(file.absolute().relative_to(owner.root)), document)
        return job, document

    def _job_file(self, name: str) -> Path:
        """Returns the file of a config: at this path, or else in the highest pack with the file; raises if none has."""
        path = Path(name)
        if has_file(path):
            return path
        if path.name.startswith(DERIVED) and has_file(derived_folder() / name):
            return derived_folder() / name
        # A bare name means one of the packs' configs; a path means that file of a pack alone.
        names = [name, *(f"configs/{file}" for file in (name, f"{name}.yaml") if path.name == name)]
        for relative in names:
            if not path.is_absolute() and any(has_file(pack.root / relative) for pack in self.layers()):
                return self.highest(relative).root / relative
        files = [file for pack in self.layers() for file in (pack.root / "configs").glob("*.yaml")]
        configs = sorted({f"configs/{file.name}" for file in files})
        folders = ", ".join(as_named(pack.root) for pack in self.layers())
        fact = f"There is no file '{name}', here or in {folders}"
        raise UnknownNameError(f"--config {name}", fact, nearest(name, configs), name=name)

    def read(self, file: Path) -> Document:
        """Returns a YAML document; errors name it by its path from the current folder."""
        owner = self._owner(file)
        return read_document(file if owner is None else inside(owner.root, file), as_named(file))

    def _owner(self, file: Path) -> Pack | None:
        """Returns the highest pack whose folder a file lies in; None for a file outside of all packs."""
        return next((pack for pack in self.layers() if file.absolute().is_relative_to(pack.root)), None)


def find_pack(paths: Sequence[str] = ()) -> Pack:
    """Returns the highest pack: `--path`, above `TORCHPORT_PATH`, above installed packages, above the shipped one.

    The current folder is never used by default: its content may be somebody else's. Python of a pack does not run.
    """
    shipped = _shipped()
    variable = os.environ.get("TORCHPORT_PATH", "").split(os.pathsep)
    named = [("--path", path) for path in paths]
    named += [("TORCHPORT_PATH", path) for path in variable if path]
    packs = []
    for source, path in named:
        if not path or not _is_pack(Path(path)):
            fact, remedy = "There is no folder here with patches/ or configs/ in it", "Name the folder that holds them"
            raise DataFolderError(f"{source} {path}", fact, remedy)
        root = Path(path).resolve()
        packs.append(Pack(root, as_named(root), chosen=True))
    packs += _installed()
    highest = Pack(shipped, SHIPPED, chosen=any(pack.chosen and pack.root == shipped for pack in packs))
    # From the lowest up.
    for root in reversed(dict.fromkeys(pack.root for pack in packs if pack.root != shipped)):
        first = next(pack for pack in packs if pack.root == root)  # a folder that is named twice is one pack
        highest = dataclasses.replace(first, under=highest)
    return highest


def derived_folder() -> Path:
    """Returns the folder of cards that were derived from pipelines with the installed diffusers and transformers.

    Some processors of transformers are there only with torchvision.
    """
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in ("diffusers", "transformers")]
    if importlib.util.find_spec("torchvision"):
        versions.append("torchvision")
    return cache.folder() / "derived" / "-".join(versions)


def _installed() -> Iterator[Pack]:
    """Yields the packs of installed packages without importing them; raises if an entry point leads to no pack.

    The value of an entry point, `"some_package.data"`, names the folder `data` in the package `some_package`.
    """
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        package, *folders = point.value.split(".")
        is_name = all(part.isidentifier() for part in (package, *folders))
        spec = importlib.util.find_spec(package) if is_name else None
        places = None if spec is None else spec.submodule_search_locations
        for place in places or ():
            root = Path(place, *folders)
            if _is_pack(root):
                yield Pack(root.resolve(), f"package {point.name}")
                break
        else:
            fact = f"'{point.value}' is no folder with patches/ or configs/ in it"
            remedy = f"Mend the entry point '{point.name}' of the group {GROUP}, or uninstall its package"
            raise DataFolderError(f"package {point.name}", fact, remedy)


def _shipped() -> Path:
    """Returns the folder of torchport's own patches and configs: the checkout, or the copy in the wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent, package / "_data"):
        if has_folder(folder / "patches") and has_folder(folder / "configs" / "models"):
            return folder
    raise DataFolderError(
        str(package),
        "Neither a checkout nor the wheel's copy of patches/ and configs/ is here",
        "Reinstall torchport",
    )


def _is_pack(folder: Path) -> bool:
    return has_folder(folder / "patches") or has_folder(folder / "configs")
