"""What is installed: versions of packages, and the pip command that adds an optional dependency (an extra) to this package."""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def package_versions(*names: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def install_command(extra: str) -> str:
    """Return the command that adds an extra, such as `pip install 'paceline[grammar]'`, from the source that the package came from.

    Source: PEP 610; for packages that did not come from a package index, pip writes their URL to `direct_url.json`.
    """
    try:
        record = metadata.distribution("paceline").read_text("direct_url.json")
        arguments = shlex.quote(f"paceline[{extra}]") if record is None else _pip_arguments(json.loads(record), extra)
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError, AttributeError):  # direct_url.json is missing or damaged
        arguments = None
    return f"pip install {arguments}" if arguments else f"pip install '.[{extra}]' in a clone of paceline"


def _pip_arguments(record: Mapping[str, Any], extra: str) -> str | None:
    """Return the arguments of pip; None = the directory that the package was installed from no longer exists."""
    url = urlsplit(record["url"])
    if url.scheme != "file":
        version_control = record.get("vcs_info")
        source = f"{version_control['vcs']}+{record['url']}@{version_control['commit_id']}" if version_control else record["url"]
        return shlex.quote(f"paceline[{extra}] @ {source}")
    from urllib.request import url2pathname  # slow to import

    path = Path(url2pathname(url.path))
    is_editable = record.get("dir_info", {}).get("editable", False)
    return f"{'-e ' if is_editable else ''}{shlex.quote(f'{path}[{extra}]')}" if path.exists() else None
