"""Benchmarks: loads through HTTP and through ZeroMQ, costs of single parts, comparisons, records and the ledger."""
