"""Command line: entry points, messages, the console, and the lock of a run."""
