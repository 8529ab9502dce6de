"""Host slots and their labels, in memory that outlives the process."""
