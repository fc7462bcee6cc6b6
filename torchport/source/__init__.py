"""Python source, read and never run: modules, names, parameters, hashes."""
