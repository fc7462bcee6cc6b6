"""What is said of an exception that leaves code of an upstream, of a family or of a patch: where, why, and the cure.

Such code runs while a port imports, loads, prepares, traces and runs a model. The frames of a traceback say whose the
exception is: that of the innermost frame outside the libraries. If that frame is torchport's own, it is a fault of
torchport, and stays a traceback. Upstream is what the card names, and what its patches change.

`frames` reads tracebacks, `cure` says what to do by the kind of the exception, and `explained` makes the error.
"""

from torchport.compile.failure.explained import explained as explained
from torchport.compile.failure.frames import Owners as Owners
