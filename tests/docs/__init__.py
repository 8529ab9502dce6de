"""The documentation: generated where it can be, checked where it cannot."""
