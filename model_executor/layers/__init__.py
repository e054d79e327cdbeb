"""The parts a decoder is made of."""
