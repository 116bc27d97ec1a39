"""The engine that runs Data-Juicer recipes, and this workflow's own operators."""
