"""Features: further targets, each in a folder of its own; the core imports none of them, nor does another feature."""
