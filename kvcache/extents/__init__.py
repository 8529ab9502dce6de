"""The fast core: the prefix cache as a tree of runs of blocks, running requests as dense rows."""
