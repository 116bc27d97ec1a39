"""The engine that runs Data-Juicer recipes and accounts for every row, and this workflow's own operators."""
