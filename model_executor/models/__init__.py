"""What a model is: its configuration, read without torch, and the decoder built from it."""
