"""`tercet cut SRC OUT --layers ...`: some blocks of a checkpoint as a checkpoint of its own."""

from __future__ import annotations

from frontend.cli.tool import Tool

TOOL = Tool("cut", "model_executor.tools.cut", "write a checkpoint of some blocks of another")
MODULE, add_parser, run = TOOL.module, TOOL.add_parser, TOOL.run
