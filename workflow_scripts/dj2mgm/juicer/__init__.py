"""Running Data-Juicer recipes with every row accounted for, and this workflow's own operators.

Whatever is imported from here, Data-Juicer can no longer install packages: `library` sees to that first.
"""

from dj2mgm.juicer import data_juicer  # noqa: F401
