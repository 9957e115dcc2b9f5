"""``info``: versions, devices, caches and settings: what a report of a bug needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxremat.cli.arguments import Commands
from fxremat.option_values import machine_memory_bytes
from fxremat.options import DISABLE_VARIABLE, list_options
from fxremat.sizes import format_bytes
from fxremat.version import __version__, cache_folder

PACKAGES = ("torch", "triton", "highspy", "transformers")


def add(commands: Commands) -> None:
    parser = commands.add_parser("info", help="versions, devices, caches, and what is set")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Look and print."""
    parts = versions, devices, support, caches, settings
    found = {part.__name__: part() for part in parts}
    print(json.dumps(found, indent=1) if given.json else text_of(found))
    return 0


def versions() -> dict[str, str]:
    """Of what is installed of the packages that matter; of torch with what it was built for."""
    import torch

    found = {"fxremat": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"torch": str(torch.__version__)}


def devices() -> list[dict[str, Any]]:
    """Each device that steps are planned for, with its memory; the CPU is the last."""
    import torch

    found: list[dict[str, Any]] = []
    for k in range(torch.cuda.device_count() if torch.version.cuda else 0):
        free, total = torch.cuda.mem_get_info(k)
        name = torch.cuda.get_device_name(k)
        found.append({"name": f"cuda:{k} {name}", "bytes": total, "free_bytes": free})
    with suppress(AttributeError, ValueError, OSError):  # Windows does not tell
        found.append({"name": "cpu", "bytes": machine_memory_bytes()})
    return found


def support() -> dict[str, str]:
    """What can be done on each kind of device, here."""
    import torch

    no = "not supported"
    lacks_triton = "triton" not in versions()
    planned = "pip install 'fxremat[absent]'" if lacks_triton else "yes, by --device NAME"
    kinds: dict[str, tuple[str, Callable[[], bool]]] = {
        "ROCm": ("not tried", lambda: torch.version.hip is not None),
        "XPU": (no, torch.xpu.is_available),
        "MPS": (no, torch.backends.mps.is_available),
        "Windows": ("not supported; Linux is", lambda: sys.platform == "win32"),
    }
    here = bool(torch.version.cuda) and torch.cuda.is_available()
    found = {"CPU": "yes", "CUDA": "yes" if here else "yes, and there is none here"}
    found["cards that are not here"] = planned
    return found | {
        name: f"{said}, and this is one" if is_here() else said
        for name, (said, is_here) in kinds.items()
    }


def caches() -> list[dict[str, Any]]:
    """What is kept on disk, and how large it is."""
    from fxremat.compat.configuration import cache_directory

    own = cache_directory()
    places = {
        "Inductor's code": own.parent,
        "plans, reports, times (part of it)": own,
        "digests of sources": cache_folder(),
    }
    return [
        {"what": what, "path": str(path), "bytes": _size(path)} for what, path in places.items()
    ]


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # others may empty it meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def settings() -> dict[str, str]:
    """Our environment variables that are set; one that means nothing says so."""
    known = {row.variable for row in list_options()} | {DISABLE_VARIABLE}
    found = {name: value for name, value in os.environ.items() if name.startswith("FXREMAT_")}
    unknown = {name: f"{found[name]} (there is no such option)" for name in found.keys() - known}
    return dict(sorted((found | unknown).items()))


def text_of(found: dict[str, Any]) -> str:
    """A block of lines for each part."""
    parts = {
        "versions": list(found["versions"].items()),
        "devices": [(one["name"], _memory(one)) for one in found["devices"]],
        "support": list(found["support"].items()),
        "caches": [
            (one["what"], f"{format_bytes(one['bytes'])} in {one['path']}")
            for one in found["caches"]
        ],
        "settings": list(found["settings"].items()) or [("FXREMAT_...", "none is set")],
    }
    lines: list[str] = []
    for title, rows in parts.items():
        width = max(map(len, (name for name, _ in rows)), default=0)
        lines += [title, *(f"  {name:{width}}  {text}" for name, text in rows)]
    return "\n".join(lines)


def _memory(device: dict[str, Any]) -> str:
    free = f", {format_bytes(device['free_bytes'])} free" if "free_bytes" in device else ""
    return format_bytes(device["bytes"]) + free
