"""What a checkpoint says of its quantisation, and refusing what we do not compute."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.json_fields import JsonFields

_NEVER_NULL = "bits"  # how wide codes are: without it a file's words could be read, and be other values


def one_of(fields: JsonFields, name: str, known: tuple[Any, ...], *, default: Any = None) -> Any:
    """A setting that must be one of `known`.

    Raises:
        CheckpointError: it is another.
    """
    value = fields.values.get(name)
    value = default if value is None and (name != _NEVER_NULL or name not in fields.values) else value
    if not any(type(value) is type(one) and value == one for one in known):
        expected = ", ".join(map(repr, known))
        raise CheckpointError(f"{fields.path}: {name} = {shortened(value)} of the quantisation is not supported, only {expected}")
    return value


def group_size(fields: JsonFields, name: str = "group_size", *, default: int = 128) -> int:
    """Columns that share a scale; -1 = all of a row.

    Raises:
        CheckpointError: it is neither -1 nor a count.
    """
    if fields.values.get(name) == -1:
        return -1
    return fields.size(name, default)


def refuse_set(fields: JsonFields, *names: str) -> None:
    """Refuse what changes the computation where it is there.

    Raises:
        CheckpointError: one of the settings is neither absent nor empty.
    """
    for name in names:
        if fields.values.get(name):
            raise CheckpointError(
                f"{fields.path}: {name} = {shortened(fields.values[name])} of the quantisation is not supported: "
                "get the model without it, or a GGUF file of it"
            )


def nested(fields: JsonFields, name: str) -> JsonFields:
    """The fields of an object within; empty where it is absent.

    Raises:
        CheckpointError: it is no object.
    """
    value = fields.values.get(name)
    if value is None:
        return JsonFields({}, fields.path)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{fields.path}: {name} = {shortened(value)}, expected an object")
    return JsonFields(value, fields.path)
