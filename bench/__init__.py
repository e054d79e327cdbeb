"""Measuring a running server from outside, over HTTP alone."""
