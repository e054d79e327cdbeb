"""The frontend: HTTP, text, tokenizers and the Python client. No torch."""
