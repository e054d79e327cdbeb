"""The HTTP surface: request bodies in, answers and server-sent events out."""
