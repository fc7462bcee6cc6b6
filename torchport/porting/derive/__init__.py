"""A model card that is derived from a pipeline of diffusers: it is tried with tiny weights.

It is written once for each pipeline and set of versions, into a pack of the cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchport.compile.in_force import hushed
from torchport.config import parse_document, validated
from torchport.config.card import Card, Job
from torchport.config.pack import DERIVED, derived_folder
from torchport.errors import BadValueError
from torchport.files import atomic, cache
from torchport.load import tiny
from torchport.load.foreign import brief, line_of, refusals
from torchport.porting.derive.parts import Configurations, parts_of, pipeline_class
from torchport.porting.derive.trial import IMAGES, PipelineTrial
from torchport.porting.derive.writing import card_of, job_of, published_job_of, takes_embeddings, text_of
from torchport.porting.draft.home import Piece
from torchport.progress import log

_FROM_IMAGES = re.compile(r"(?:Image|Video)(?:2(?!\d)|To)|[IV]2[IV]|Img2Img|Inpaint|Edit|Kontext|Control")
"""Names of pipelines that begin with an image, though their argument for it may be None."""


def ensure(model: str) -> None:
    """Derives the card of a pipeline, `diffusers:Class`, if it is not there yet; other names are left alone."""
    if not model.startswith(DERIVED):
        return
    folder = derived_folder()
    file = folder / "configs" / "models" / f"{model}.yaml"
    jobs = [folder / "configs" / f"{model}{end}.yaml" for end in ("_demo", "")]
    try:
        stamp, _, text = file.read_bytes().partition(b"\n")
        if stamp == _stamp(text, *(job.read_bytes() for job in jobs)):
            return
    except OSError:  # one of them is not there, or cannot be read
        stamp = b""
    # Of another version of this code they are as they were; otherwise the checksum says that they are not.
    damaged = ", again, since its file is damaged" if stamp.startswith(f"# {_code()} ".encode()) else ""
    log.info("derive a card for %s%s: upstream's code runs with tiny weights ...", model, damaged)
    card, *texts = derived_card(model)
    cache.make(file.parent)
    for job, written in zip(jobs, texts, strict=True):
        atomic.write_text(job, written)
    atomic.write_text(file, f"{_stamp(*(each.encode() for each in (card, *texts))).decode()}\n{card}")


def _stamp(*texts: bytes) -> bytes:
    """Returns the first line of a card's file: the code that derived it, and the checksum of card and jobs."""
    checksum = hashlib.sha256(b"\0".join(texts)).hexdigest()
    return f"# {_code()} {checksum}".encode()


@functools.cache
def _code() -> str:
    """Returns a hash of the code that derives: a card of another one is made again."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(str(tiny.__file__))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def derived_card(model: str, name: str | None = None) -> tuple[str, str, str]:
    """Returns the texts of a pipeline's card, of the job of its demo, and of that of its published weights."""
    with hushed(True):  # upstream's log warns of small numbers, and of packages that its classes could have
        place = f"--model {model}"
        with _refusing(place):
            cls = pipeline_class(model)
            trial = PipelineTrial(cls, Configurations(parts_of(cls, place)), place, image_argument(cls))
            observed = trial.observed()
            trial.answers = not takes_embeddings(trial, observed)
            data = card_of(trial, observed, name or model)
    demo = job_of(data, observed, cls)
    card, job, published = text_of(data), text_of(demo), text_of(published_job_of(data, demo, cls))
    # Our own texts: a mistake in them would be ours, and is seen here.
    validated(Card, parse_document(card, f"configs/models/{name or model}.yaml"))
    validated(Job, parse_document(job, f"configs/{name or model}_demo.yaml"))
    validated(Job, parse_document(published, f"configs/{name or model}.yaml"))
    return card, job, published


@contextlib.contextmanager
def _refusing(place: str) -> Iterator[None]:
    """Turns what upstream's code raises, and nothing of a trial mends, into a refusal with its line."""
    try:
        yield
    except refusals() as error:
        line = line_of(error)
        if not line:
            raise
        fact = f"It stops at {line}: {brief(error)}"
        raise BadValueError(place, fact, "Write a card for it: docs/cards.md") from error


def pieces(model: str, name: str) -> list[Piece]:
    """Returns the files of a derived card, to be written into a pack and edited there."""
    card, demo, published = derived_card(model, name)
    texts = {f"configs/models/{name}.yaml": card, f"configs/{name}_demo.yaml": demo, f"configs/{name}.yaml": published}
    return [Piece(file, text, mode="new") for file, text in texts.items()]


def image_argument(cls: Any) -> str | None:
    """Returns the argument of a pipeline that takes the image or video which it begins with; None if it needs none."""
    parameters = inspect.signature(cls.__call__).parameters
    parameter = next((parameters[name] for name in IMAGES if name in parameters), None)
    has_default = parameter is None or parameter.default is not parameter.empty  # None is what it has there
    return parameter.name if parameter and (not has_default or _FROM_IMAGES.search(cls.__name__)) else None
