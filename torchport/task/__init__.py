"""A request, and the task that it becomes once all that it names is read and checked."""

from torchport.task.task import Request, Task, accept, check_tiling

__all__ = ["Request", "Task", "accept", "check_tiling"]
