"""Reports: one self-contained HTML page about a run, or about several.

``verdicts`` writes sentences about a run, with their numbers. ``reproduction`` writes the commands
that reproduce it. ``page`` adds facts, tables and figures, and renders ``page.html``. ``runs_page``
renders the comparison of several runs.
"""

from trajstore.analysis.report.page import write_report
from trajstore.analysis.report.runs_page import write_runs_report

__all__ = ["write_report", "write_runs_report"]
