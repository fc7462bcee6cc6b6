"""The commands, one module each: its flags, its call, what it prints; and what they share: flags, formats, terminal."""
