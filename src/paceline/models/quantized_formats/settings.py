"""Read the quantisation settings of a checkpoint, and refuse those that are not supported."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields

_SETTING_WITHOUT_NULL = "bits"  # null is refused, not replaced by the default: with a wrong number of bits every code would be misread


def read_choice(fields: JsonFields, name: str, allowed: tuple[Any, ...], *, default: Any = None) -> Any:
    """Return a setting that must be one of `allowed`.

    Raises:
        CheckpointError: The value is not one of `allowed`.
    """
    value = fields.values.get(name)
    value = default if value is None and (name != _SETTING_WITHOUT_NULL or name not in fields.values) else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        expected = ", ".join(map(repr, allowed))
        raise CheckpointError(f"{fields.path}: {name} = {shortened(value)} of the quantisation is not supported, only {expected}")
    return value


def read_group_size(fields: JsonFields) -> int:
    """Return how many columns share a scale; -1 = a whole row.

    Raises:
        CheckpointError: The value is neither -1 nor a positive integer.
    """
    return -1 if fields.values.get("group_size") == -1 else fields.integer("group_size", 128)


def refuse_settings(fields: JsonFields, *names: str) -> None:
    """Check that unsupported settings, which would change the computation, are absent, null, false, 0 or empty.

    Raises:
        CheckpointError: One of the settings `names` has another value.
    """
    for name in names:
        if fields.values.get(name):
            raise CheckpointError(
                f"{fields.path}: {name} = {shortened(fields.values[name])} of the quantisation is not supported: "
                "get the model without it, or a GGUF file of it"
            )


def nested_fields(fields: JsonFields, name: str) -> JsonFields:
    """Return the fields of the JSON object in the field `name`; empty if it is absent.

    Raises:
        CheckpointError: The value is not an object.
    """
    value = fields.values.get(name)
    if value is None:
        return JsonFields({}, fields.path)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{fields.path}: {name} = {shortened(value)}, expected an object")
    return JsonFields(value, fields.path)
