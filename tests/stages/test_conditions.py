"""Two calls of upstream's loop, one for each condition of guidance, become one batch."""

import pytest
import torch

from torchport.errors import BadValueError
from torchport.stages.conditions import Conditions
from torchport.stages.replay import Loop
from torchport.stages.stand_in import NetworkStandIn

PROMPT, NEGATIVE = torch.full((1, 4, 2), 2.0), torch.full((1, 4, 2), 3.0)


class Scheduler:
    timesteps = (1.0,)

    def step(self, sample):
        return sample


class Network(torch.nn.Module):
    """A network of which every input counts, as the component and as the call of it."""

    def __init__(self, batches=True):
        super().__init__()
        self.batches, self.seen, self.placed = batches, [], []

    def place(self, **inputs):
        self.placed.extend(inputs)
        return inputs

    def forward(self, *, latents, text, time, table=None):
        self.seen.append((latents, text, time, table))
        return latents * text.mean(dim=(1, 2)).reshape(-1, 1) + time.reshape(-1, 1)


class Plain(Loop):
    def returned(self, track, args, kwargs):
        return args[0]


@pytest.fixture
def loop():
    return Plain(Scheduler(), torch.Generator())


@pytest.fixture
def stand_in(loop):
    def made(network, embeddings=(PROMPT, NEGATIVE)):
        return NetworkStandIn(
            network, torch.float32, loop, network, Conditions({"text": embeddings}, "net", "card.yaml:1")
        )

    return made


def inputs(number=1, **others):
    return {"latents": torch.full((1, 6), float(number)), "time": torch.tensor([10.0 * number]), **others}


def test_a_batch_of_two_is_computed_at_the_first_call_and_halved_for_the_second(stand_in, loop):
    network = Network()
    pipeline, table = stand_in(network), (torch.ones(1, 2), torch.ones(3, 2))
    for number in (1, 2, 3):
        every = inputs(number, table=table)
        [one], [other] = pipeline(**every, text=PROMPT.clone()), pipeline(**every, text=NEGATIVE.clone())
        assert torch.equal(one, Network()(**every, text=PROMPT))
        assert torch.equal(other, Network()(**every, text=NEGATIVE))
        assert len(network.seen) == number
        latents, text, time, seen = network.seen[-1]
        assert latents.shape == (2, 6) and text.shape == (2, 4, 2) and time.shape == (2,)
        assert seen[0].shape == (1, 2)  # what is in a tuple has no batch
        loop.scheduler.step(torch.zeros(1))
    assert sorted(network.placed) == ["table", "text"]  # once: what comes again


def test_a_call_that_takes_no_batch_gets_each_condition_by_itself(stand_in):
    network = Network(batches=False)
    pipeline = stand_in(network)
    for text in (PROMPT, NEGATIVE):
        assert torch.equal(pipeline(**inputs(), text=text)[0], network(**inputs(), text=text))
    assert [seen[1].shape[0] for seen in network.seen] == [1] * 4


def test_a_step_without_guidance_leaves_nothing_behind(stand_in, loop):
    pipeline = stand_in(Network())
    pipeline(**inputs(1), text=PROMPT)
    loop.scheduler.step(torch.zeros(1))
    for text in (PROMPT, NEGATIVE):
        assert torch.equal(pipeline(**inputs(2), text=text)[0], Network()(**inputs(2), text=text))


APART = "Remove 'conditions' from the card: each call is then computed by itself."
ORDER = f"Name the embeddings in the order of the calls. {APART}"


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            [inputs(text=PROMPT), {**inputs(text=NEGATIVE), "latents": torch.zeros(1, 6)}],
            f"The loop calls 'net' for the second condition with another 'latents' than before. {APART}",
        ),
        (
            [inputs(text=PROMPT), inputs(text=NEGATIVE, table=(PROMPT,))],
            f"The loop calls 'net' for the second condition with another 'table' than before. {APART}",
        ),
        (
            [inputs(text=NEGATIVE)],
            f"In its first call of 'net' in a step, the loop has another 'text' than the card says. {ORDER}",
        ),
        (
            [inputs(text=PROMPT), inputs(text=PROMPT)],
            f"In its second call of 'net' in a step, the loop has another 'text' than the card says. {ORDER}",
        ),
        ([inputs()], "The loop calls 'net' without 'text'. Known: latents, time."),
    ],
)
def test_calls_that_are_no_two_conditions_of_one_step_are_refused(stand_in, calls, text):
    pipeline = stand_in(Network())
    with pytest.raises(BadValueError) as caught:
        for call in calls:
            pipeline(**call)
    assert str(caught.value) == f"card.yaml:1: {text}"


def test_conditions_of_other_shapes_are_no_batch(stand_in):
    with pytest.raises(BadValueError) as caught:
        stand_in(Network(), (PROMPT, NEGATIVE[:, :2]))(**inputs(), text=PROMPT)
    assert str(caught.value) == (
        "card.yaml:1: 'text' is [1, 4, 2] for one condition and [1, 2, 2] for the other. One batch needs equal shapes. "
        + APART
    )
