"""Where a fault may come from beside the patches."""

from torchport.task import Request, accept
from torchport.verify import verification


def test_a_module_that_the_familys_prepare_changes_is_known(root):
    request = Request("hunyuan", "configs/demo.yaml", prompt="A cat", checkpoint="tiny", paths=(str(root),))
    task = accept(request)
    [stage] = task.denoising
    assert verification._is_prepared(task, stage, "rope")
    assert not verification._is_prepared(task, stage, "norm_out")
    assert not verification._is_prepared(task, stage, "")
