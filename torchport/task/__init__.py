"""A request, and the task that it becomes once all that it names is read and checked."""

from torchport.task.execution import Execution
from torchport.task.task import Request, Task, accept, check_tiling

__all__ = ["Execution", "Request", "Task", "accept", "check_tiling"]
