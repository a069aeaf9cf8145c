"""Bytes for people."""


def format_bytes(size: int) -> str:
    """Return a number of bytes in decimal units: 934 kB, 1.8 MB."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return (
                f"{value:.0f} {unit}" if value >= 10 or unit == "bytes" else f"{value:.1f} {unit}"
            )
        value /= 1000
    return f"{value:.1f} TB"
