"""Options, markers and fixtures every test may use, and one line per test with its time."""

import gc
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.spread import mark_the_others

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_SEED = 20260101
SAVE_INTERVAL_S = 10.0  # between two records of what has passed
TALLY = pytest.StashKey["Counter[str]"]()


class ResumableRun:
    """Stores which tests have passed, so that an interrupted long run can resume.

    A result belongs to a commit and a seed: with uncommitted changes in the sources nothing is stored. Of several processes that run the
    tests each leaves out what passed before, and the one that collects their results stores them.
    """

    KEY = "paceline/passed"

    def __init__(self, cache: pytest.Cache, *, seed: int, resume: bool, is_worker: bool) -> None:
        self._cache, self._is_worker = cache, is_worker
        commit = "" if _git("status", "--porcelain", "--", "src", "tests", "pyproject.toml") else _git("rev-parse", "HEAD")
        self._run = f"{commit} seed {seed}" if commit else ""
        record = cache.get(self.KEY, None) if resume else None
        self.passed_before: set[str] = set(record["passed"]) if record and record["run"] == self._run != "" else set()
        self._passed = sorted(self.passed_before)
        self._saved_s = time.monotonic()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        again = [item for item in items if item.nodeid in self.passed_before]
        if again:
            config.hook.pytest_deselected(items=again)
            items[:] = [item for item in items if item.nodeid not in self.passed_before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._run and not self._is_worker and report.when == "call" and report.passed:
            self._passed.append(report.nodeid)
            if time.monotonic() - self._saved_s > SAVE_INTERVAL_S:  # all of them are written each time
                self._save()

    def pytest_sessionfinish(self) -> None:
        if self._run and not self._is_worker:
            self._save()

    def _save(self) -> None:
        self._cache.set(self.KEY, {"run": self._run, "passed": self._passed})
        self._saved_s = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("paceline")
    group.addoption("--large-counts", action="store_true", help="run the tests marked long, and every other one with its large counts")
    group.addoption("--clients", type=Path, help="folder of the environments of foreign programs; runs tests/clients (make test-clients)")
    group.addoption("--seed", type=int, default=DEFAULT_SEED, help="seed of every random choice a test makes")
    group.addoption("--resume", action="store_true", help="leave out what passed with large counts at this commit with this seed")


def pytest_configure(config: pytest.Config) -> None:
    worker = _worker(config)
    if worker is not None:
        _pin_to_core(int(worker["workerid"].removeprefix("gw")))
    if config.getoption("--large-counts") and getattr(config, "cache", None) is not None:
        seed, resume = config.getoption("--seed"), config.getoption("--resume")
        run = ResumableRun(config.cache, seed=seed, resume=resume, is_worker=worker is not None)
        config.pluginmanager.register(run, "resumable-run")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed, also with -q, which omits the header."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    run = session.config.pluginmanager.get_plugin("resumable-run")
    counts = (
        "large counts"
        if session.config.getoption("--large-counts")
        else "small counts, without long tests (make test-long) and foreign programs (make test-clients)"
    )
    passed_before = f", {len(run.passed_before)} passed before" if run and run.passed_before else ""
    if reporter is not None:
        reporter.write_line(f"seed {session.config.getoption('--seed')}, {counts}{passed_before}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(REPOSITORY / "tests" / "clients"):
            item.add_marker("clients")
    if config.getoption("--clients") is None:
        _deselect(config, items, "clients")
    if not config.getoption("--large-counts"):
        mark_the_others(items)
        _deselect(config, items, "long")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        _skip(items, "gpu", "no CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """While modules are imported nothing becomes garbage: looking for it took a third of the time."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests stay to the end: with their half a million objects each `LLM.close`, which collects, took 0.6 s."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> "Counter[str]":
    """What tests counted, by name; printed at the end of the run."""
    counts: Counter[str] = Counter()
    request.config.stash[TALLY] = counts
    return counts


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tally"] = dict(session.config.stash.get(TALLY, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what one of several processes counted."""
    node.config.stash.setdefault(TALLY, Counter()).update(getattr(node, "workeroutput", {}).get("tally", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, count in sorted(config.stash.get(TALLY, Counter()).items()):
        terminalreporter.write_line(f"{name}: {count:,}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # looked up, not imported: most tests need no torch, and importing it takes seconds
    torch = sys.modules.get("torch")
    num_threads = 1 if _worker(item.config) else 2
    if torch is not None and hasattr(torch, "set_num_threads") and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """With -q, a line `PASSED tests/unit/test_x.py::test_y  0.12s` in place of a dot."""
    if not isinstance(report, pytest.TestReport) or config.get_verbosity() >= 0 or hasattr(report, "wasxfail"):
        return None
    if report.when != "call" and report.passed:
        return None
    category = "error" if report.failed and report.when != "call" else report.outcome
    return category, f"{category.upper()} {report.nodeid}  {report.duration:.2f}s\n", category.upper()


@pytest.fixture(scope="session", autouse=True)
def measured_facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this run keeps what it measured about the machine: no test reads or writes the user's cache."""
    directory = tmp_path_factory.mktemp("facts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session")
def large_counts(pytestconfig: pytest.Config) -> bool:
    """Whether to run with the large counts."""
    return bool(pytestconfig.getoption("--large-counts"))


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """The seed of this run; printed in its header."""
    return int(pytestconfig.getoption("--seed"))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of larger test data that may be next to a checkout."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder ../shared beside this checkout")
    return folder


@pytest.fixture(scope="session")
def clients(pytestconfig: pytest.Config) -> Path:
    """The folder with an environment for every foreign program."""
    return Path(pytestconfig.getoption("--clients")).resolve()


@pytest.fixture(scope="session")
def mini_dir() -> Path:
    """The checkpoint directory of the embedded mini target."""
    return REPOSITORY / "src" / "paceline" / "assets" / "mini" / "target"


def _worker(config: pytest.Config) -> dict[str, Any] | None:
    """Identity of one of several processes that run the tests."""
    return getattr(config, "workerinput", None)


def _pin_to_core(index: int) -> None:
    """Processes that share cores wait for threads of one another: with a core each, two of them take 0.6 of the time of one."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    """Leave tests out without a line for each: skipping thousands of them takes seconds."""
    left_out = {item for item in items if item.get_closest_marker(marker)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _git(*arguments: str) -> str:
    """What git prints, or "" where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
