"""Captioners, the files of their captions, and prompts, questions and checks for texts that models write."""
