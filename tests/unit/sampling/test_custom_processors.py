import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor

VOCABULARY = 50
ROW = np.linspace(-3, 3, VOCABULARY, dtype=np.float32)


def _processor(*functions, prompt=(1, 2), **values) -> LogitsProcessor:
    return LogitsProcessor(SamplingParams(processors=functions, **values), VOCABULARY, prompt)


def test_custom_processor_gets_all_tokens_and_the_edited_logits():
    seen = []

    def look(token_ids, scores):
        seen.append((list(token_ids), len(token_ids), token_ids[-1], token_ids[1:3], np.asarray(token_ids).tolist(), scores[4]))
        return scores

    processor = _processor(look, banned_token_ids=(4,))
    processor.commit(7)
    processor.process(ROW, [8, 9])
    processor.process(ROW)
    assert seen == [
        ([1, 2, 7, 8, 9], 5, 9, [2, 7], [1, 2, 7, 8, 9], -np.inf),
        ([1, 2, 7], 3, 7, [2, 7], [1, 2, 7], -np.inf),
    ]


def test_arguments_kept_by_a_custom_processor_do_not_change():
    kept = []

    def keep(token_ids, scores):
        kept.append((token_ids, scores))
        return scores

    path = [8]
    processor = _processor(keep, lambda token_ids, scores: scores * np.float32(2.0))
    processor.process(ROW, path)
    path.append(9)
    processor.commit(5)
    processor.commit(6)
    ((token_ids, scores),) = kept
    assert list(token_ids) == [1, 2, 8]
    assert scores.tolist() == ROW.tolist()


def test_array_returned_by_a_custom_processor_is_not_modified():
    own = ROW[::-1].copy()
    own.flags.writeable = False
    processor = _processor(lambda token_ids, scores: own, lambda token_ids, scores: scores + np.float32(1.0), temperature=0.5)
    assert processor.process(ROW).scores.tolist() == ((own + 1) / np.float32(0.5)).tolist()
    assert processor.process(ROW).argmax() == 0


def test_custom_processors_run_in_order():
    params = _processor(lambda token_ids, scores: scores * np.float32(2.0), lambda token_ids, scores: scores + np.float32(1.0))
    assert params.process(ROW).scores.tolist() == (ROW * 2 + 1).tolist()


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda scores: None, "returned NoneType"),
        (lambda scores: scores.tolist(), "returned list"),
        (lambda scores: scores[1:], r"returned scores of shape \(49,\)"),
        (lambda scores: scores[None], r"returned scores of shape \(1, 50\)"),
        (lambda scores: scores.astype(np.float64), "returned float64 scores"),
        (lambda scores: scores.astype(np.int32), "returned int32 scores"),
        (lambda scores: np.where(scores > 1, np.float32(np.nan), scores), "returned NaN scores"),
        (lambda scores: np.where(scores > 1, np.float32(np.inf), scores), "returned inf scores"),
        (lambda scores: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda scores: [].pop(), "raised IndexError: pop from empty list"),
    ],
)
@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}])
def test_invalid_scores_of_a_custom_processor_name_the_function(returned, reason, values):
    def my_processor(token_ids, scores):
        return returned(scores)

    processor = _processor(my_processor, **values)
    with pytest.raises(RequestError, match=f"processors: .*my_processor {reason}") as refusal:
        processor.process(ROW)
    assert refusal.value.parameter == "processors"


def test_error_of_a_custom_processor_object_names_its_class():
    class Grumpy:
        def __call__(self, token_ids, scores):
            raise KeyError("no")

    with pytest.raises(RequestError, match="Grumpy raised KeyError"):
        _processor(Grumpy()).process(ROW)


def test_keyboard_interrupt_in_a_custom_processor_is_raised():
    def interrupted(token_ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _processor(interrupted).process(ROW)


def test_token_ids_modified_by_a_custom_processor_do_not_change_the_request():
    seen = []

    def write(token_ids, scores):
        seen.append(list(token_ids))
        token_ids[0] = 5
        return scores

    processor = _processor(write, write)
    processor.process(ROW)
    processor.process(ROW)
    assert seen == [[1, 2]] * 4
