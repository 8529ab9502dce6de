"""The routers of kvcache: scores, followers, the actor."""
