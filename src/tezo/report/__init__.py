"""A page about runs: one HTML file that needs nothing else, from the files of run folders."""

from tezo.report.page import save as save
