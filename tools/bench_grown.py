"""The grown pair in every precision, beside other programs: several runs of `paceline bench`, and one table of all of them.

    python tools/grow.py --help                      (makes the pair)
    python tools/bench_grown.py --pair DIR --out DIR --minutes 80 --peer llama.cpp --peer openvino_genai

A part that --out holds already is not run again; --parts names some. Q4_K_M is a GGUF file that llama.cpp's own tools make of the target,
so it takes that peer's environment.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_machine import REPOSITORY, markdown_table

sys.path[:0] = [str(REPOSITORY / "src")]

from paceline.benchmarking.peers import PEERS  # noqa: E402
from paceline.benchmarking.peers.environment import environment_python  # noqa: E402

EXPORT = REPOSITORY / "src/paceline/benchmarking/peers/export_gguf.py"
FEW = "chat,code,copying"
OURS = ("ngram", "suffix", "prediction", "draft_model", "suffix+draft_model")


@dataclass(frozen=True, slots=True)
class Part:
    """One run: its settings, and the share of the time that it gets."""

    name: str
    quantization: str
    share: float
    workloads: str | None = FEW
    temperatures: str = "0"
    has_peers: bool = True
    is_gguf: bool = False

    def takes(self, peer: str) -> bool:
        """Whether a peer runs in it: those that read the part's files."""
        return self.has_peers and (not self.is_gguf or "gguf" in PEERS[peer].formats)


PARTS = (
    Part("int8", "int8", 0.30, workloads=None),
    Part("int8-sampled", "int8", 0.22, workloads=None, temperatures="0.7,1", has_peers=False),
    Part("bf16", "none", 0.20),
    Part("int4", "int4", 0.13),
    Part("q4_k_m", "none", 0.15, is_gguf=True),
)


def run_part(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """What a part measured, now or earlier."""
    file = options.out / f"{part.name}.json"
    if not file.is_file():
        model = quantised_file(options) if part.is_gguf else options.pair / "target"
        command = [
            sys.executable,
            "-m",
            "paceline",
            "bench",
            "--model",
            model,
            "--draft-model",
            options.pair / "draft-15",
            "--quantization",
            part.quantization,
        ]
        command += [word for name in (*OURS, options.pair / "draft-small") for word in ("--drafter", name)]
        command += ["--workload", part.workloads] if part.workloads else []
        command += [word for peer in options.peer if part.takes(peer) for word in ("--peer", peer)]
        command += ["--temperature", part.temperatures, "--tokens", options.tokens, "--num-prompts", options.num_prompts]
        command += ["--rounds", options.rounds, "--minutes", part.share * options.minutes, "--offline"]
        command += ["--json", file, "--html", file.with_suffix(".html")]
        print("+", *command, flush=True)
        subprocess.run([str(word) for word in command], check=False, cwd=options.out)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def quantised_file(options: argparse.Namespace) -> Path:
    """The target as llama.cpp's users have it."""
    path: Path = options.out / "target-Q4_K_M.gguf"
    if not path.is_file():
        python = environment_python(PEERS["llama.cpp"])
        if python is None:
            raise SystemExit("Q4_K_M needs llama.cpp's tools: paceline bench --install-peers llama.cpp, or leave it out of --parts")
        partial = path.with_suffix(".partial")
        subprocess.run([str(python), EXPORT, options.pair / "target", partial, "Q4_K_M"], check=True)
        os.replace(partial, path)
    return path


def rows_of(name: str, report: Mapping[str, Any]) -> list[list[str]]:
    """A line for each workload and temperature: ours and the best of the others, as multiples of our plain one."""
    own = [mode["name"] for mode in report["modes"] if mode["program"] == "paceline" and mode["name"] != "plain"]
    groups: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        groups.setdefault((cell["workload"], cell["temperature"]), {})[cell["mode"]] = cell
    lines = []
    for (workload, temperature), cells in groups.items():
        plain = cells["plain"]["tokens_per_s"]
        peers = {mode: cell["ratio"]["median"] for mode, cell in cells.items() if mode != "plain" and mode not in own and cell["ratio"]}
        best = max(peers, key=lambda mode: peers[mode], default=None)
        best_plain = max((value for mode, value in peers.items() if mode.endswith("plain")), default=None)
        lines.append(
            [
                name,
                workload,
                f"{temperature:g}",
                f"{plain['median']:.1f}" if plain else "-",
                *(_ratio(cells.get(mode)) for mode in own),
                "-" if best_plain is None else f"{best_plain:.2f}",
                "-" if best is None else f"{best} {peers[best]:.2f}",
            ]
        )
    return [["weights", "workload", "T", "plain, tokens/s", *(f"{mode}, × plain" for mode in own), "best plain peer", "best peer"], *lines]


def _ratio(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["ratio"] is None:
        return "-"
    ratio = cell["ratio"]
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{ratio['median']:.2f}{interval}" + (f" [{cell['refusal']}]" if cell["refusal"] else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=lambda text: Path(text).resolve(), required=True, help="with target, draft-15 and draft-small")
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), required=True, help="for reports")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], default=[part.name for part in PARTS])
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        choices=sorted(PEERS),
        help="several times for several; a part takes those that read its files",
    )
    parser.add_argument("--minutes", type=float, default=80.0, help="for all parts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part.name in options.parts:
            head, *lines = rows_of(part.name, run_part(part, options))
            table = markdown_table(head, lines)
            (options.out / f"{part.name}.md").write_text(table + "\n", encoding="utf-8")
            print(f"\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
