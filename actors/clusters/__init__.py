"""A cluster on Ray as its user sees it: launched, asked, and taken down."""
