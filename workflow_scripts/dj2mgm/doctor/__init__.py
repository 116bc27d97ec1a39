"""Whether this machine can train: what it has, what fits it, and what to change."""
