"""Report on runs: an HTML page, figures, and a table for the terminal.

write_report(records.find([Path("runs/mine")]), Path("report.html"), "Muon and SODA")
"""

from .page import Page, write_report
from .terminal import comparison_table

__all__ = ["Page", "comparison_table", "write_report"]
