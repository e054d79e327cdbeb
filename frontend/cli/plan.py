"""`tercet plan MODEL_DIR`: what a choice of blocks needs, shown before any weights are read."""

from __future__ import annotations

from frontend.cli.tool import Tool

TOOL = Tool("plan", "model_executor.tools.plan", "show what a choice of blocks needs: classes, files, bytes, operators")
MODULE, add_parser, run = TOOL.module, TOOL.add_parser, TOOL.run
