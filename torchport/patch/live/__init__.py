"""The objects of the running process: a target, its change, its calls, and who else holds it."""
