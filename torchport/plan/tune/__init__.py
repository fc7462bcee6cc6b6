"""The search for the best tile of an attention kernel, on a chip or without one."""
