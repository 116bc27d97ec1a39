"""Bytes as people write them."""

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of "500.00 MiB", as PyTorch prints sizes."""
    number, unit = text.split()
    return round(float(number) * UNITS[unit])


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
