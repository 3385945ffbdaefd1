"""Names by which requests may call a served model."""

import pytest

from paceline.server.errors import HttpError
from paceline.server.service import adapter_of, is_same_model


@pytest.mark.parametrize("name", [None, "m.gguf", "m", "m:latest", "m.gguf:latest"])
def test_gguf_model_answers_to_its_name_without_the_ending(name: str | None) -> None:
    assert adapter_of(name, "m.gguf", ()) is None


def test_adapter_is_chosen_before_a_shortened_model_name() -> None:
    assert adapter_of("m", "m.gguf", ("m",)) == "m"
    assert not is_same_model("m", "m.gguf")  # a directory and a file may be served together


def test_unknown_model_error_has_both_names() -> None:
    with pytest.raises(HttpError, match="the model 'gpt-4' is not served here: send 'm'"):
        adapter_of("gpt-4", "m", ())
