"""The Ray side of the package. Filled in below as modules appear."""
