"""Values at the borders of modules are noted and replaced; blocks, modules and the code between them are told apart."""

import gc
import weakref

import torch

from torchport.stages.recorder import unit_paths
from torchport.verify import yardstick
from torchport.verify.borders import Border, Copies, WatchedCall, inner_paths, outputs_kept, total_bytes
from torchport.verify.yardstick import distance


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, mask=None):
        return x - self.linear(self.norm(x) * 2)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x, mask=None)
        return x + 1


def network():
    torch.manual_seed(0)
    return Network().requires_grad_(False)


def same(given, like):
    return given


def called(module, x, paths, given=None, **more):
    watch = WatchedCall(module, paths, given or {}, same, Copies(), **more)
    with watch.watching():
        output = module(x)
    return output, watch


def test_the_units_of_a_network_are_its_children_and_the_elements_of_its_lists():
    assert unit_paths(network()) == ["inlet", "blocks.0", "blocks.1"]
    assert inner_paths(network(), "blocks.1") == ["blocks.1", "blocks.1.norm", "blocks.1.linear"]


def test_values_are_noted_in_the_order_of_the_call():
    _, watch = called(network(), torch.ones(2, 4), ["inlet", "blocks.0"])
    assert [(border.path, border.side) for border in watch.observed] == [
        ("inlet", "in"),
        ("inlet", "out"),
        ("blocks.0", "in"),
        ("blocks.0", "out"),
    ]
    assert set(watch.observed[Border("blocks.0", 0, "in")]) == {"x", "mask"}


def test_a_block_with_the_originals_inputs_does_not_inherit():
    original, port = network(), network()
    port.inlet.weight += 1
    x, paths = torch.ones(2, 4), unit_paths(original)
    _, recorded = called(original, x, paths)
    _, forced = called(port, x, paths, recorded.observed)
    _, free = called(port, x, paths)
    bad, good = Border("inlet", 0, "out"), Border("blocks.0", 0, "out")
    assert not torch.equal(forced.observed[bad], recorded.observed[bad])
    assert torch.equal(forced.observed[good], recorded.observed[good])
    assert not torch.equal(free.observed[good], recorded.observed[good])


def test_a_value_of_another_shape_stays():
    module, x = network(), torch.ones(2, 4)
    given = {Border("blocks.0", 0, "in"): {"x": torch.zeros(3, 4), "mask": None}}
    free, _ = called(module, x, [])
    output, _ = called(module, x, ["blocks.0"], given)
    assert torch.equal(output, free)


def test_a_mask_of_true_and_false_stays_where_the_original_has_one_of_numbers():
    module, seen = network(), []
    module.blocks[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["mask"]), with_kwargs=True)

    def forward(x):
        return module.blocks[0](x, mask=torch.tensor([[True, False]]))

    module.forward = forward
    border = Border("blocks.0", 0, "in")
    x = torch.ones(1, 2, 4)
    _, watch = called(module, x, ["blocks.0"], {border: {"x": x * 2, "mask": torch.tensor([[0.0, -10000.0]])}})
    assert seen[0].dtype == torch.bool
    assert distance(watch.observed[border], {"x": x, "mask": torch.tensor([[0.0, -10000.0]])}) == 0


def test_a_skipped_module_returns_what_is_given():
    module, x = network(), torch.ones(2, 4)
    given = {Border("blocks.1", 0, "out"): torch.full((2, 4), 5.0)}
    output, _ = called(module, x, ["blocks.1"], given, skipped=["blocks.1"])
    assert torch.equal(output, torch.full((2, 4), 6.0))
    assert not torch.equal(module(x), output)  # it is called again afterwards


def test_a_skipped_module_that_is_called_with_whole_numbers_returns_fractions():
    module = torch.nn.Sequential(torch.nn.Embedding(3, 4))
    given = {Border("0", 0, "out"): torch.full((2, 4), 0.5)}
    watch = WatchedCall(module, ["0"], given, lambda new, like: new.to(like.dtype), Copies(), ["0"])
    with watch.watching():
        output = module(torch.tensor([0, 1]))
    assert torch.equal(output, torch.full((2, 4), 0.5))


def test_the_patches_called_between_two_borders_are_known():
    counts = {"up.one": 0, "up.two": 0}
    module = network()
    module.blocks[0].norm.register_forward_hook(lambda *_: counts.update({"up.one": counts["up.one"] + 1}))
    _, watch = called(module, torch.ones(2, 4), ["blocks.0", "blocks.1"], counts=lambda: dict(counts))
    assert watch.patches[Border("blocks.0", 0, "out")] == {"up.one"}
    assert watch.patches[Border("blocks.1", 0, "out")] == frozenset()


def test_a_tensor_that_nobody_wrote_into_is_copied_once():
    copies, x = Copies(), torch.zeros(3)
    first = copies(x)
    assert copies(x) is first
    x += 1
    assert torch.equal(copies(x), torch.ones(3))
    assert torch.equal(first, torch.zeros(3))
    assert total_bytes({Border("a", 0, "in"): [first, first]}) == 12


def test_a_copy_is_held_by_those_who_want_it_alone():
    copies, x = Copies(), torch.zeros(3)
    copy = weakref.ref(copies(x))
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert copy() is None and gone() is None


def test_large_tensors_are_noted_in_rows_but_where_they_are_wanted_whole(monkeypatch):
    monkeypatch.setattr(yardstick, "LARGE", 4)
    monkeypatch.setattr(yardstick, "KEPT", 2)
    border = Border("blocks.1", 0, "out")
    _, watch = called(network(), torch.ones(3, 4), ["inlet", "blocks.0", "blocks.1"], whole=[border])
    assert {value.shape for key, value in watch.observed.items() if key == border} == {(3, 4)}
    assert {value.shape for key, value in watch.observed.items() if key.side == "out" and key != border} == {(2, 4)}


def test_each_modules_first_tensor_is_kept_and_the_hooks_are_removed():
    class Pair(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x), {"cache": x}

    module, kept = torch.nn.Sequential(Pair(2, 3), torch.nn.Identity()), {}
    with outputs_kept(dict(module.named_children()), kept.__setitem__):
        (out, _) = module(torch.ones(1, 2))
    assert set(kept) == {"0", "1"} and torch.equal(kept["0"], out)
    assert not any(each._forward_hooks for each in module.modules())
