"""Writes the generated pages anew: `python -m tests.docs`."""

from __future__ import annotations

from tests.docs.configuration_page import PAGE, configuration_page


def main() -> None:
    """Write them."""
    PAGE.write_text(configuration_page(), "utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
