"""The client of a coordinator: its requests, and the answers it waits for."""
