"""Reports: what a person looks at to see and trust a plan. ``waterfall`` and its text, and ``report.html``."""

from __future__ import annotations

from layup.report.document import read_data, render, report_data, write_report
from layup.report.waterfall import Stage, text, waterfall

__all__ = ["Stage", "read_data", "render", "report_data", "text", "waterfall", "write_report"]
