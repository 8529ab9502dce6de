"""What engine, coordinator and workers say to each other, and how it is written and delivered."""
