# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Sphinx: `sphinx-build -W --keep-going -b html docs out/docs`. Pages are MyST Markdown."""

from __future__ import annotations

project = "megatron_hdp"
author = "The megatron_hdp authors"
copyright = "2026, The megatron_hdp authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True  # a link that leads nowhere is a warning, and -W makes it an error

html_theme = "alabaster"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_theme_options = {
    "description": "Hybrid Data Parallelism on released Megatron-Core",
    "page_width": "1240px",
    "body_max_width": "none",
    "code_font_size": "0.8em",
    "sidebar_width": "240px",
    "fixed_sidebar": True,
    "show_powered_by": False,
}
html_copy_source = False
