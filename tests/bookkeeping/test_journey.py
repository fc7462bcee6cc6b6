"""What a run's manifest says of its stages."""

from torchport.bookkeeping import journey


def test_stages_whose_attention_is_in_eight_bits_are_lossy():
    asked, exact = {"attention": "splash_int8"}, {"attention": None}
    stages = {
        "encode": {"config": asked, "backend": "torchax"},
        "denoise_first": {"config": exact, "backend": "torchax"},
        "denoise": {"config": asked, "backend": "torchax"},
    }
    lossy = "multiplies queries and keys in eight bits where scores have a bound"
    row = {"id": "attention splash_int8", "stage": "denoise", "equivalence": {"lossy": lossy}}
    assert journey._eight_bits(stages) == [row]
    stages["denoise"]["backend"] = "original"
    assert journey._eight_bits(stages) == []
