"""What upstream raises over files from elsewhere becomes one line; what is torchport's own, or a bug, passes."""

import math
from pathlib import Path

import jinja2
import pytest

from torchport.errors import CheckpointBrokenError, CheckpointForeignError, StoppedError
from torchport.load.foreign import brief, check_values, is_absence, is_cuda, reading, refusals, tokenizing


@pytest.mark.parametrize("kind", [*refusals(), Exception])
def test_whatever_upstream_raises_is_refused_with_its_reason(kind):
    raised = kind.__new__(kind)
    raised.args = ("too deep",) if kind is not jinja2.TemplateError else ()
    with (
        pytest.raises(CheckpointBrokenError) as caught,
        reading(CheckpointBrokenError, "x.json", "Not read", "Mend it"),
    ):
        raise raised
    assert str(caught.value).startswith("x.json: Not read: ") and str(caught.value).endswith(". Mend it.")
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), StoppedError("a", "b", "c"), CheckpointForeignError("a", "b", "c")]
)
def test_what_stops_a_run_and_what_is_refused_already_pass(raised):
    with pytest.raises(type(raised)) as caught, reading(CheckpointBrokenError, "x.json", "Not read", "Mend it"):
        raise raised
    assert caught.value is raised


@pytest.mark.parametrize(
    "raised",
    [ModuleNotFoundError("No module named 'x'", name="x"), AssertionError("Torch not compiled with CUDA enabled")],
)
def test_an_absent_package_and_cuda_are_no_files_fault(raised):
    assert is_absence(raised) or is_cuda(raised)
    with pytest.raises(type(raised)) as caught, reading(CheckpointBrokenError, "x.json", "Not read", "Mend it"):
        raise raised
    assert caught.value is raised


def test_a_circle_of_imports_is_no_absence():
    circle = "cannot import name 'a' from partially initialized module 'b' (most likely due to a circular import)"
    assert not is_absence(ImportError(circle)) and is_absence(ImportError("cannot import name 'a' from 'b' (b.py)"))


def test_the_reason_is_the_first_error_on_one_line():
    try:
        try:
            raise KeyError("hidden\nsize")
        except KeyError as error:
            raise RuntimeError("cannot load") from error
    except RuntimeError as error:
        assert brief(error) == "KeyError: 'hidden\\nsize'"
    assert brief(ValueError("a\n b.")) == "a b" and brief(AssertionError()) == "AssertionError"


@pytest.mark.parametrize("raised", [jinja2.exceptions.SecurityError("unsafe"), IndexError("out of range")])
def test_a_template_that_breaks_out_over_a_prompt_is_refused_with_the_tokenizers_folder(raised):
    with pytest.raises(CheckpointBrokenError) as caught, tokenizing("some/tokenizer"):
        raise raised
    assert str(caught.value) == (
        f"some/tokenizer: The prompt cannot be encoded with it: {raised}. Download the tokenizer again."
    )


class Clipped:
    """As upstream's schedulers are, of which one has minus infinity as a default."""

    def __init__(self, low: float = -math.inf, high: float = 1.0): ...


def test_a_number_is_finite_unless_its_default_is_the_same_infinity():
    check_values(Clipped, Path("scheduler_config.json"), {"low": -math.inf, "high": 2})
    for config in ({"low": math.inf}, {"high": math.inf}, {"high": math.nan}):
        with pytest.raises(CheckpointForeignError, match=r"must be like its default"):
            check_values(Clipped, Path("scheduler_config.json"), config)
