"""Tests of the Python scripts."""
