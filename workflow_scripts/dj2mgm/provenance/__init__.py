"""Provenance: a finished run as an RO-Crate that says how its figures came about, and that run made again from it."""
