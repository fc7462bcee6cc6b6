"""A stage's files: the artefact with its manifest, stage files of hand-written ports, pictures, video."""

from torchport.save.artefact import (
    CONTACT_SHEET,
    PICTURE,
    VIDEO,
    check_lineage,
    discard_stale,
    file_of,
    read,
    read_file,
    read_manifest,
    readable_manifest,
    remove,
    sha256_of,
    write,
    write_copy,
    write_file,
)

__all__ = [
    "CONTACT_SHEET",
    "PICTURE",
    "VIDEO",
    "check_lineage",
    "discard_stale",
    "file_of",
    "read",
    "read_file",
    "read_manifest",
    "readable_manifest",
    "remove",
    "sha256_of",
    "write",
    "write_copy",
    "write_file",
]
