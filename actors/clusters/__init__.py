"""A cluster on Ray as its user sees it: launch, inspect, stop."""
