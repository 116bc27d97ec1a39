"""Finished runs as RO-Crates: code, configuration, inputs, jobs and results behind a report."""
