"""Where a fault may come from beside the patches."""

from torchport.task import Request, accept
from torchport.verify import causes


def test_a_module_that_the_familys_prepare_changes_is_known(root):
    request = Request("hunyuan", "configs/demo.yaml", prompt="A cat", checkpoint="tiny", paths=(str(root),))
    task = accept(request)
    [stage] = task.denoising
    assert causes._is_prepared(task, stage, "rope")
    assert not causes._is_prepared(task, stage, "norm_out")
    assert not causes._is_prepared(task, stage, "")
