"""Compiled programs that are kept on disk: loaded for a warm start without tracing, refused when anything differs.

`key` says what a program is determined by, `entry` is one program on disk, `store` looks programs up and keeps them.
"""

from torchport.compile.kept.store import Programs as Programs
