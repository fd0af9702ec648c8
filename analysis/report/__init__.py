"""A run as one page of HTML that needs nothing else.

``verdicts`` are sentences about a run, with the numbers that carry them; ``page`` puts them
together with facts, tables and figures, and fills the template beside it.
"""

from trajstore.analysis.report.page import write_report

__all__ = ["write_report"]
