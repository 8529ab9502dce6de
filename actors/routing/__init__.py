"""Who should serve a prompt: replicas, followed by their cache events."""
