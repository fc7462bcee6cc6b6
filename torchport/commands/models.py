"""`torchport models`: the model cards of the packs."""

from __future__ import annotations

import sys

from torchport.commands import options, terminal
from torchport.errors import TorchportError


@terminal.command("models")
@options.paths
def command(paths: tuple[str, ...]) -> None:
    """Lists the model cards. A card that cannot be read does not hide the others; the exit code is then 1."""
    from torchport.config.pack import find_pack

    pack, code = find_pack(paths), 0
    for name, result in pack.cards():
        if isinstance(result, TorchportError):
            terminal.complain(result.report())
            code = 1
            continue
        card, document = result
        terminal.say(f"{name:12} {card.title}")
        terminal.say(f"{'':12} checkpoint {card.checkpoint}; strategies {', '.join(card.strategies)}")
        terminal.say(f"{'':12} demo {card.demo}")
        terminal.say(f"{'':12} {document.file} ({pack.home(name).name})")
    sys.exit(code)
