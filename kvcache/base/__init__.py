"""Errors, checks of arguments, arrays, time, logs and compiled functions, for all packages."""
