"""`tercet parity MODEL_DIR`: the production path against a reference engine on the same checkpoint."""

from __future__ import annotations

from frontend.cli.tool import Tool

TOOL = Tool("parity", "model_executor.tools.parity", "compare tokens and errors of each block with transformers")
MODULE, add_parser, run = TOOL.module, TOOL.add_parser, TOOL.run
