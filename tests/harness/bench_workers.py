"""Workers of programs that do not exist, for tests of the benchmark; run as scripts, they import nothing of paceline.

Arguments are how they behave: `drafts=3` (accepted draft tokens a step), `text=other` (other tokens), `loops`, `dies=2` and
`hangs=2` (at the second request), `refuses`, `nonsense`, `silent` (no counts), `child` (starts a process that would outlive it).
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

STEP_S = 0.001


def tokens_of(prompt: list[int], count: int, words: dict[str, str]) -> list[int]:
    period = 4 if "loops" in words else 100_003
    start = sum(prompt) + (1 if words.get("text") == "other" else 0)
    return [(start + 7 * (index % period)) % 4096 for index in range(count)]


def answer(request: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    tokens = tokens_of(request["prompt_ids"], request["max_tokens"], words)
    step = 1 + int(words.get("drafts", 0))
    times = [STEP_S * (1 + -(-index // step)) for index in range(len(tokens))]
    num_steps = 1 + -(-(len(tokens) - 1) // step)
    counts: dict[str, Any] = {"num_draft_tokens": (num_steps - 1) * (step - 1), "num_accepted_tokens": len(tokens) - num_steps}
    if "silent" in words:
        counts = {"num_draft_tokens": None, "num_accepted_tokens": None}
    return {"token_ids": tokens, "times_s": times, "first_token_s": times[0], "seconds": times[-1], "peak_rss_bytes": 1000, **counts}


def say(text: str, *, stream: TextIO = sys.stdout) -> None:
    stream.write(text + "\n")
    stream.flush()


def main() -> None:
    words = dict(word.partition("=")[::2] for word in sys.argv[1:])
    order = json.loads(sys.stdin.readline())
    if "log" in words:
        Path(words["log"]).write_text(json.dumps(order))
    if "refuses" in words:
        say(json.dumps({"error": "this model is too new"}))
        return
    if "child" in words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(words["child"]).write_text(str(child.pid))
    say(json.dumps({"ready": True, "name": "fake", "version": "1", "load_s": 0.0, "note": ""}))
    for number, line in enumerate(sys.stdin, 1):
        if words.get("dies") == str(number):
            say("out of luck", stream=sys.stderr)
            sys.exit(3)
        if words.get("hangs") == str(number):
            time.sleep(600)
        if "order" in words:
            with Path(words["order"]).open("a") as log:
                log.write(words["name"] + "\n")
        given = json.loads(line)
        if "batch" in given:
            outputs = [answer(one, words) for one in given["batch"]]
            found: dict[str, Any] = {"outputs": outputs, "seconds": max(one["seconds"] for one in outputs)}
        else:
            found = answer(given, words)
        say("no JSON" if "nonsense" in words else json.dumps(found))


if __name__ == "__main__":
    main()
