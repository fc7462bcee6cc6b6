"""."""

from torchport.task.task import Request, Task, accept, check_heads, published

__all__ = ["Request", "Task", "accept", "check_heads", "published"]
