"""Analysis of a dataset: the statistics of every row, and the rows that each limit of a recipe drops."""
