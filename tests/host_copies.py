"""Copies to host memory and back that have arrived, and what a trace says of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from benchmarks import copying
from benchmarks.copying import CopyRecord
from fxremat.runtime import host_memory
from fxremat.runtime.copies import to_device, to_host, wait_device, wait_host

CPU = torch.device("cpu")
ON_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
DEVICES = ["cpu", *ON_GPU]
TENTH = torch.zeros(25_000)  # 100 kB: a tenth of a second at 1 MB/s
RANDOM = torch.Generator().manual_seed(0)


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that take none from other tests."""
    return torch.randn(*size, dtype=dtype, generator=RANDOM)


LAYOUTS: dict[str, torch.Tensor] = {
    "float32": random(5, 7),
    "bfloat16": random(5, 7).bfloat16(),
    "int64": torch.arange(35).view(5, 7),
    "bool": torch.arange(35).view(5, 7) % 3 == 0,
    "complex": random(5, 7, dtype=torch.complex64),
    "conjugated": random(5, 7, dtype=torch.complex64).conj(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(4, 0, 3),
    "transposed": random(5, 7).t(),
    "permuted": random(2, 3, 4, 5).permute(0, 3, 1, 2),
    "sliced": random(5, 7)[1:4, 2::2],
    "expanded": random(5, 1).expand(5, 7),
}


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves host memory held by copies, and none counts what others left."""
    own = host_memory.HostMemory()
    monkeypatch.setattr(host_memory, "HOST_MEMORY", own)
    yield
    if copying.host_bytes().now_bytes:
        gc.collect()  # what pytest keeps of an error that was expected
    assert copying.host_bytes().now_bytes == 0


def sent(x: torch.Tensor) -> torch.Tensor:
    """``x`` in host memory, arrived."""
    host: torch.Tensor = to_host(x)
    wait_host(host, x)
    return host


def fetched(host: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """``host`` on the device, arrived."""
    x: torch.Tensor = to_device(host, torch.device(device))
    wait_device(x, host)
    return x


def of(records: list[CopyRecord], what: str) -> list[CopyRecord]:
    return [record for record in records if record.what == what]
