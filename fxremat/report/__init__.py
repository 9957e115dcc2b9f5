"""What the user sees: the report of each compiled graph, and what writes it into files."""

from fxremat.report.exports import write_chrome_trace, write_snapshot
from fxremat.report.report import EXPORTERS

EXPORTERS.update(trace=write_chrome_trace, snapshot=write_snapshot)
