"""Benchmarks of one op, of whole models, and of what a calibration needs."""
