"""What processes say to each other. A leaf: stdlib, msgspec and pyzmq only."""
