"""Every row that must be patched in Tencent's checkout is found from its entries, and is covered.

TORCHPORT_HYVIDEO=DIR pytest -m upstream tests/porting/scan/test_upstream.py
"""

import os
from pathlib import Path

import pytest

from torchport.porting.scan import scanning as scan

ENTRIES = (
    "hyvideo.models.transformers.hunyuanvideo_1_5_transformer:HunyuanVideo_1_5_DiffusionTransformer",
    "hyvideo.pipelines.hunyuan_video_pipeline:HunyuanVideo_1_5_Pipeline",
)
NETWORK = "HunyuanVideo_1_5_DiffusionTransformer"
ROWS = [
    ("hyvideo.commons.parallel_states:ParallelDims.build_mesh", "process-group"),
    ("hyvideo.commons.parallel_states:ParallelDims.__post_init__", "cuda-device"),
    (f"hyvideo.models.transformers.hunyuanvideo_1_5_transformer:{NETWORK}.forward", "parallel-state"),
    ("hyvideo.models.transformers.modules.attention:sequence_parallel_attention", "kernel"),
    ("hyvideo.models.transformers.modules.attention:sequence_parallel_attention", "branch"),
    ("hyvideo.models.transformers.modules.attention:sequence_parallel_attention", "parallel-state"),
    ("hyvideo.models.transformers.modules.attention:attention", "square-mask"),
    (f"hyvideo.models.transformers.hunyuanvideo_1_5_transformer:{NETWORK}.reorder_txt_token", "mask-index"),
    (f"hyvideo.models.transformers.hunyuanvideo_1_5_transformer:{NETWORK}.forward", "branch"),
    ("hyvideo.pipelines.hunyuan_video_pipeline:HunyuanVideo_1_5_Pipeline.__call__", "autocast"),
    ("hyvideo.pipelines.hunyuan_video_pipeline:HunyuanVideo_1_5_Pipeline.get_image_condition_latents", "autocast"),
    ("hyvideo.pipelines.hunyuan_video_sr_pipeline:HunyuanVideo_1_5_SR_Pipeline.__call__", "autocast"),
    ("hyvideo.models.transformers.modules.posemb_layers:get_meshgrid_nd", "host-tensor"),
    ("hyvideo.models.transformers.modules.posemb_layers:get_1d_rotary_pos_embed", "host-tensor"),
]


@pytest.fixture(scope="module")
def report(pack):
    if "TORCHPORT_HYVIDEO" not in os.environ:
        pytest.skip("needs a checkout: TORCHPORT_HYVIDEO=DIR pytest -m upstream")
    return scan.scan(Path(os.environ["TORCHPORT_HYVIDEO"]), ENTRIES, pack.folders)


@pytest.mark.upstream
@pytest.mark.parametrize(("target", "kind"), ROWS)
def test_a_row_that_must_be_patched_is_found_and_covered(report, target, kind):
    found = [one for one in report.findings if (one.target, one.kind, one.reach) == (target, kind, "path")]
    assert found and [one for one in found if one.verdict != "covered"] == []
