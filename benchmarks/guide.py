"""The pages of the guide that are made from the code: options and errors.

python -m benchmarks.guide            write them to docs/guide
"""

import inspect
from pathlib import Path

from fxremat import errors
from fxremat.options import DISABLE_VARIABLE, list_options

FOLDER = Path(__file__).parent.parent / "docs" / "guide"
MADE = "<!-- made by `python -m benchmarks.guide` -->"


def options_page() -> str:
    """What each option is."""
    return f"""# Options

{MADE}

Options go into `torch.compile(model, backend="fxremat", options={{...}})`. Each may also come
from its environment variable. An option that is given comes before its variable, and that before
the default. `fxremat.list_options()` gives this table.

{options_table()}
"""


def options_table() -> str:
    """All options as a Markdown table, ``FXREMAT_DISABLE`` in its last row."""
    head = ["| option | type | default | environment variable | meaning |", "|---|---|---|---|---|"]
    rows = [
        f"| `{row.name}` | {row.type} | {row.default} | {row.variable and f'`{row.variable}`'} "
        f"| {row.doc} |"
        for row in list_options()
    ]
    last = f"| | bool | 0 | `{DISABLE_VARIABLE}` | Compile with plain Inductor, without fxremat. |"
    return "\n".join([*head, *rows, last])


def _kinds() -> list[type[Exception]]:
    """Errors first, then warnings, as they stand in the module."""
    own = [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.FxrematError | UserWarning)
        and value is not errors.FxrematError
        and value.__module__ == errors.__name__
    ]
    return sorted(own, key=lambda kind: issubclass(kind, Warning))


def _section(kind: type[Exception]) -> str:
    text = (inspect.getdoc(kind) or "").replace("``", "`")
    what = "A warning. " if issubclass(kind, Warning) else ""
    return f"## {kind.__name__}\n\n{what}{text}\n"


def errors_page() -> str:
    """What each error means, from its docstring."""
    sections = "\n".join(map(_section, _kinds()))
    return f"""# Errors and warnings

{MADE}

Each message says what happened and what to do. Through `torch.compile` an error arrives as
`BackendCompilerFailed`, and its `.inner_exception` is one of these. All errors are
subclasses of `fxremat.FxrematError`.

{sections}"""


PAGES = {"options.md": options_page, "errors.md": errors_page}


def main() -> None:
    """Write all of them."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
