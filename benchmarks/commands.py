"""What the commands of the benchmarks share: their parsers, and the files that they write."""

import argparse
import json
from pathlib import Path
from typing import Any


def parser_for(module: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a module that is run, whose text is its help, as it stands."""
    shown = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=about, formatter_class=shown)


def write_json(path: Path, data: Any) -> None:
    """Write a file of JSON, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
