"""Sections of the report, each made from the files of one kind of stage."""
