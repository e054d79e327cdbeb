"""Programs that work on model folders without a server, most of them without torch."""
