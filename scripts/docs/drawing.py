"""Sizes and colours of all pictures of the documentation."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 7.2  # inches: 691 pixels, about the width of a page's text
SMALLEST = 9.0  # size of the smallest text in points: 12 pixels, unless a page scales the picture

# In all pictures, the same thing has the same colour.
STEP, SYNC, WAIT = "#7fb2e5", "#f28e2b", "#c8c8c8"
NEAR = "#e3c21f"  # a sync among the devices of one worker
GLOBAL, MEAN, INK = "#8e44ad", "#606060", "#222222"
REPLICAS = ("#1f77b4", "#2ca02c", "#d62728", "#8c6d31")
CURVES = ("#35b0a5", "#01665e", "#7a3b00", "#c2185b")  # lines in charts that do not use REPLICAS
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 96,
    "svg.fonttype": "none",
    "svg.hashsalt": "tfpara",
    "text.color": INK,
}
