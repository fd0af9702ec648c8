"""A run, or several, as one page of HTML that needs nothing else.

``verdicts`` are sentences about a run, with the numbers that carry them; ``reproduction`` has the
commands that make the run again; ``page`` puts them together with facts, tables and figures, and
fills the template beside it; ``runs_page`` does so with the comparison of several runs.
"""

from trajstore.analysis.report.page import write_report
from trajstore.analysis.report.runs_page import write_runs_report

__all__ = ["write_report", "write_runs_report"]
