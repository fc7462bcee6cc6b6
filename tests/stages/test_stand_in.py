"""What stands in a pipeline where its network stood."""

import torch

from torchport.stages.stand_in import PlacedInputs


def test_an_input_that_comes_again_is_placed_once():
    placed = []

    class Call:
        def place(self, **inputs):
            placed.append(next(iter(inputs)))
            return {name: (value, "placed") for name, value in inputs.items()}

    constants, text, other = PlacedInputs(Call()), torch.zeros(2), torch.zeros(2)
    assert constants.placed("text", text) is text
    assert constants.placed("text", other) is other
    for _ in range(3):
        assert constants.placed("text", text)[1] == "placed"
        constants.placed("latents", torch.zeros(3))
    assert placed == ["text"]
    text.add_(1)
    assert constants.placed("text", text) is text
