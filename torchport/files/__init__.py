"""Files on disk: written whole or not at all, and a folder that one run at a time writes to."""
