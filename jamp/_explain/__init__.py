"""`jamp.explain` and its reports: figures, text, pages and data."""

from jamp._explain.report import Report as Report
from jamp._explain.report import explain as explain
