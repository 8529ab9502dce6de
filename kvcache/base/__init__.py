"""Errors, checks of arguments, arrays, time, logs and compiled functions: what all packages use."""
