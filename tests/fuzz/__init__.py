"""Random train steps held to the oracle: a vocabulary, plain descriptions, strategies that draw them, and two ways to run the ranks."""
