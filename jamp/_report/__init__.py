"""`jamp.explain` and its reports: figures, text, pages and data."""

from jamp._report.report import Report as Report
from jamp._report.report import explain as explain
