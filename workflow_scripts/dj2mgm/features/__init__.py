"""Further targets, each in a folder of its own, which the core and other features do not import."""
