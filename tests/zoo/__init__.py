"""Tiny models of many architectures, most of them from `transformers`: compiled for two and three ranks, and held to the plain step on one device."""
