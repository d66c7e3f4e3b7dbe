"""Workloads: what is asked in a measurement, read from the files that others publish."""
