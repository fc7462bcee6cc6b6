"""A stand-in for the package of HunyuanVideo-1.5's repository, for tests.

Written for torchport from the interface alone: where things are, what they are called and take, who imports what by
value, and which constructs cannot be traced or need CUDA. The bodies are torchport's own. As upstream's, importing the
package writes the environment of a process group, and takes a free port to do so.
"""

import os
import socket

from .commons import get_gpu_memory  # noqa: F401


def find_free_port():
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _name, _value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(_name, _value)
if "MASTER_PORT" not in os.environ:
    os.environ["MASTER_PORT"] = str(find_free_port())
