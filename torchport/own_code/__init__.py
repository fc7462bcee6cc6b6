"""Somebody else's script, notebook or loop: the same patches and the same compiler as in a run.

`applied` puts a card's patches in force, `port` compiles a module that is loaded already, `arm` does in a child process
what its parent has done, and `program` prepares the process of `torchport exec`.
"""
