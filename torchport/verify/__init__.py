"""Whether a port computes what the original computes; and if not, in which module, and through which patch."""
