"""Proving a served model: a server of one's own, requests for every path, and what its answers and traces show."""
