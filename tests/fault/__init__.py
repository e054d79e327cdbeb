"""Faults of every kind at every moment, on real processes: nothing is lost, nothing is left."""
