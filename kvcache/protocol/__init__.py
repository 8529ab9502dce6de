"""Messages between engine, coordinator and workers: their content, encoding and delivery."""
