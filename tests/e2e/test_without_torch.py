"""A program that has no torch."""

import os
import subprocess
import sys
from pathlib import Path

from harness.checkpoints import write_byte_level_tokenizer


def test_opening_a_tokenizer_without_torch_warns_nothing(tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path)
    program = """if True:
        import os, sys
        sys.modules["torch"] = None
        before = dict(os.environ)
        from pathlib import Path
        from paceline.tokenizer.tokenizer import Tokenizer
        Tokenizer.open(Path(sys.argv[1]))
        assert "transformers" in sys.modules
        assert dict(os.environ) == before
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS")}
    done = subprocess.run([sys.executable, "-c", program, tmp_path], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
