"""Whether a port makes the original's picture; if not, in which module, and through which patch. Two runs, compared."""
