"""Leaderboard: all finished experiments of a folder of results, on one page that sorts and filters them."""
