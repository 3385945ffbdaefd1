"""How this package came to be installed, and so how a user adds an extra to it."""

import json
import shlex
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def install_extra(extra: str) -> str:
    """The command that adds an extra, such as `pip install 'paceline[grammar]'`, from wherever this package was installed.

    Source: PEP 610, the record `direct_url.json` that installers leave beside what did not come from an index.
    """
    try:
        record = metadata.distribution("paceline").read_text("direct_url.json")
        arguments = shlex.quote(f"paceline[{extra}]") if record is None else _arguments(json.loads(record), extra)
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError, AttributeError):  # no record we can read
        arguments = None
    return f"pip install {arguments}" if arguments else f"pip install '.[{extra}]' in a clone of paceline"


def _arguments(record: Mapping[str, Any], extra: str) -> str | None:
    """Arguments for pip; None if the files it was installed from are gone."""
    url = urlsplit(record["url"])
    if url.scheme != "file":
        version_control = record.get("vcs_info")
        source = f"{version_control['vcs']}+{record['url']}@{version_control['commit_id']}" if version_control else record["url"]
        return shlex.quote(f"paceline[{extra}] @ {source}")
    from urllib.request import url2pathname  # takes a while to import

    path = Path(url2pathname(url.path))
    is_editable = record.get("dir_info", {}).get("editable", False)
    return f"{'-e ' if is_editable else ''}{shlex.quote(f'{path}[{extra}]')}" if path.exists() else None
