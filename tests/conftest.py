"""What every test shares: golden texts, few threads, a cache for one run, kernels without vectors.

``pytest --update-golden`` writes the golden texts anew. ``HYPOTHESIS_PROFILE=long`` looks at many
random examples instead of a few fixed ones (see `tests.examples`). ``pytest --fail-slow SECONDS``
fails tests that take longer and are not marked ``slow``, which `make test` leaves out.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

THREADS = "2"
os.environ.setdefault("OMP_NUM_THREADS", THREADS)  # read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # workers share the cores: no waiting in loops
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # nor processes of their own for g++

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch._dynamo import config as dynamo_config  # noqa: E402
from torch._dynamo import guards  # noqa: E402
from torch._functorch._aot_autograd import graph_compile  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402
from torch._inductor import cpu_vec_isa  # noqa: E402

from tests import examples, slowness  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
OP_TIMES = "FXREMAT_OP_TIMES"
TORCH_TRACE = "torch.__trace"
"""Torch writes each graph to this logger if anybody listens."""
NO_VECTORS = 1
"""As many numbers at a time: g++ takes half as long for a kernel of Inductor's."""
NEW_OBJECTS = 20_000
"""Until garbage is looked for: tracing makes some hundred thousand, nearly none of them garbage."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of these tests, see above."""
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
    parser.addoption(
        "--fail-slow", type=float, metavar="SECONDS", help="fail unmarked tests that take longer"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settings of the whole session; the user's own fxremat settings do not reach the tests.

    The processes of one run share a cache, which is empty when the run begins.
    """
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", examples.SHORT))
    torch.set_num_threads(int(THREADS))
    gc.set_threshold(NEW_OBJECTS)
    inductor_config.cpp.simdlen = NO_VECTORS
    inductor_config.cpp.vec_isa_ok = False  # otherwise g++ tries each kind of vectors
    for name in ("enable_frame_pointer", "enable_line_tables"):  # nobody profiles the kernels
        if hasattr(inductor_config.aot_inductor, name):
            setattr(inductor_config.aot_inductor, name, False)
    dynamo_config.run_gc_after_compile = False  # there is little to find, see NEW_OBJECTS
    _leave_guards_unmeasured()
    _leave_graphs_unwritten()
    _seed_what_is_there()
    logging.getLogger(TORCH_TRACE).propagate = True  # pytest listens to those that do not
    for name in [name for name in os.environ if name.startswith("FXREMAT_")]:
        del os.environ[name]
    os.environ[OP_TIMES] = "roofline"  # plans do not depend on what else the machine does
    most_seconds = config.getoption("--fail-slow")
    if most_seconds is not None:
        config.pluginmanager.register(slowness.SlowTests(most_seconds))
    if not _is_worker(config):
        os.environ[CACHE] = tempfile.mkdtemp(prefix="fxremat-tests-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """What was imported stays."""
    keep_what_is_there()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So does what torch has imported and keeps since, once the test has let go of its own."""
    if nextitem is None or nextitem.path != item.path:
        keep_what_is_there()


def keep_what_is_there() -> None:
    """Collecting garbage, before each measurement, need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache of this run."""
    if not _is_worker(config):
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)


def _leave_guards_unmeasured() -> None:
    """Torch empties the processor's cache after each trace, to log how long guards take."""
    if hasattr(guards, "profile_guard_manager"):  # torch's own, and not of every version
        guards.profile_guard_manager = lambda *_: 0.0


def _leave_graphs_unwritten() -> None:
    """Torch writes each joint graph and its halves as text, whether anybody reads it or not."""
    for name, nothing in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
        if hasattr(graph_compile, name):  # torch's own, and not of every version
            setattr(graph_compile, name, lambda *_, nothing=nothing: nothing)


def _seed_what_is_there() -> None:
    """For each seed torch writes the stack down, once for each kind of device that is not there."""
    devices: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for device in devices:
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes that pytest-xdist starts."""
    return hasattr(config, "workerinput")


class Golden:
    """Compares a text with the one stored for this test."""

    def __init__(self, path: Path, update: bool) -> None:
        self.path = path
        self.update = update

    def __call__(self, text: str) -> None:
        """Fail unless ``text`` is the stored one; with ``--update-golden``, store it."""
        text = text.rstrip("\n") + "\n"
        if self.update:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(text, encoding="utf-8")
        if not self.path.exists():
            pytest.fail(f"no golden text {self.path.name}; make it with pytest --update-golden")
        assert text == self.path.read_text(encoding="utf-8"), "pytest --update-golden accepts it"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """``golden(text)`` compares with ``tests/golden/<test name>.txt``."""
    name = re.sub(r"\W+", "_", request.node.name).strip("_")
    return Golden(GOLDEN / f"{name}.txt", request.config.getoption("--update-golden"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``run("solve", path)`` runs a command of fxremat: its exit status, output and errors."""
    from fxremat.cli import main

    return lambda *words: (main([*map(str, words)]), *capsys.readouterr())


@pytest.fixture
def refused(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """The line that a command of fxremat prints which fails, with exit status 2 unless said."""

    def refusal(*words: object, status: int = 2) -> str:
        found, _, error = run(*words)
        assert (found, error.count("\n")) == (status, 1), error
        return error

    return refusal


@pytest.fixture
def fresh() -> Iterator[None]:
    """No code that another test had compiled, and none is left."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def fresh_budgets() -> Iterator[None]:
    """Nor graphs that share a budget with those of another test."""
    from fxremat.step import scope

    torch._dynamo.reset()
    scope.forget()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def stack() -> Iterator[Any]:
    """A small model that has run once, for steps in an arena."""
    from fxremat.step import scope
    from tests.placing import Small
    from tests.small import Stack

    torch._dynamo.reset()
    scope.forget()
    made = Small(Stack, 16, 32)
    made.step()
    yield made
    torch._dynamo.reset()


@pytest.fixture
def only_rank(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank of a job."""
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: tests that have calls timed ask for no true times."""
    from fxremat.cost import timing

    monkeypatch.setattr(timing, "waiting_s", lambda device: 0.0)


@pytest.fixture
def vectors() -> Iterator[None]:
    """Kernels as users have them, with the vectors of this machine."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    with inductor_config.patch({"cpp.simdlen": None, "cpp.vec_isa_ok": None}):
        yield
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
