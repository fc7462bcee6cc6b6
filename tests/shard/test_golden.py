"""The shardings of the shipped cards: what a card leaves to the shared strategies puts every tensor where it was."""

import json

import pytest
from shard import golden

HYVIDEO = pytest.param(
    "hyvideo",
    marks=[
        pytest.mark.upstream,
        pytest.mark.skipif(golden.CHECKOUTS["hyvideo"] is None, reason="no TORCHPORT_HYVIDEO"),
    ],
)
KNOWN = json.loads(golden.FILE.read_text(encoding="utf-8"))


def test_there_are_digests_of_every_shipped_card_and_strategy(pack):
    known = {tuple(key.split()[:2]) for key in KNOWN}
    assert known == {(model, strategy) for model in pack.models() for strategy in pack.card(model)[0].strategies}


@pytest.mark.parametrize("model", [HYVIDEO if model == "hyvideo" else model for model in golden.MODELS])
def test_every_tensor_is_where_it_was(model):
    assert golden.digests(model) == {key: value for key, value in KNOWN.items() if key.split()[0] == model}
