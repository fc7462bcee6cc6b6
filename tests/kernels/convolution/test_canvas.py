"""How latents are parted over a mesh."""

import math

import jax
import pytest

from torchport import shard
from torchport.kernels.convolution import canvas


def canvas_on(mesh, frames, height, width, **options):
    with jax.set_mesh(shard.make_mesh(mesh, jax.devices()[: math.prod(mesh.values())])):
        return canvas.of_latents(frames, height, width, **options)


def test_columns_are_parted_over_all_axes():
    form = canvas_on({"dp": 2, "sp": 4}, 31, 45, 80)
    assert (form.rows, form.columns) == ((), ("dp", "sp"))
    assert (form.width, form.valid_width, form.lead) == (80, 80, 0)


def test_columns_that_the_mesh_does_not_divide_are_padded():
    form = canvas_on({"dp": 2, "sp": 4}, 31, 30, 53, multiple=16)
    assert (form.width, form.valid_columns(56), form.valid_columns(112)) == (56, 53, 106)
    assert (form.frames, form.lead, form.lead_of(32), form.lead_of(64), form.lead_of(128)) == (32, 1, 1, 3, 7)


def test_rows_are_parted_too_where_that_leaves_a_device_less():
    form = canvas_on({"dp": 2, "sp": 4}, 5, 64, 8)
    assert "dp" in form.rows or "sp" in form.rows
    assert form.height % 2 == 0


@pytest.mark.parametrize("mesh", [{}, {"dp": 1}])
def test_one_device_has_all(mesh):
    form = canvas_on(mesh, 5, 7, 9)
    assert (form.rows, form.columns, form.height, form.width) == ((), (), 7, 9)
