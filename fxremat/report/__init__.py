"""What the user sees: the report of each compiled graph, and what writes it into files."""

from fxremat.report.chrome_trace import write_chrome_trace
from fxremat.report.report import EXPORTERS
from fxremat.report.snapshot import write_snapshot

EXPORTERS.update(trace=write_chrome_trace, snapshot=write_snapshot)
