"""The command line: what each command prints and writes, and what it refuses in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch

import fxremat
from fxremat import planner
from fxremat.cli import main
from fxremat.cli.arguments import read_problem
from fxremat.cli.solve import ProgressLine
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem, problem_to_json
from fxremat.planner import SolverOptions
from fxremat.planner.plans import make_plan
from fxremat.planner.solvers import Progress
from fxremat.report.exports import chrome_trace, memory_snapshot
from fxremat.report.files import write_report
from fxremat.report.page import page_of
from fxremat.sizes import format_bytes
from tests.chains import chain_with_copies, phased_chain, skipping
from tests.conftest import Golden
from tests.pages import small_front
from tests.small import stack_and_input
from tests.step_reports import Terminal, moving, planned

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]
STORE_ALL = 33  # bytes of `phased_chain(8)`


@pytest.fixture
def problem(tmp_path: Path) -> str:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem_to_json(phased_chain(8))))
    return str(path)


# --- solve and check ----------------------------------------------------------------------


def test_solve_text(problem: str, tmp_path: Path, run: Run, golden: Golden) -> None:
    out = str(tmp_path / "plan.json")
    given = ["--budget", "80%", "--solver", "greedy", "--out", out]
    status, printed, error = run("solve", problem, *given)
    assert (status, error) == (0, "")
    golden(re.sub(r"(?m)^(seconds +)[0-9.]+$", r"\1...", printed).replace(out, "plan.json"))


@pytest.mark.parametrize("budget", ["80%", "26", "26B", "0.026kB"])
def test_solve_and_check(problem: str, tmp_path: Path, run: Run, budget: str) -> None:
    out = tmp_path / "plan.json"
    given = ["--budget", budget]
    assert run("solve", problem, *given, "--solver", "greedy", "--out", out)[0] == 0
    assert check(phased_chain(8), json.loads(out.read_text())["steps"], 26).ok
    status, printed, _ = run("check", problem, out, *given)
    assert status == 0
    assert "ok: peak 2" in printed
    steps = phased_chain(8).base_steps()
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"steps": [*steps[1:], "y0"]}))
    for wrong, said in (([out, "--budget", "10"], "over budget"), ([bad], "read is not there")):
        status, printed, _ = run("check", problem, *wrong)
        assert status == 1
        assert said in printed


def test_solve_and_check_with_moves(tmp_path: Path, run: Run) -> None:
    path, out = tmp_path / "net.json", tmp_path / "plan.json"
    path.write_text(json.dumps(problem_to_json(chain_with_copies(8, copies=None))))
    moves = ["--host-bandwidth", "10MB/s"]  # ten bytes per microsecond
    given = [str(path), "--budget", "507"]
    solve, look = ["solve", *given, "--solver", "greedy", *moves], ["check", path, out]
    assert "moved     " in run(*solve, "--out", out)[1]
    assert run("check", path, out, "--budget", "507", *moves)[0] == 0
    for more, said in (
        ([*moves, "--host-memory", "150"], "over host memory"),
        ([], "the problem has no copies"),
    ):
        status, printed, _ = run(*look, *more)
        assert status == 1
        assert said in printed
    status, printed, _ = run(*solve, "--host-memory", "0")
    assert status == 0
    assert "moved" not in printed


def test_times_of_another_device(tmp_path: Path, run: Run, refused: Refused) -> None:
    trace = ["trace", "tests.small:stack_and_input", "--out", tmp_path / "problem.json"]

    def traced(*given: str) -> Problem:
        assert run(*trace, *given)[0] == 0
        return read_problem(str(tmp_path / "problem.json"))

    assert traced("--device", "H100").base_time_us < traced("--device", "cpu").base_time_us
    moving = traced("--device", "H100", "--copies").copies
    assert moving is not None
    assert moving.to_host == moving.to_device > 0
    assert "--copies needs --device" in refused(*trace, "--copies")
    unknown = "unknown device 'H1000'; there are cpu, B200"
    assert unknown in refused(*trace, "--device", "H1000")


def test_a_budget_that_nothing_fits(problem: str, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "plan.json"
    given = ["--budget", "5", "--solver", "greedy", "--out", out]
    least = planner.solve(phased_chain(8), 0, "greedy")
    assert refused("solve", problem, *given, status=1) == (
        f"no plan within 5 bytes; the least peak found is {least.peak_bytes} bytes "
        f"(proven least: {least.peak_bound_bytes})\n"
    )
    assert not out.exists()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int | None, SolverOptions], None]]:
    """What the solver "mine" does before it answers with the base order."""
    acts: list[Callable[[int | None, SolverOptions], None]] = []

    def solve(problem: Problem, budget: int | None, options: SolverOptions) -> Plan:
        for act in acts:
            act(budget, options)
        return make_plan(problem, problem.base_steps(), "mine", budget_bytes=budget)

    monkeypatch.setitem(planner.SOLVERS, "mine", solve)
    return acts


@pytest.mark.parametrize(("limit", "given"), [(None, []), (7.5, ["--time-limit", "7.5"])])
def test_solver_and_limit_are_passed_on(
    problem: str, mine: list[Any], limit: float | None, given: list[str], run: Run
) -> None:
    asked = []
    mine.append(lambda budget, given: asked.append((budget, given.time_limit_s, given.progress)))
    _, printed, _ = run("solve", problem, "--budget", "1MiB", "--solver", "mine", *given)
    assert asked == [(2**20, limit, None)]
    assert "solver    mine" in printed


def test_ctrl_c_gives_the_best_plan_so_far(
    problem: str, mine: list[Any], run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of solving it ends the command."""
    mine.append(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    status, printed, error = run("solve", problem, "--budget", "100%", "--solver", "mine")
    assert status == 0
    assert "solver    mine" in printed
    assert "interrupted" in error
    assert signal.getsignal(signal.SIGINT) is before
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("fxremat.cli.arguments.problem_from_json", interrupted)
    line = refused("solve", problem, "--budget", "5", status=130)
    assert line == "fxremat: interrupted\n"


# --- budgets ------------------------------------------------------------------------------


# --- progress -----------------------------------------------------------------------------


def test_progress_is_throttled_and_cleared() -> None:
    stream = Terminal()
    line = ProgressLine(stream, 100.0, None)
    for _ in range(1000):
        line(Progress("mip", 1.0, 101.0, None))
    assert stream.getvalue() == "\r\x1b[Kmip: best +1.0% time, 1 s"
    line.last = -1e9
    line(Progress("mip", 2.0, 101.0, None))
    assert stream.getvalue().count("\x1b[K") == 2
    line.clear()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(
    problem: str, mine: list[Any], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    def tell(budget: int | None, options: SolverOptions) -> None:
        if options.progress is not None:
            options.progress(Progress("mine", 0.5, None, None))

    mine.append(tell)
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["solve", problem, "--budget", "100%", "--solver", "mine"]) == 0
    shown = "\r\x1b[Kmine: no plan yet, 0 s\r\x1b[K"
    assert stream.getvalue() == (shown if terminal else "")


# --- pareto -------------------------------------------------------------------------------


def test_pareto(problem: str, tmp_path: Path, run: Run) -> None:
    out, picture = tmp_path / "front.json", tmp_path / "front.svg"
    files = ["--out", out, "--picture", picture]
    _, printed, _ = run("pareto", problem, "--budget", "80%", *files)
    data = json.loads(out.read_text())
    assert data["budget_bytes"] == int(0.8 * STORE_ALL)
    assert [point["peak_bytes"] for point in data["points"]] == [
        plan.peak_bytes for plan in planner.front(phased_chain(8))
    ]
    assert (data["points"][0]["of_store_all"], data["points"][0]["added"]) == (1.0, 0.0)
    assert all(f"{point['peak_bytes']:,} " in printed for point in data["points"])
    assert "fastest of these within" in printed
    assert f"written   {picture}" in printed
    assert any("budget" in (e.text or "") for e in ElementTree.parse(picture).iter())
    assert "within" not in run("pareto", problem)[1]


# --- what is refused ----------------------------------------------------------------------

REFUSED: dict[str, list[str]] = {
    "no command": [],
    "missing file": ["solve", "missing.json", "--budget", "80%"],
    "not JSON": ["solve", "text.json", "--budget", "80%"],
    "not text": ["solve", "bytes.json", "--budget", "80%"],
    "a directory": ["solve", ".", "--budget", "80%"],
    "another format": ["pareto", "plan.json"],
    "a field of the wrong type": ["solve", "field.json", "--budget", "80%"],
    "no budget": ["solve", "problem.json"],
    "bad budget": ["solve", "problem.json", "--budget", "lots"],
    "budget of nothing": ["solve", "problem.json", "--budget", "0"],
    "negative percentage": ["solve", "problem.json", "--budget=-3%"],
    "percentage of nothing": ["check", "problem.json", "plan.json", "--budget", "nan%"],
    "unknown unit": ["pareto", "problem.json", "--budget", "8XB"],
    "unknown solver": ["solve", "problem.json", "--budget", "80%", "--solver", "gredy"],
    "bad time limit": ["solve", "problem.json", "--budget", "80%", "--time-limit", "-1"],
    "time limit of words": ["pareto", "problem.json", "--time-limit", "soon"],
    "plan without steps": ["check", "problem.json", "plan.json"],
    "plan not JSON": ["check", "problem.json", "text.json"],
    "missing plan": ["check", "problem.json", "missing.json"],
    "output nowhere": ["pareto", "problem.json", "--out", "nowhere/front.json"],
    "rate of words": ["solve", "problem.json", "--budget", "80%", "--host-bandwidth", "fast"],
    "host memory alone": ["solve", "problem.json", "--budget", "80%", "--host-memory", "1GiB"],
    "no function": ["trace", "models", "--out", "x"],
    "no module": ["trace", "no_such_module:f", "--out", "x"],
    "a config of nothing": ["explain", "empty", "--device", "cpu"],
    "no config": ["fit", "plan.json", "--device", "cpu"],
    "no device": ["fit", "models:small", "--vary", "batch=0:0"],
    "no step": ["page", "page.html"],
    "no report": ["page", "page.html", "plan.json"],
    "report of a list": ["explain", "list.json"],
    "report not JSON": ["page", "page.html", "text.json"],
    "missing report": ["page", "page.html", "missing.json"],
    "no front": ["page", "page.html", "missing.json", "--front", "plan.json"],
    "front of a list": ["page", "page.html", "missing.json", "--front", "list.json"],
    "batch of nothing": ["explain", "models:small", "--device", "cpu", "--batch", "0"],
    "batch of a function": ["explain", "models:small", "--device", "cpu", "--batch", "2"],
}


def test_refused_in_one_line(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden, refused: Refused
) -> None:
    """Exit status 2, and one line that names the file, the field or the argument."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planner, "SOLVERS", {"greedy": None, "least_peak": None})
    monkeypatch.setattr("fxremat.cli.arguments.SOLVERS", planner.SOLVERS)
    Path("text.json").write_text("no JSON")
    Path("list.json").write_text("[]")
    Path("bytes.json").write_bytes(b"\xff\xff")
    Path("empty").mkdir()
    Path("plan.json").write_text('{"format": "plan"}')
    data: Any = problem_to_json(phased_chain(8))
    data["ops"][3]["time_us"] = "long"
    Path("field.json").write_text(json.dumps(data))
    lines = []
    for name, arguments in REFUSED.items():
        if name == "output nowhere":
            monkeypatch.setattr("fxremat.cli.solve.front", lambda *_: ())
        lines.append(f"{name}: {refused(*arguments)}")
    golden("".join(lines))
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["solv"], "solve"),
        (["trace", "a:b", "--out", "x", "--mode", "slow"], "aot_eager"),
        (["solve", "skipping.json", "--budget", "80%", "--solver", "rotor"], "not a chain"),
    ],
)
def test_what_there_is_instead_is_named(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("skipping.json").write_text(json.dumps(problem_to_json(skipping())))
    line = refused(*arguments)
    assert said in line
    assert "rotor" not in arguments or "hrockmate" in line


# --- info ---------------------------------------------------------------------------------


def test_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Versions, devices, what is supported, caches with their sizes, and what is set."""
    inductor = tmp_path / "inductor"
    (inductor / "fxremat").mkdir(parents=True)
    (inductor / "code.py").write_bytes(b"x" * 100)
    (inductor / "fxremat" / "plan.json").write_bytes(b"x" * 10)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("FXREMAT_SOLVER", "greedy")
    monkeypatch.setenv("FXREMAT_SLOVER", "greedy")
    found = json.loads(run("info", "--json")[1])
    assert found["versions"]["fxremat"] == fxremat.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][-1]["name"] == "cpu"
    assert found["devices"][-1]["bytes"] > 2**20
    assert found["support"]["ROCm"] == "not tried"
    assert [one["bytes"] for one in found["caches"]] == [110, 10, 0]
    assert found["settings"]["FXREMAT_SOLVER"] == "greedy"
    assert "there is no such option" in found["settings"]["FXREMAT_SLOVER"]
    status, printed, _ = run("info")
    assert status == 0
    assert f"10 B in {inductor / 'fxremat'}" in printed
    assert re.search(r"FXREMAT_SLOVER +greedy \(there is no such option\)", printed)


def test_what_is_not_supported_is_named(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    support = json.loads(run("info", "--json")[1])["support"]
    assert support["ROCm"] == "not tried, and this is one"
    assert support["XPU"] == "not supported, and this is one"
    assert support["CPU"] == "yes"


# --- explain ------------------------------------------------------------------------------


def test_files_of_two_graphs(tmp_path: Path, run: Run, refused: Refused) -> None:
    """And one that cannot be written."""
    reports = [planned(), replace(moving(), graph=1)]
    for report in reports:
        write_report(str(tmp_path), report)
    front = tmp_path / "front.json"
    front.write_text(json.dumps(small_front().to_json()))
    page, trace, snapshot = (tmp_path / name for name in ("a.html", "a.json", "a.pickle"))
    given = [tmp_path / f"graph_{n}.report.json" for n in (0, 1)]
    _, printed, _ = run("page", page, *given, "--front", front)
    assert printed.startswith(planned().summary())
    assert f"written   {page}" in printed
    _, printed, _ = run("explain", *given, "--perfetto", trace, "--memory-viz", snapshot)
    assert printed.startswith(str(planned()))
    assert f"written   {trace}" in printed
    assert page.read_text() == page_of(reports, small_front())
    assert json.loads(trace.read_text()) == chrome_trace(reports)
    assert pickle.loads(snapshot.read_bytes()) == memory_snapshot(reports)
    nowhere = refused("explain", *given, "--memory-viz", tmp_path / "no" / "file")
    assert "No such file or directory" in nowhere


def test_a_step_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, refused: Refused
) -> None:
    """The report is that of `fxremat.explain`; what does not fit is refused in one line."""
    monkeypatch.setenv("FXREMAT_VARIANTS", "none")
    monkeypatch.setenv("FXREMAT_SOLVER", "greedy")
    step = ["tests.small:stack_and_input", "--device", "cpu", "--optimizer", "none"]
    page = tmp_path / "step.html"
    _, printed, _ = run("page", page, *step, "--budget", "1MiB")
    assert page.read_text().startswith("<!")
    model, given = stack_and_input()
    (graph,) = fxremat.explain(model, *given, memory_budget="1MiB").graphs
    assert f"-> {format_bytes(graph.predicted_peak_bytes)} of 1.00 MiB" in printed
    line = refused("explain", *step, "--budget", "1B", status=1)
    assert "the least that fxremat can plan is" in line
    assert "What to do: set memory_budget=" in line
