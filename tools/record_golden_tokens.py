"""Record the token ids that tests/exact/test_golden_tokens.py compares with: by plain decoding, with what is in the working tree.

    python tools/record_golden_tokens.py --shared ../shared

Targets whose files are absent keep their stored ids. Commit the result only where a change of tokens is intended.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from reporting import REPOSITORY

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from harness.golden_targets import DRAFTERS, GOLDEN, open_golden_target, read_golden, record_golden, write_golden  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared", help="folder of larger test data")
    options = parser.parse_args()
    stored = read_golden() if GOLDEN.is_file() else {}
    mini, found = REPOSITORY / "src" / "paceline" / "assets" / "mini" / "target", {}
    with tempfile.TemporaryDirectory() as folder:
        for name in DRAFTERS:
            target = open_golden_target(name, Path(folder) / name, mini, options.shared)
            found[name] = stored[name] if target is None else record_golden(target)
            changed = [field for field, lists in found[name].items() if stored.get(name, {}).get(field) != lists]
            print(f"{name}: {'files absent, kept' if target is None else ', '.join(changed) or 'unchanged'}")
    write_golden(found)


if __name__ == "__main__":
    main()
