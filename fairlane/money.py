"""Amounts of money: whole billionths ("nanos") of one unit of a currency. Never floats."""

NANOS_PER_UNIT = 1_000_000_000
LARGEST_NANOS = 2**63 - 1
"""Most that a record can carry: about 9.2 thousand million units."""


def nanos_text(nanos: int) -> str:
    """Nanos as a decimal number of units, exactly and without trailing zeros: ``0.0001536``."""
    whole, fraction = divmod(abs(nanos), NANOS_PER_UNIT)
    text = f"{whole}.{fraction:09}".rstrip("0").removesuffix(".")
    return f"-{text}" if nanos < 0 else text
