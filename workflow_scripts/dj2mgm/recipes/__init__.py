"""Data-Juicer recipes: parsed into typed steps and checked against the catalogue of operators."""
