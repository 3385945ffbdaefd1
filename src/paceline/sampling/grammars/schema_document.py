"""Resolves the references of a JSON schema, and enumerates the values that a subschema allows."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Schema = dict[str, Any]

_MAX_LITERALS = 256  # maximum number of values that `literals` returns


class SchemaDocument:
    """Resolves the references of one schema.

    Attributes:
        root: the parsed JSON of the schema.
        has_embedded_ids: whether a subschema has an `$id`. If so, no reference is resolved, because it may be relative to that `$id`.
    """

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._base = next((root[name] for name in ("$id", "id") if isinstance(root.get(name), str)), "")
        self._anchors: dict[str, list[str]] = {}
        self.has_embedded_ids = False
        for pointer, node in objects_of(root):
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(name), str):
                    self._anchors.setdefault(f"#{node[name]}", []).append(pointer)
            identifier = node.get("$id", node.get("id")) if pointer != "#" else None
            if isinstance(identifier, str) and identifier.startswith("#"):  # "#name" is an anchor in JSON schema drafts 4 to 7
                self._anchors.setdefault(identifier, []).append(pointer)
            self.has_embedded_ids |= isinstance(identifier, str) and "$id" in node and not identifier.startswith("#")

    def target_pointer(self, reference: object) -> str | None:
        """Return the JSON pointer of the subschema that a reference points to; None if it is outside this schema or ambiguous."""
        if not isinstance(reference, str) or self.has_embedded_ids:
            return None
        url, fragment = urldefrag(urljoin(self._base, reference))
        if url != urldefrag(self._base)[0]:
            return None
        if not fragment or fragment.startswith("/"):
            return f"#{unquote(fragment)}"
        pointers = self._anchors.get(f"#{fragment}", [])
        return pointers[0] if len(pointers) == 1 else None

    def resolve(self, reference: object) -> Any:
        """Return the subschema that a reference such as `$ref` points to; None if it is outside this schema or ambiguous."""
        pointer = self.target_pointer(reference)
        node: Any = None if pointer is None else self.root
        for part in () if pointer is None else pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isascii() and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                return None
        return node

    def literals(self, schema: object, depth: int = 8) -> list[Any] | None:
        """Return all values that a schema may allow; None if it does not list them or lists too many.

        Args:
            depth: maximum depth of nested `$ref`, `anyOf` and `oneOf`.
        """
        if not isinstance(schema, dict) or depth == 0:
            return [] if schema is False else None
        if isinstance(schema.get("enum"), list):
            return list(schema["enum"]) if len(schema["enum"]) <= _MAX_LITERALS else None
        if "const" in schema:
            return [schema["const"]]
        if schema.get("type") in ("boolean", "null"):
            return [False, True] if schema["type"] == "boolean" else [None]
        low, high = schema.get("minimum"), schema.get("maximum")
        if schema.get("type") == "integer" and isinstance(low, int) and isinstance(high, int) and high - low < _MAX_LITERALS:
            return list(range(low, high + 1))
        if "$ref" in schema:
            return self.literals(self.resolve(schema["$ref"]), depth - 1)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                parts = [self.literals(one, depth - 1) for one in schema[name]]
                values = [value for part in parts if part is not None for value in part]
                return values if None not in parts and len(values) <= _MAX_LITERALS else None
        return None


def objects_of(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield all JSON objects in a schema with their JSON pointers."""
    pending: list[tuple[str, Any]] = [("#", root)]
    while pending:
        pointer, node = pending.pop()
        if isinstance(node, dict):
            yield pointer, node
            pending += [(f"{pointer}/{escape_key(key)}", one) for key, one in node.items() if isinstance(one, dict | list)]
        elif isinstance(node, list):
            pending += [(f"{pointer}/{index}", one) for index, one in enumerate(node) if isinstance(one, dict | list)]


def escape_key(key: str) -> str:
    """Escape a key for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def canonical_json(value: object) -> str:
    """Return a string that is the same for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_without_integer_floats(value), sort_keys=True)


def _without_integer_floats(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_without_integer_floats(one) for one in value]
    return {name: _without_integer_floats(one) for name, one in value.items()} if isinstance(value, dict) else value
