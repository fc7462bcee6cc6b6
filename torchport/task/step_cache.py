"""A job's step cache: whether the loop that it is for can have it, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from torchport.config import Document
from torchport.config.card import DENOISING, Card, Job
from torchport.errors import BadValueError
from torchport.stages.family import Stage


def check(card: Card, job: Job, stages: Sequence[Stage], original: bool, document: Document) -> None:
    """Refuses a step cache that a loop cannot have; a run without denoising steps reads none.

    Args:
        card: The model card.
        job: The config.
        stages: What is run.
        original: Whether it is run in PyTorch.
        document: The config's lines.

    Raises:
        BadValueError: The original computes every step; the network has no stacked blocks, or several outputs.
    """
    loops = [stage for stage in stages if stage.name in DENOISING]
    if job.cache is None or not loops:
        return
    place = document.place(["cache"])
    if original:
        fact = "'cache' is for compiled programs, and --backend original computes every step in PyTorch"
        raise BadValueError(place, fact, "Remove it, --set cache=null, or leave out --backend original")
    for stage in loops:
        if stage.outputs:
            fact = f"'{stage.network}' returns {', '.join(stage.outputs)}, and a step cache keeps what one output is of"
            raise BadValueError(place, fact, "Remove it, or --set cache=null")
        if not card.stacks.get(str(stage.network)):
            fact = (
                f"A step cache reuses what stacked blocks compute, and the card '{card.model}' names none of "
                f"'{stage.network}'"
            )
            raise BadValueError(place, fact, "Name them in the card's 'stacks' (docs/cards.md), or --set cache=null")
