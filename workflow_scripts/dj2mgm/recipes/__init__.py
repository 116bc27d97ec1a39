"""Recipes, parsed and checked against the catalogue of operators."""
