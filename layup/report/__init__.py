"""Reports: what a person looks at to see and trust a plan: the waterfall, the comparison of policies, and ``report.html``."""

from __future__ import annotations

from layup.report.compare import Comparison, Row, compare
from layup.report.compare import text as comparison_text
from layup.report.document import read_data, render, report_data, write_report
from layup.report.waterfall import Stage, waterfall
from layup.report.waterfall import text as waterfall_text

__all__ = [
    "Comparison", "Row", "Stage", "compare", "comparison_text", "read_data", "render", "report_data", "waterfall",
    "waterfall_text", "write_report",
]  # fmt: skip
