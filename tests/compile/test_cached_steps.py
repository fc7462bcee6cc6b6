"""Step caches: two programs compute what a loop in PyTorch computes that keeps the same, and a stopped loop goes on."""

import dataclasses
import itertools

import jax
import pytest
import torch

from torchport import compile, patch, shard
from torchport.compile import cached_steps
from torchport.compile.cached_steps import StepCached
from torchport.config.card import Stack
from torchport.config.step_cache import Calibrate, DeepCache, MagCache, Schedule, TaylorSeer
from torchport.config.strategy import Rule
from torchport.errors import BadValueError, StackError
from torchport.stages.family import Steps

STEPS, BLOCKS = 8, 4
RULE = Rule(match=".*", spec="replicate")
PERIOD = {"start": 2, "end": 7, "every": 3, "of": STEPS}
"""Computes 0, 1, 2, 5 and 7 of eight steps."""


class Block(torch.nn.Module):
    """Two streams, of which each moves the other."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(6, 6)

    def forward(self, x, y, time):
        moved = torch.tanh(self.mix(x)) * time
        return x + moved, y + moved.mean(1, keepdim=True)


class Network(torch.nn.Module):
    """Something before the blocks, the blocks, and something after them."""

    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(6, 6)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x, y, time):
        x = self.before(x)
        for block in self.blocks:
            x, y = block(x, y, time)
        return (torch.sin(x + y),)


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


def network():
    torch.manual_seed(3)
    return Network().eval().requires_grad_(False)


def compiled(cache, module=None, stacks=None):
    module, mesh = module or network(), shard.make_mesh({}, jax.devices()[:1])
    tensors = dict(module.named_parameters())
    weights = shard.place(tensors.items(), dict.fromkeys(tensors, RULE), mesh)
    stacks = {"blocks": Stack(carries=["x", "y"])} if stacks is None else stacks
    return compile.Compiled(
        compile.Network(
            module.to("meta"), [RULE], "network", "card.yaml:1", "highest",
            stacks=cached_steps.stacks(cache, stacks),
            how=cached_steps.with_cache(compile.plainly, cache, "network", "card.yaml:2"),
            outputs=("output", cached_steps.KEPT), keeps=(cached_steps.KEPT,), free=frozenset([cached_steps.KEPT]),
        ),
        weights, mesh,
    )  # fmt: skip


def inputs(state, step):
    torch.manual_seed(5)
    return {"x": state, "y": torch.randn(2, 1, 6), "time": torch.full((2, 1, 1), 1 - 0.1 * step)}


def loop(call, steps, first=0, state=None):
    """A loop over a network; returns the state after each step."""
    torch.manual_seed(7)
    state, states = torch.randn(2, 5, 6) if state is None else state, []
    for step in range(first, STEPS):
        state = 0.9 * state + 0.3 * call(**inputs(state, step))
        steps.finished(step + 1, {"latents": state})
        states.append(state)
    return states


class Reference:
    """The same in PyTorch, written down as the papers have it."""

    def __init__(self, cache):
        self.module, self.cache, self.step, self.kept = network(), cache, 0, []
        self.finished = lambda number, state: setattr(self, "step", number)

    def __call__(self, x, y, time):
        first, apart = self.module.before(x), BLOCKS - self.cache.last_blocks
        if self.step in self.cache.computed(STEPS):
            streams = (first, y)
            for block in self.module.blocks[:apart]:
                streams = block(*streams, time)
            added = streams if self.cache.last_blocks else (streams[0] - first, streams[1] - y)
            self.kept.append((self.step, added))
        else:
            streams = self.predicted(self.cache.differences)
            streams = streams if self.cache.last_blocks else (first + streams[0], y + streams[1])
        for block in self.module.blocks[apart:]:
            streams = block(*streams, time)
        return torch.sin(streams[0] + streams[1])

    def predicted(self, order):
        """Taylor's series with divided differences of the last whole steps."""

        def difference(order, end):
            if order == 0:
                return self.kept[end][1]
            new, old = difference(order - 1, end), difference(order - 1, end - 1)
            gap = self.kept[end][0] - self.kept[end - 1][0]
            return tuple((a - b) / gap for a, b in zip(new, old, strict=True))

        last, distance = len(self.kept) - 1, self.step - self.kept[-1][0]
        terms = [difference(k, last) for k in range(min(order, last) + 1)]
        return tuple(
            sum(term[stream] * distance**k / (1, 1, 2, 6)[k] for k, term in enumerate(terms)) for stream in range(2)
        )


CACHES = {
    "deepcache": DeepCache(kind="deepcache", **PERIOD),
    "schedule": Schedule(kind="schedule", full=[0, 3, 4]),
    "magcache": MagCache(kind="magcache", curve=[1, *[0.96] * 7], threshold=0.15),
    "taylorseer 1": TaylorSeer(kind="taylorseer", order=1, **PERIOD),
    "taylorseer 2": TaylorSeer(kind="taylorseer", order=2, **PERIOD),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cached_loop_computes_what_pytorch_computes_with_two_programs(name):
    cache = CACHES[name]
    assert 2 <= len(cache.computed(STEPS)) < STEPS
    reference = Reference(cache)
    wanted = loop(reference, reference)
    program = compiled(cache)
    cached = StepCached(program, cache, Steps(), STEPS)
    seen = []
    noted = dataclasses.replace(
        cached.steps, finished=lambda *step: (cached.steps.finished(*step), seen.append(len(program.programs)))
    )
    for ours, theirs in zip(loop(cached, noted), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert set(seen) == {2}, "both are compiled in the first step, and none later"


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("stop", [3, 4, 5, 6])
def test_a_stopped_loop_goes_on_to_the_same_bits(name, stop):
    cache, saved = CACHES[name], {}

    def save(number, state, timestep, kept):
        if number == stop:
            every = {**state, **(kept() if kept is not None else {})}
            saved.update({key: tensor.clone() for key, tensor in every.items()})

    cached = StepCached(compiled(cache), cache, Steps(finished=save), STEPS)
    wanted = loop(cached, cached.steps)
    again = StepCached(compiled(cache), cache, Steps(resume=(stop, saved)), STEPS)
    assert again.steps.resume[0] == stop and set(again.steps.resume[1]) == {"latents"}
    for ours, theirs in zip(
        loop(again, again.steps, stop, again.steps.resume[1]["latents"]), wanted[stop:], strict=True
    ):
        assert torch.equal(ours, theirs)


def test_what_the_next_step_does_not_need_is_not_saved():
    cache, numbers = CACHES["schedule"], []

    def note(number, state, timestep, kept):
        if kept is not None:
            numbers.append(number)

    cached = StepCached(compiled(cache), cache, Steps(finished=note), STEPS)
    loop(cached, cached.steps)
    assert numbers == [1, 2, 5, 6, 7, 8]


def test_what_was_kept_of_another_batch_is_not_used():
    cache = CACHES["schedule"]
    cached = StepCached(compiled(cache), cache, Steps(), STEPS)
    alone = StepCached(compiled(cache), Schedule(kind="schedule", full=list(range(STEPS))), Steps(), STEPS)
    for step in range(3):  # 0 is computed, 1 is not; 2 would not be, and has half of the batch
        given = inputs(torch.ones(2, 5, 6) * step, step)
        given = {name: tensor[: 1 + (step < 2)] for name, tensor in given.items()}
        ours, theirs = cached(**given), alone(**given)
        assert torch.equal(ours, theirs) == (step != 1)
        cached.steps.finished(step + 1, {})
        alone.steps.finished(step + 1, {})


def test_calibration_measures_the_curve_and_computes_every_step():
    cache = Calibrate(kind="calibrate")
    reference = Reference(Schedule(kind="schedule", full=list(range(STEPS))))
    loop(reference, reference)
    streams = [added[0] for _, added in reference.kept]
    wanted = [1.0] + [float((a.norm(dim=-1) / b.norm(dim=-1)).mean()) for b, a in itertools.pairwise(streams)]
    cached = StepCached(compiled(cache), cache, Steps(), STEPS)
    loop(cached, cached.steps)
    assert cached.curve == pytest.approx(wanted, rel=1e-5)
    assert len(cached.compiled.programs) == 1


def calibrated(steps, first=0, calls=1):
    """Returns the curve of a loop of some of the steps, whose steps each call the network so often."""
    cached = StepCached(compiled(Calibrate(kind="calibrate")), Calibrate(kind="calibrate"), steps, STEPS)
    for step in range(first, first + STEPS // 2):
        for call in range(calls):
            cached(**inputs((1.0 + call) * torch.ones(2, 5, 6), step))
        cached.steps.finished(step + 1, {})
    return cached


def test_the_curve_of_steps_with_two_calls_has_their_mean_once_for_each_step():
    curve = calibrated(Steps(), calls=2).curve
    one, other = calibrated(Steps()), StepCached(compiled(cache := Calibrate(kind="calibrate")), cache, Steps(), STEPS)
    for step in range(STEPS // 2):
        other(**inputs(2.0 * torch.ones(2, 5, 6), step))
        other.steps.finished(step + 1, {})
    wanted = [(a + b) / 2 for a, b in zip(one.curve, other.curve, strict=True)]
    assert curve == pytest.approx(wanted, rel=1e-6) and len(curve) == STEPS // 2 and curve[1] != 1.0


def test_a_second_network_goes_on_with_the_first_ones_curve():
    first = calibrated(Steps())
    both = calibrated(Steps(resume=(STEPS // 2, first.measured())), first=STEPS // 2)
    assert both.curve[: STEPS // 2] == pytest.approx(first.curve) and len(both.curve) == STEPS
    assert both.curve[STEPS // 2] == 1.0, "nothing is there that its first step could reuse"


def test_a_curve_whose_first_steps_another_run_took_is_refused():
    with pytest.raises(BadValueError) as caught:
        calibrated(Steps(resume=(4, {"latents": torch.zeros(1)})))
    assert str(caught.value) == (
        "cache: 4 steps were taken before, and the curve of 0 of them is known. "
        "Take all steps with 'cache: {kind: calibrate}': run every stage again."
    )


def test_a_network_without_stacked_blocks_is_refused():
    cache = CACHES["schedule"]
    cached = StepCached(compiled(cache, stacks={}), cache, Steps(), STEPS)
    with pytest.raises(StackError) as caught:
        loop(cached, cached.steps)
    assert str(caught.value) == (
        "card.yaml:2: A step cache reuses what stacked blocks compute, and 'network' has none. "
        "Leave `cache` out, or name its blocks in the card's `stacks`."
    )
