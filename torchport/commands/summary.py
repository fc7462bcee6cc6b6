"""What a run prints at its end: where its time went, and where the video is."""

from __future__ import annotations

from torchport.config.card import DENOISING
from torchport.run import Summary


def lines(summary: Summary, quiet: bool = False) -> list[str]:
    """Returns the lines.

    Args:
        summary: Of the run.
        quiet: Whether to say no more than where the video is.
    """
    place = str(summary.video or summary.folder)
    if quiet:
        return [place]
    stages = dict.fromkeys(key.split()[0] for key in summary.seconds)
    width, text = max([8, *map(len, stages)]), [""]
    for stage in stages:
        parts = {key.split()[1]: seconds for key, seconds in summary.seconds.items() if key.startswith(stage + " ")}
        shares = ", ".join(f"{verb} {seconds:.1f}" for verb, seconds in parts.items() if seconds >= 0.05)
        text.append(f"{stage:{width}} {sum(parts.values()):7.1f} s   ({shares})")
    if summary.steps:
        running = sum(summary.seconds.get(f"{stage} run", 0.0) for stage in DENOISING)
        text.append(f"{'':{width}} {running / summary.steps:7.2f} s/step")
    if summary.upstream is not None:
        text.append(f"{summary.upstream}")
    return [*text, "", place]
