"""Where measured numbers are kept: what they depend on is in the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fxremat.cost import number_file
from fxremat.cost.number_file import NumberFile, number_path, written_together
from fxremat.disk_cache import write_whole


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that has a name, and nothing else."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    return torch.device("cuda")


@pytest.mark.parametrize("setting", ["benchmark", "deterministic", "enabled"])
def test_numbers_of_a_gpu_are_those_of_the_kernels_it_takes(
    setting: str, gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = number_path(tmp_path, gpu, "workspaces")
    assert "H100" in before.name
    cudnn: Any = torch.backends.cudnn
    monkeypatch.setattr(cudnn, setting, not getattr(cudnn, setting))
    after = number_path(tmp_path, gpu, "workspaces")
    assert before != after
    NumberFile(before).add("a call", 1.0)
    assert NumberFile(before).numbers == {"a call": 1.0}
    assert NumberFile(after).numbers == {}


def test_numbers_of_a_cpu_are_those_of_its_threads(tmp_path: Path) -> None:
    host, threads = torch.device("cpu"), torch.get_num_threads()
    before = number_path(tmp_path, host, "workspaces")
    torch.set_num_threads(threads + 1)
    try:
        assert number_path(tmp_path, host, "workspaces") != before
    finally:
        torch.set_num_threads(threads)


def test_numbers_that_are_added_together_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "numbers.json", list[Path]()

    def write(to: Path, text: str) -> None:
        written.append(to)
        write_whole(to, text)

    monkeypatch.setattr(number_file, "write_whole", write)
    with written_together():
        file = NumberFile(path)
        for number in range(10):
            file.add(f"{number}", float(number))
        NumberFile(path).add("theirs", 0.5)
        assert (len(file.numbers), written) == (10, [])
    assert written == [path, path]
    assert len(NumberFile(path).numbers) == 11
