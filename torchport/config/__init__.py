"""All that is read before a run: YAML with its lines, model cards, jobs, machines, packs, checkouts."""

from torchport.config.document import Document, Frozen, overridden, parse_document, read_document, validated

__all__ = ["Document", "Frozen", "overridden", "parse_document", "read_document", "validated"]
