"""Flags -> settings -> the parts, put together."""


def main() -> int:
    return 0
