"""Tests of frontend.proof."""
