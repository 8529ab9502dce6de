"""The dashboard: pictures, the server, and the page in a browser."""
