"""Ask a public database for known vulnerabilities of the installed packages; where none can be reached, say so in one line and pass.

    python tools/audit_packages.py

Exit code 1: there are some, and pip-audit's table says which.
"""

import importlib.util
import socket
import subprocess
import sys

DATABASE = "api.osv.dev"
WAIT_S = 3
COMMAND = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--skip-editable", "--progress-spinner", "off"]


def why_not() -> str | None:
    """What keeps the packages from being audited."""
    if importlib.util.find_spec("pip_audit") is None:
        return "pip-audit is not installed"
    try:
        socket.create_connection((DATABASE, 443), timeout=WAIT_S).close()
    except OSError as error:
        return f"{DATABASE} cannot be reached ({error.strerror or error})"
    return None


def main() -> int:
    """The exit code."""
    reason = why_not()
    if reason is not None:
        print(f"packages not audited: {reason}")
        return 0
    return subprocess.run(COMMAND, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
