"""What was asked for: a request, and the task that it becomes once it is read and found consistent."""

from torchport.task.task import Request, Task, accept

__all__ = ["Request", "Task", "accept"]
