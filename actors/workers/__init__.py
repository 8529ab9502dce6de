"""The workers' side: the actor of a rank, how it is made, supervised and replaced."""
