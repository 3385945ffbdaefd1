"""Which of the target's activations an EAGLE-3 head reads: the sources disagree on how layers are counted."""

from collections.abc import Sequence

from paceline.drafters.head_files import HeadFiles
from paceline.errors import IncompatibleDrafterError
from paceline.models.json_fields import JsonFields

KEY = "eagle_aux_hidden_state_layer_ids"


def boundaries_of(files: HeadFiles, nested: JsonFields, fields: JsonFields, count: int, num_layers: int) -> tuple[int, ...]:
    """The boundaries, ascending, for boundary b = the residual stream that enters layer b (L = the last layer's output).

    Speculators and GGUF files name boundaries. Other files do so too, except those of trainers that name the layers whose *outputs* they
    took: these begin with 1, because all such trainers take layer 1 first. Without ids: [2, L / 2, L - 3].

    Args:
        nested, fields: `eagle_config` and the whole config.
        count: how many the head takes.
        num_layers: L of the target.

    Raises:
        IncompatibleDrafterError: the target has no such boundaries, or there are more or fewer than the head takes.
    """
    ids = sorted(set(fields.token_ids(KEY) or nested.token_ids(KEY)))
    source = KEY
    if not ids:
        source = "the usual choice"
        ids = [2, num_layers // 2, num_layers - 3]
    elif ids[0] == 1 and not {"speculators_model_type", "general.architecture"} & files.config.keys():
        ids = [layer + 1 for layer in ids]
    if len(ids) != count or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > num_layers:
        raise IncompatibleDrafterError(
            f"{files.path} reads {count} of the target's layer boundaries, but {source} gives {ids} for its {num_layers} layers: "
            f"the head was made for another model, or its config.json needs {KEY!r}; the drafter option 'boundaries' names them by hand"
        )
    return tuple(ids)


def named_boundaries(named: Sequence[int], count: int, num_layers: int) -> tuple[int, ...]:
    """The boundaries a user names for a head that takes `count`.

    Raises:
        IncompatibleDrafterError: the target has no such boundaries, or there are more or fewer than the head takes.
    """
    boundaries = tuple(sorted(set(named)))
    if len(boundaries) != count or not all(0 <= boundary <= num_layers for boundary in boundaries):
        raise IncompatibleDrafterError(
            f"boundaries {list(named)} were named for a head that reads {count} of a target of {num_layers} layers: name as many "
            f"different ones, from 0 to {num_layers}"
        )
    return boundaries
