"""One page of metrics for several replicas."""

import re
from collections.abc import Mapping

_ENGINE = re.compile(r'(?<=[{,])engine="[^"]*"')


def merged_metrics(pages: Mapping[str, str]) -> str:
    """The samples of all pages, family by family, each with the name of its replica as the label `engine`.

    Args:
        pages: Prometheus's text form by the name of the replica.
    """
    families: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                families.setdefault(family, [])
            if line.startswith("#"):
                if line not in families[family]:
                    families[family].append(line)
            elif line:
                families[family].append(_ENGINE.sub(f'engine="{replica}"', line, count=1))
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
