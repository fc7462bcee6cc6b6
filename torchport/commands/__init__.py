"""The commands, one module each, and what they share: the values of flags, printing, exit codes."""
