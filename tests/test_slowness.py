"""``--fail-slow`` in a pytest of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import time
import pytest

def compute():
    begun = time.process_time()
    while time.process_time() < begun + 0.3:
        pass

@pytest.fixture
def prepared():
    compute()

def test_computes():
    compute()

def test_is_prepared(prepared):
    pass

@pytest.mark.slow
def test_is_marked():
    compute()

def test_waits():
    time.sleep(0.4)

def test_does_little():
    pass
"""
CONFIGURATION = """
from tests.slowness import SlowTests

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")
    config.pluginmanager.register(SlowTests(0.2))
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_what_computes_long_unmarked_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    """In its call as in what a fixture prepares; who waits for the machine does not."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(CONFIGURATION)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=3, failed=1, errors=1)
    result.stdout.fnmatch_lines_random(["*test_computes took 0.* s in its call, more than 0.2 s*"])
    result.stdout.fnmatch_lines_random(["*test_is_prepared took 0.* s in its setup*"])
